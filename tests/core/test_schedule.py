"""The learning rate over a run: closed-form points, continuity, monotonicity."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.core.schedule import Kind, Schedule, check, factor

COSINE = Schedule("cosine", 4, 0, 0.1)
WSD = Schedule("wsd", 4, 10, 0.1)
CONSTANT = Schedule("constant", 4, 0, 0.1)


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        *((schedule, 0.0, 0.0) for schedule in (COSINE, WSD, CONSTANT)),
        *((schedule, 1.0, 0.25) for schedule in (COSINE, WSD, CONSTANT)),
        *((schedule, 2.5, 0.625) for schedule in (COSINE, WSD, CONSTANT)),
        *((schedule, 4.0, 1.0) for schedule in (COSINE, WSD, CONSTANT)),
        (COSINE, 12.0, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the way from 4 to 36
        (COSINE, 20.0, 0.55),
        (COSINE, 28.0, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (COSINE, 36.0, 0.1),
        (COSINE, 99.0, 0.1),
        (WSD, 26.0, 1.0),
        (WSD, 28.5, 0.775),
        (WSD, 31.0, 0.55),
        (WSD, 36.0, 0.1),
        (WSD, 99.0, 0.1),
        (CONSTANT, 36.0, 1.0),
        (CONSTANT, 99.0, 1.0),
    ],
)
def test_the_factor_at_points_that_are_known(schedule: Schedule, progress: float, expected: float) -> None:
    assert factor(schedule, 36, progress) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_a_warm_up_the_first_step_has_the_full_rate(kind: Kind) -> None:
    assert factor(Schedule(kind, 0, 2, 0.0), 10, 0.0) == 1.0


@given(
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    rounds=st.integers(2, 1000),
    shares=st.tuples(st.floats(0, 0.49), st.floats(0, 0.5)),
    floor=st.floats(0, 1),
    at=st.floats(0, 1.2),
)
@settings(deadline=None)
def test_the_factor_rises_to_1_then_falls_to_the_floor_without_a_jump(
    kind: Kind, rounds: int, shares: tuple[float, float], floor: float, at: float
) -> None:
    warmup, decay = shares[0] * rounds + 0.01, shares[1] * rounds + 0.001
    schedule = Schedule(kind, warmup, decay, floor)
    assert check(schedule, rounds)
    progress, tiny = at * rounds, 1e-7
    now, next_ = factor(schedule, rounds, progress), factor(schedule, rounds, progress + tiny)
    assert 0 <= now <= 1
    assert abs(next_ - now) < 0.002  # the steepest part is the shortest decay, 1 in 0.001 rounds
    if progress + tiny < warmup:
        assert next_ >= now
    elif progress > warmup:
        assert next_ <= now
        assert now >= min(floor, 1.0) - 1e-12


@pytest.mark.parametrize(
    ("schedule", "rounds", "reason", "quoted"),
    [
        (Schedule("cosine", -1, 0, 0), 10, "warmup", "warmup_rounds is -1"),
        (Schedule("cosine", math.nan, 0, 0), 10, "warmup", "warmup_rounds is nan"),
        (Schedule("cosine", 10, 0, 0), 10, "warmup", "leaves nothing of 10 rounds"),
        (Schedule("wsd", 1, -2, 0), 10, "decay", "decay_rounds is -2"),
        (Schedule("wsd", 1, math.inf, 0), 10, "decay", "decay_rounds is inf"),
        (Schedule("wsd", 6, 5, 0), 10, "decay", "warmup_rounds 6 and decay_rounds 5 exceed 10 rounds"),
        (Schedule("wsd", 1, 2, -0.1), 10, "floor", "floor is -0.1"),
        (Schedule("constant", 1, 2, 1.1), 10, "floor", "floor is 1.1"),
        (Schedule("constant", 1, 2, math.nan), 10, "floor", "floor is nan"),
    ],
)
def test_a_schedule_that_does_not_fit_its_run_is_refused(
    schedule: Schedule, rounds: int, reason: str, quoted: str
) -> None:
    decision = check(schedule, rounds)
    assert not decision
    assert decision.reason == reason
    assert quoted in decision.detail


@pytest.mark.parametrize(
    ("schedule", "rounds"),
    [(Schedule("cosine", 9, 99, 0), 10), (Schedule("wsd", 6, 4, 1), 10), (Schedule("constant", 20, 20, 0), 10)],
)
def test_a_schedule_that_just_fits_is_allowed(schedule: Schedule, rounds: int) -> None:
    assert check(schedule, rounds)
