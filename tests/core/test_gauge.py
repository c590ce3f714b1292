"""What a link is taken for, against links whose rate is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.gauge import HOPE, MEETINGS, PARTNERS, START_BITS_PER_S, STRETCH_S, Gauge, Line

MBIT_PER_S = 1e6


@dataclass
class Link:
    """A way there that takes bits_per_s, one frame after another, and a way back of which only the delay counts.

    tell_s: the partner says no more often how much has arrived. rtt_s: of both ways, without queues.
    """

    bits_per_s: float
    rtt_s: float
    frame_bytes: int
    tell_s: float = 0.05

    def news(self, frames: int, began_s: float = 0.0) -> Iterator[tuple[float, int]]:
        """Yield when is heard, on this side, how many bytes of so many frames have arrived; all are said at once."""
        frame_s, told_s, arrived = 8 * self.frame_bytes / self.bits_per_s, 0.0, 0
        while arrived < frames:
            told_s = max((arrived + 1) * frame_s, told_s + self.tell_s)
            arrived = min(frames, int(told_s / frame_s + 1e-9))
            yield began_s + told_s + self.rtt_s, arrived * self.frame_bytes

    def frames_in(self, seconds: float) -> int:
        return max(1, round(seconds * self.bits_per_s / 8 / self.frame_bytes))


links = st.builds(
    Link,
    bits_per_s=st.floats(5, 9).map(lambda exponent: 10**exponent),
    rtt_s=st.floats(0.0005, 0.6),
    frame_bytes=st.integers(2**10, 2**20),
    tell_s=st.floats(0.05, 2),
)


def measured(link: Link, frames: int) -> Gauge:
    gauge, size = Gauge(), frames * link.frame_bytes
    gauge.said(0.0, 0, 0)
    for now_s, arrived in link.news(frames):
        gauge.arrived(now_s, arrived, size)
    return gauge


@given(links)
def test_a_long_transfer_measures_its_link(link: Link) -> None:
    frame_s = 8 * link.frame_bytes / link.bits_per_s
    gauge = measured(link, link.frames_in(10 * (link.rtt_s + link.tell_s + frame_s)) + 1)
    rate = gauge.measure if gauge.measure is not None else gauge.bound
    assert rate == pytest.approx(link.bits_per_s, rel=0.1)


@given(links, st.integers(1, 40))
def test_a_short_one_is_a_bound_and_a_longer_one_a_measure(link: Link, frames: int) -> None:
    gauge, end_s = measured(link, frames), list(link.news(frames))[-1][0]
    assert (gauge.measure is None) == (end_s < STRETCH_S)
    assert gauge.bits_per_s is not None


@given(
    links,
    st.lists(
        st.tuples(
            st.integers(1, 60),  # frames
            st.floats(0, 3),  # seconds until the next ones are said, once all of these are there
            st.lists(st.floats(0, 2), min_size=1),  # how much later than on time the news come
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.floats(0, 100), max_size=40),  # when the partner says something else
)
def test_no_link_is_ever_taken_for_faster_than_it_is(
    link: Link, transfers: list[tuple[int, float, list[float]]], others_s: list[float]
) -> None:
    """However late the news come, and however many at once."""
    gauge, now_s, before = Gauge(), 0.0, 0
    others = sorted(others_s)
    for frames, pause_s, delays_s in transfers:
        gauge.said(now_s, before, before)
        size, arrived, heard_s = before + frames * link.frame_bytes, before, now_s
        for number, (time_s, more) in enumerate(link.news(frames, now_s)):
            heard_s = max(heard_s, time_s + delays_s[number % len(delays_s)])
            while others and others[0] < heard_s:
                gauge.arrived(max(now_s, others.pop(0)), arrived, size)
            arrived = before + more
            gauge.arrived(heard_s, arrived, size)
        now_s, before = heard_s + pause_s, size
    for rate in (gauge.measure, gauge.bound):
        assert rate is None or 0 < rate <= link.bits_per_s * 1.001


def test_what_the_partner_says_of_other_things_is_no_news() -> None:
    gauge = Gauge()
    gauge.said(0.0, 0, 0)
    for tick in range(1, 100):
        gauge.arrived(0.1 * tick, 0, 1000)
    assert gauge.bits_per_s is None
    gauge.arrived(10.0, 1000, 1000)
    assert gauge.measure == 800.0


def test_a_pause_in_which_nothing_was_on_its_way_does_not_count() -> None:
    gauge = Gauge()
    for began_s, there in ((0.0, 1000), (3600.0, 2000)):
        gauge.said(began_s, there - 1000, there - 1000)
        gauge.arrived(began_s + 1, there, there)
    assert gauge.measure == 8000.0


def test_news_at_the_moment_of_saying_divide_by_nothing() -> None:
    gauge = Gauge()
    gauge.said(5.0, 0, 0)
    gauge.arrived(5.0, 100, 100)
    assert gauge.bits_per_s is None


@given(links, st.floats(0.1, 0.9), st.integers(8, 40))
def test_a_link_that_waits_for_us_shows_a_bound_only(link: Link, share: float, frames: int) -> None:
    """A source of a part of its rate, a frame at a time: there is room on the link between any two of them."""
    frame_s = 8 * link.frame_bytes / link.bits_per_s
    gauge = Gauge(link.rtt_s + frame_s)
    said_s = [number * frame_s / share for number in range(frames)]
    times = sorted([(t, True) for t in said_s] + [(t + frame_s + link.rtt_s, False) for t in said_s])
    said = arrived = 0
    for now_s, ours in times:
        if ours:
            gauge.said(now_s, arrived, said)
            said += link.frame_bytes
            gauge.pause(said - arrived)
        else:
            arrived += link.frame_bytes
            gauge.arrived(now_s, arrived, said)
    assert gauge.measure is None
    assert gauge.bound is not None
    assert gauge.bound <= link.bits_per_s * 1.001


def test_what_is_said_after_a_pause_of_ours_measures_the_link_again() -> None:
    gauge = Gauge(0.3)
    gauge.said(0.0, 0, 0)
    gauge.arrived(0.5, 50, 100)
    gauge.pause(50)  # at 100 bytes a second, 60 are not yet twice a round trip's
    gauge.said(1.0, 50, 100)  # 100 bytes at first, of which 50 are still on their way
    gauge.pause(5050)
    gauge.arrived(2.0, 1100, 5100)
    assert gauge.measure is None  # not long enough
    gauge.arrived(4.0, 3100, 5100)
    assert gauge.measure == 8 * 1000  # what was said before does not count
    assert gauge.bound == 8 * 3100 / 4


def showed(measure: float | None = None, bound: float | None = None) -> Gauge:
    gauge = Gauge()
    gauge.measure, gauge.bound = measure, bound
    return gauge


def test_a_line_is_what_it_is_taken_for_until_something_is_known() -> None:
    line = Line()
    line.met("ben", Gauge(), 0.02)
    assert line.bits_per_s == line.to("ben") == START_BITS_PER_S


@pytest.mark.parametrize(("kind", "times"), [("measure", 1), ("bound", HOPE)])
def test_a_line_rises_at_once(kind: str, times: float) -> None:
    line = Line(10 * MBIT_PER_S)
    line.met("ben", showed(**{kind: 300 * MBIT_PER_S}), 0.02)
    assert line.bits_per_s == line.to("ben") == times * 300 * MBIT_PER_S


def test_once_it_was_full_a_line_is_what_it_was_seen_to_carry() -> None:
    line = Line()
    line.met("ben", showed(measure=20 * MBIT_PER_S), 0.02)
    line.met("ben", showed(bound=15 * MBIT_PER_S), 0.02)
    assert line.bits_per_s == line.to("ben") == 20 * MBIT_PER_S
    for _ in range(MEETINGS):  # it is long since
        line.met("ben", showed(bound=15 * MBIT_PER_S), 0.02)
    assert line.bits_per_s == HOPE * 15 * MBIT_PER_S


def test_a_first_measure_replaces_what_was_only_thought() -> None:
    line = Line(10 * MBIT_PER_S)
    line.met("ben", showed(measure=2 * MBIT_PER_S), 0.02)
    assert line.bits_per_s == 2 * MBIT_PER_S


def test_a_slow_partner_is_no_slow_line_but_many_are() -> None:
    line = Line()
    line.met("fast", showed(measure=100 * MBIT_PER_S), 0.02)
    for number in range(MEETINGS):
        assert line.bits_per_s == 100 * MBIT_PER_S
        line.met(f"slow{number}", showed(measure=3 * MBIT_PER_S), 0.02)
    assert line.bits_per_s == 3 * MBIT_PER_S
    assert line.to("fast") == 100 * MBIT_PER_S
    assert line.to("slow0") == 3 * MBIT_PER_S


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=60))
def test_bounds_never_let_a_line_fall(rates: list[float]) -> None:
    line, most = Line(MBIT_PER_S), MBIT_PER_S
    for rate in rates:
        line.met("ben", showed(bound=rate), 0.02)
        most = max(most, HOPE * rate)
        assert line.bits_per_s == line.to("ben") == most


@given(st.lists(st.tuples(st.none() | st.floats(1, 1e9), st.none() | st.floats(1, 1e9)), max_size=60))
def test_a_line_is_at_least_what_its_last_meetings_showed(shown: list[tuple[float | None, float | None]]) -> None:
    line, seen = Line(MBIT_PER_S), []
    for measure, bound in shown:
        gauge = showed(measure, bound)
        line.met("ben", gauge, 0.02)
        seen += [rate for rate in [gauge.bits_per_s] if rate is not None]
        assert line.bits_per_s >= max(seen[-MEETINGS:], default=MBIT_PER_S)


def test_the_round_trip_is_the_median_partners() -> None:
    line = Line()
    assert line.rtt_s == 0.0
    for name, rtt_s in (("near", 0.01), ("far", 0.3), ("between", 0.05), ("far", 0.2)):
        line.met(name, showed(bound=MBIT_PER_S), rtt_s)
    assert line.rtt_s == 0.05


def test_no_number_of_partners_or_meetings_fills_the_memory() -> None:
    line = Line()
    for number in range(10 * PARTNERS):
        line.met(f"peer{number}", showed(measure=MBIT_PER_S), 0.02)
    assert len(line._ways) == PARTNERS
    assert len(line._seen) == MEETINGS
    assert line.to("peer0") == line.bits_per_s
