"""When a peer asks for a meeting, against a pace that a test sets by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.admit import LONGEST_PATIENCE_MS
from peer.timetable import Timetable


@dataclass
class Walk:
    """A pace that a test sets by hand."""

    round: int = 0
    fraction: float = 0.0
    step_s: float = 0.5
    round_s: float = 60.0
    sensitivity: Mapping[str, float] = field(default_factory=dict)

    def to(self, rounds: float) -> None:
        self.round, self.fraction = int(rounds), rounds % 1


def asked(wanted: float, rounds: int, ticks: int = 100) -> list[float]:
    """Return when, in rounds, a peer asks whose meetings take no time."""
    walk, found = Walk(), []
    timetable = Timetable(walk)
    for tick in range(rounds * ticks):
        walk.to(tick / ticks)
        if timetable.due(wanted, 0):
            timetable.met()
            found.append(tick / ticks)
    return found


@pytest.mark.parametrize("wanted", [1, 2, 3, 8])
def test_meetings_are_spread_over_the_round(wanted: int) -> None:
    expected = [round + (number + 0.5) / wanted for round in range(3) for number in range(wanted)]
    assert asked(wanted, 3) == pytest.approx(expected, abs=0.011)


@given(st.floats(1, 30), st.integers(1, 4))
def test_as_many_a_round_as_fit_whole_into_what_is_wanted(wanted: float, rounds: int) -> None:
    assert len(asked(wanted, rounds)) == rounds * int(wanted)


@pytest.mark.parametrize("every", [2, 4, 16])
def test_less_than_one_a_round_is_one_in_several(every: int) -> None:
    assert asked(1 / every, 5 * every) == [number * every for number in range(5)]


def test_a_fraction_that_is_not_one_in_so_many_rounds_keeps_its_average() -> None:
    times = asked(0.4, 50)
    assert len(times) == 20
    assert {later - earlier for earlier, later in pairwise(times)} == {2.5}


def test_a_run_without_meetings_has_none() -> None:
    assert asked(0.0, 3) == []


@pytest.mark.parametrize("wanted", [0.25, 1.0])
def test_while_a_meeting_goes_on_it_counts_as_held(wanted: float) -> None:
    walk = Walk(fraction=0.6)
    timetable = Timetable(walk)
    assert timetable.due(wanted, 0)
    assert not timetable.due(wanted, 1)
    assert timetable.due(wanted, 0), "it came to nothing: on to the next"


def test_several_under_way_count_each() -> None:
    walk = Walk(fraction=0.5)
    timetable = Timetable(walk)
    assert [timetable.due(8, under_way) for under_way in range(6)] == [True] * 4 + [False] * 2


def test_meetings_that_a_peer_was_asked_for_count_too() -> None:
    walk = Walk(fraction=0.99)
    timetable = Timetable(walk)
    for _ in range(3):
        assert timetable.due(3, 0)
        timetable.met()
    assert not timetable.due(3, 0)


def test_a_meeting_counts_in_the_round_that_it_fell_into() -> None:
    walk = Walk(fraction=0.9)
    timetable = Timetable(walk)
    timetable.met()
    walk.to(1.1)  # begun in round 0, over in round 1
    timetable.met()
    timetable.met()
    walk.to(1.6)
    assert not timetable.due(2, 0)
    walk.to(2.3)
    assert timetable.due(2, 0)


def test_a_round_has_spent_its_share_until_later_rounds_have_paid_for_what_was_too_much() -> None:
    walk = Walk(fraction=0.5)
    timetable = Timetable(walk)
    assert not timetable.spent(100)
    timetable.spend(99)
    assert not timetable.spent(100)
    timetable.spend(201)
    found = []
    for round in range(5):
        walk.to(round + 0.5)
        found.append(timetable.spent(100))
    assert found == [True, True, True, False, False]  # 300, 200, 100, 0 of 100 bytes
    timetable.spend(60)
    walk.to(9.0)
    timetable.spend(60)
    assert not timetable.spent(100)  # nobody saves up, nor pays twice


def test_after_a_rare_meeting_the_next_one_is_due_from_when_that_one_was_over() -> None:
    walk = Walk()
    timetable = Timetable(walk)
    walk.to(3.5)
    timetable.met()
    for rounds, due in ((3.9, False), (5.4, False), (7.4, False), (7.5, True)):
        walk.to(rounds)
        assert timetable.due(0.25, 0) == due


def test_a_peer_that_goes_back_to_an_earlier_round_counts_anew() -> None:
    """As by catching up from a donor that is further, and then from a checkpoint of its own."""
    walk = Walk(round=7, fraction=0.6)
    timetable = Timetable(walk)
    timetable.met()
    timetable.spend(100)
    assert timetable.spent(100)
    walk.to(2.6)
    assert not timetable.spent(100)
    assert timetable.due(1, 0)


def test_how_long_the_round_may_still_take() -> None:
    assert Timetable(Walk(fraction=0.75)).left_s == 15.0
    assert Timetable(Walk(fraction=1.5)).left_s == 0.0


def test_rounds_in_some_time_are_whole_ones_and_none_where_nobody_knows() -> None:
    assert Timetable(Walk()).rounds_in(150.0) == 2
    assert Timetable(Walk(round_s=0.0)).rounds_in(150.0) == 0


def test_patience_is_two_steps_and_a_second_and_has_an_end() -> None:
    assert Timetable(Walk(step_s=0.5)).patience_ms == 2000
    assert Timetable(Walk(step_s=1e6)).patience_ms == LONGEST_PATIENCE_MS
