from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.bucket import Bucket

KBYTE_PER_S = 8000.0
"""Bits a second, at which 1000 bytes take one second."""


def test_a_burst_passes_at_once_and_what_follows_at_the_rate() -> None:
    bucket = Bucket(KBYTE_PER_S, 500)
    assert bucket.take(300, 10.0) == 0.0
    assert bucket.take(200, 10.0) == 0.0
    assert bucket.take(250, 10.0) == 0.25
    assert bucket.take(250, 10.25) == 0.25


def test_a_frame_larger_than_the_burst_passes_in_the_end() -> None:
    bucket = Bucket(KBYTE_PER_S, 500)
    assert bucket.take(4500, 0.0) == 4.0
    assert bucket.take(1000, 4.0) == 1.0


def test_a_pause_saves_up_no_more_than_the_burst() -> None:
    bucket = Bucket(KBYTE_PER_S, 500)
    bucket.take(500, 0.0)
    assert bucket.take(500, 0.25) == 0.25
    assert bucket.take(600, 3600.0) == pytest.approx(0.1)


def test_what_is_given_back_is_there_for_the_next() -> None:
    bucket = Bucket(KBYTE_PER_S, 500)
    assert bucket.take(1500, 0.0) == 1.0
    bucket.give_back(1500)
    assert bucket.take(500, 0.0) == 0.0
    bucket.give_back(500)
    bucket.give_back(500)
    assert bucket.take(600, 0.0) == pytest.approx(0.1)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(KBYTE_PER_S, 500)
    assert bucket.take(500, 10.0) == 0.0
    assert bucket.take(100, 5.0) == 0.1
    assert bucket.take(100, 10.0) == 0.2


frames = st.lists(
    st.tuples(
        st.floats(0, 5),  # seconds from one asking to the next, whether or not that has passed yet
        st.integers(1, 5000),  # bytes
        st.floats(0, 0.99),  # the share of its wait after which it is given up, if it is
    ),
    max_size=30,
)


def run(bucket: Bucket, asked: list[tuple[float, int, float]], patient: bool) -> list[tuple[float, int]]:
    """Let frames ask a bucket, and unless patient some that have to wait give up; return who passed when."""
    now_s = 0.0
    passed: list[tuple[float, int]] = []
    leaving: list[tuple[float, int]] = []
    for pause_s, size_bytes, share in asked:
        now_s += pause_s
        while leaving and leaving[0][0] <= now_s:
            bucket.give_back(heapq.heappop(leaving)[1])
        wait_s = bucket.take(size_bytes, now_s)
        if wait_s > 0 and len(passed) > len(leaving) and not patient:
            heapq.heappush(leaving, (now_s + share * wait_s, size_bytes))
        else:
            passed.append((now_s + wait_s, size_bytes))
    return sorted(passed)


@given(rate=st.floats(100, 1e6), burst=st.integers(0, 3000), asked=frames)
def test_no_interval_sees_more_than_rate_and_burst_and_one_frame(
    rate: float, burst: int, asked: list[tuple[float, int, float]]
) -> None:
    passed = run(Bucket(rate, burst), asked, patient=True)
    assert len(passed) == len(asked)
    for first, (start_s, frame_bytes) in enumerate(passed):
        for last in range(first, len(passed)):
            bound = rate / 8 * (passed[last][0] - start_s) + burst + frame_bytes
            assert sum(size for _, size in passed[first : last + 1]) <= bound * (1 + 1e-9) + 1e-3


@given(rate=st.floats(100, 1e6), burst=st.integers(0, 3000), asked=frames)
def test_from_the_start_no_more_than_rate_and_burst_passes_whoever_gives_up(
    rate: float, burst: int, asked: list[tuple[float, int, float]]
) -> None:
    total = 0
    for now_s, size_bytes in run(Bucket(rate, burst), asked, patient=False):
        total += size_bytes
        assert total <= (rate / 8 * now_s + burst) * (1 + 1e-9) + 1e-3


@given(rate=st.floats(100, 1e6), burst=st.integers(0, 3000), asked=frames)
def test_who_waits_passes_as_early_as_the_rate_allows(
    rate: float, burst: int, asked: list[tuple[float, int, float]]
) -> None:
    bucket, now_s, ahead_s = Bucket(rate, burst), 0.0, 0.0
    for pause_s, size_bytes, _ in asked:
        now_s += pause_s
        wait_s = bucket.take(size_bytes, now_s)
        assert wait_s <= max(0.0, ahead_s - now_s) + size_bytes / (rate / 8) * (1 + 1e-9)
        ahead_s = now_s + wait_s
