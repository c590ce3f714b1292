"""One direction of a line against times by hand and against what must hold for any packets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wan.direction import Direction
from tests.wan.lines import Line

SIZE = 1500
MBIT = 12.0
TAKES_S = 0.001
"""1500 bytes at 12 Mbit/s."""

ARRIVALS = st.lists(st.tuples(st.floats(0, 0.01), st.integers(20, SIZE)), max_size=60)
"""Packets as pauses before them, in seconds, and sizes."""


def test_a_packet_takes_its_size_over_the_bandwidth_and_then_the_latency() -> None:
    direction = Direction(Line(latency_ms=30), MBIT, "")
    assert direction.cross(5.0, SIZE) == pytest.approx(5.0 + TAKES_S + 0.030)
    assert direction.cross(6.0, SIZE // 3) == pytest.approx(6.0 + TAKES_S / 3 + 0.030)


def test_packets_that_come_at_once_leave_one_after_another() -> None:
    direction = Direction(Line(), MBIT, "")
    assert [direction.cross(1.0, SIZE) for _ in range(3)] == pytest.approx([1.001, 1.002, 1.003])


def test_without_a_limit_nothing_waits() -> None:
    direction = Direction(Line(latency_ms=30, queue_ms=0), math.inf, "")
    assert [direction.cross(1.0, SIZE) for _ in range(3)] == pytest.approx([1.030] * 3)


def test_who_would_wait_longer_than_the_queue_is_dropped_and_takes_no_bandwidth() -> None:
    direction = Direction(Line(queue_ms=10.5), MBIT, "")
    crossed = [direction.cross(0.0, SIZE) for _ in range(20)]
    assert [leaves_s is not None for leaves_s in crossed] == [True] * 11 + [False] * 9
    assert direction.queue_drops == 9
    assert direction.cross(0.011, SIZE) == pytest.approx(0.011 + TAKES_S)


def test_even_without_a_queue_a_packet_may_use_an_idle_line() -> None:
    direction = Direction(Line(queue_ms=0), 0.001, "")
    assert direction.cross(0.0, SIZE) == pytest.approx(12.0)
    assert direction.cross(11.9, SIZE) is None
    assert direction.cross(12.1, SIZE) == pytest.approx(24.1)


@given(ARRIVALS, st.floats(0, 50), st.floats(0.1, 100))
def test_no_packets_pass_faster_than_the_bandwidth_or_wait_longer_than_the_queue(
    arrivals: list[tuple[float, int]], queue_ms: float, mbit: float
) -> None:
    direction, now_s, passed = Direction(Line(queue_ms=queue_ms), mbit, ""), 0.0, []
    for pause_s, size in arrivals:
        now_s += pause_s
        leaves_s = direction.cross(now_s, size)
        if leaves_s is not None:
            assert leaves_s - now_s <= queue_ms / 1000 + size * 8e-6 / mbit + 1e-9
            passed.append((leaves_s, size))
    for (before_s, _), (after_s, size) in pairwise(passed):
        assert after_s - before_s >= size * 8e-6 / mbit - 1e-9
    assert len(passed) + direction.queue_drops == len(arrivals)


@given(ARRIVALS, st.integers(0, 1000))
def test_jitter_delays_and_never_reorders(arrivals: list[tuple[float, int]], seed: int) -> None:
    direction, now_s, last_s = Direction(Line(latency_ms=20, jitter_ms=15), math.inf, str(seed)), 0.0, 0.0
    for pause_s, size in arrivals:
        now_s += pause_s
        leaves_s = direction.cross(now_s, size)
        assert leaves_s is not None
        assert last_s <= leaves_s
        assert now_s + 0.020 - 1e-9 <= leaves_s <= now_s + 0.035 + 1e-9
        last_s = leaves_s


def test_jitter_of_packets_that_are_far_apart_fills_its_range() -> None:
    direction = Direction(Line(jitter_ms=15), math.inf, "")
    delays_ms = sorted(1000 * ((direction.cross(float(n), SIZE) or 0.0) - n) for n in range(1000))
    assert delays_ms[0] < 0.5
    assert delays_ms[500] == pytest.approx(7.5, abs=1.5)
    assert delays_ms[-1] > 14.5


def test_latency_that_falls_lets_nobody_overtake() -> None:
    direction = Direction(Line(latency_ms=100), math.inf, "")
    assert direction.cross(0.0, SIZE) == pytest.approx(0.1)
    direction.adjust(Line(latency_ms=10), math.inf)
    assert direction.cross(0.01, SIZE) == pytest.approx(0.1)
    assert direction.cross(0.2, SIZE) == pytest.approx(0.21)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.3, 1.0])
def test_the_share_of_losses_is_the_one_asked_for_within_five_standard_deviations(loss: float) -> None:
    packets = 20_000
    direction = Direction(Line(loss=loss), math.inf, "seed")
    lost = sum(direction.cross(float(n), SIZE) is None for n in range(packets))
    assert abs(lost - packets * loss) <= 5 * math.sqrt(packets * loss * (1 - loss))
    assert direction.losses == lost


def test_a_lost_packet_has_taken_its_bandwidth() -> None:
    direction = Direction(Line(loss=1.0), MBIT, "")
    assert direction.cross(0.0, SIZE) is None
    direction.adjust(Line(), MBIT)
    assert direction.cross(0.0, SIZE) == pytest.approx(2 * TAKES_S)


def test_chance_is_that_of_the_seed() -> None:
    def crossed(seed: str) -> list[float | None]:
        direction = Direction(Line(loss=0.5, jitter_ms=9), math.inf, seed)
        return [direction.cross(float(n), SIZE) for n in range(100)]

    assert crossed("1") == crossed("1")
    assert crossed("1") != crossed("2")


def test_in_a_blackout_nothing_passes_and_afterwards_all_does() -> None:
    direction = Direction(Line(blackouts=((2.0, 4.0), (6.0, 7.0))), math.inf, "")
    through = [direction.cross(float(second), SIZE) is not None for second in range(9)]
    assert through == [True, True, False, False, True, True, False, True, True]
    assert direction.losses == 3


def test_another_bandwidth_holds_for_the_packets_that_come_then() -> None:
    direction = Direction(Line(), MBIT, "")
    assert direction.cross(0.0, SIZE) == pytest.approx(TAKES_S)
    direction.adjust(Line(), MBIT / 10)
    assert direction.cross(0.0, SIZE) == pytest.approx(11 * TAKES_S)
