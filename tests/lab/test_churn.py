"""Who is there when: chance against its closed forms, traces line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.lab.churn import AWAY_ROUNDS, Change, Presence, by_rate, by_trace, parse


def trace(folder: Path, text: str, peers: int = 3) -> tuple[Change, ...]:
    path = folder / "trace.txt"
    path.write_text(text)
    return by_trace(path, peers)


def time_weighted(changes: Sequence[Change], peers: int, end_s: float) -> dict[int, float]:
    """Return which share of the time how many peers are present."""
    shares = dict.fromkeys(range(peers + 1), 0.0)
    present, since_s = peers, 0.0
    for change in changes:
        shares[present] += (change.at_s - since_s) / end_s
        present, since_s = present + (1 if change.present else -1), change.at_s
    shares[present] += (end_s - since_s) / end_s
    return shares


# ---------------------------------------------------------------- by chance


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_a_peer_leaves_within_a_round_with_the_rates_probability(rate: float) -> None:
    peers = 20_000
    first = by_rate(rate, peers, round_s=30.0, rounds=1, seed=1)
    gone = {change.peer for change in first if not change.present}
    five_sigma = 5 * math.sqrt(peers * rate * (1 - rate))
    assert abs(len(gone) - peers * rate) < five_sigma


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_in_the_long_run_a_peer_is_away_for_the_stationary_share_of_the_time(rate: float) -> None:
    # Alternating renewals: mean away / (mean away + mean stay), with a mean stay of 1 / −ln(1 − rate) rounds.
    peers, rounds, round_s = 200, 2000, 2.0
    changes = by_rate(rate, peers, round_s, rounds, seed=2)
    shares = time_weighted(changes, peers, rounds * round_s)
    away = sum((peers - count) * share for count, share in shares.items()) / peers
    stay = 1 / -math.log(1 - rate)
    assert away == pytest.approx(AWAY_ROUNDS / (AWAY_ROUNDS + stay), rel=0.05)


def test_two_peers_of_which_one_always_stays_are_both_there_for_the_share_of_the_markov_chain() -> None:
    # Two states: both → one at rate 2 λ, one → both at rate μ, so both for μ / (μ + 2 λ) of the time.
    rate, rounds = 0.3, 100_000
    shares = time_weighted(by_rate(rate, 2, 1.0, rounds, seed=3), 2, rounds)
    leave, come = -math.log(1 - rate), 1 / AWAY_ROUNDS
    assert shares[0] == 0
    assert shares[2] == pytest.approx(come / (come + 2 * leave), rel=0.05)


@settings(deadline=None)
@given(rate=st.floats(0, 0.999), peers=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_someone_is_always_present_and_each_peers_changes_alternate(rate: float, peers: int, seed: int) -> None:
    changes = by_rate(rate, peers, 10.0, 20, seed)
    present = set(range(peers))
    for change in changes:
        assert change.present == (change.peer not in present)
        present ^= {change.peer}
        assert present
    assert all(one.at_s <= other.at_s for one, other in pairwise(changes))
    assert all(0 < change.at_s <= 200 for change in changes)


def test_the_same_seed_gives_the_same_changes_and_another_one_others() -> None:
    assert by_rate(0.2, 8, 1.0, 50, seed=4) == by_rate(0.2, 8, 1.0, 50, seed=4)
    assert by_rate(0.2, 8, 1.0, 50, seed=4) != by_rate(0.2, 8, 1.0, 50, seed=5)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = by_rate(0.2, 8, 1.0, 20, seed=6), by_rate(0.2, 8, 1.0, 80, seed=6)
    assert long[: len(short)] == short
    assert len(long) > len(short) > 0


def test_nobody_leaves_at_rate_0_and_a_peer_alone_never_does() -> None:
    assert by_rate(0.0, 100, 1.0, 1000, seed=7) == ()
    assert by_rate(0.9, 1, 1.0, 1000, seed=7) == ()


# ---------------------------------------------------------------- by a trace


def test_a_trace_says_who_comes_and_goes(tmp_path: Path) -> None:
    text = """
    # seconds peer what
    10 1 leave
    10.5 3 leave   # and back at once
    10.5 3 join

    1e2 1 join
    """
    assert trace(tmp_path, text) == (
        Change(10.0, 0, False),
        Change(10.5, 2, False),
        Change(10.5, 2, True),
        Change(100.0, 0, True),
    )


def test_a_peer_that_is_mentioned_first_with_a_join_is_absent_at_the_start(tmp_path: Path) -> None:
    changes = trace(tmp_path, "5 2 join\n7 3 leave\n9 3 join")
    assert changes[0] == Change(0.0, 1, False)
    presence = Presence(changes, 3)
    assert [presence.at(time_s) for time_s in (0, 5, 7, 9)] == [{0, 2}, {0, 1, 2}, {0, 1}, {0, 1, 2}]


def test_a_swarm_may_begin_with_one_peer_and_hand_over_to_another_at_one_time(tmp_path: Path) -> None:
    presence = Presence(trace(tmp_path, "0 1 join\n5 1 leave\n5 2 join", 2), 2)
    assert [presence.at(time_s) for time_s in (0, 4, 5)] == [{0}, {0}, {1}]


def test_an_empty_trace_changes_nothing(tmp_path: Path) -> None:
    assert trace(tmp_path, "# nobody moves\n") == ()


@pytest.mark.parametrize(
    ("text", "number", "said"),
    [
        ("1 1 leave\n2 2 leaves", 2, "'leaves' is no change; write leave or join"),
        ("1 1", 1, "'1 1' is no change; write seconds, peer, and leave or join"),
        ("\n\nsoon 1 leave", 3, "'soon' is no time; give seconds from 0 on"),
        ("-1 1 leave", 1, "'-1' is no time"),
        ("nan 1 leave", 1, "'nan' is no time"),
        ("inf 1 leave", 1, "'inf' is no time"),
        ("1 0 leave", 1, "'0' is no peer; give a whole number from 1 to 3"),
        ("1 4 leave", 1, "'4' is no peer; give a whole number from 1 to 3"),
        ("1 1.0 leave", 1, "'1.0' is no peer"),
        ("1 ² leave", 1, "'²' is no peer"),
        (f"1 {'9' * 5000} leave", 1, "is no peer"),
        ("1 1 leave\n2 1 leave", 2, "peer 1 is away already; remove the line"),
        ("1 1 leave\n2 1 join\n3 1 join", 3, "peer 1 is present already; remove the line"),
        ("5 1 leave\n4 2 leave", 2, "4 s comes after 5 s; sort the lines by time"),
        ("1 1 leave\n1 2 leave\n1 3 leave\n2 1 join", 4, "nobody is present before 2 s; keep one peer there"),
        ("1 1 join\n1 2 join\n1 3 join", 1, "nobody is present before 1 s"),
    ],
)
def test_a_mistake_in_a_trace_is_named_with_its_line(text: str, number: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(tmp_path, text)
    assert str(caught.value).startswith(f"churn trace '{tmp_path / 'trace.txt'}', line {number}: ")
    assert said in str(caught.value)


def test_a_trace_at_whose_end_nobody_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after the last line nobody is present; keep one peer there"):
        trace(tmp_path, "1 1 leave\n2 2 leave\n3 3 leave")


def test_a_trace_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text in UTF-8"):
        by_trace(tmp_path / "trace.txt", 1)


# ---------------------------------------------------------------- what the user writes


def test_a_number_is_a_rate_and_anything_else_a_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("1 2 leave")
    assert parse("0.3", 4, 1.0, 50, 8) == by_rate(0.3, 4, 1.0, 50, 8) != ()
    assert parse(str(path), 4, 1.0, 50, 8) == (Change(1.0, 1, False),)


@pytest.mark.parametrize("spec", ["1", "-0.1", "1.5", "nan", "inf"])
def test_a_rate_outside_0_to_below_1_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="give a number from 0 to below 1, or the path of a trace"):
        parse(spec, 4, 1.0, 50, 8)


def test_what_is_neither_a_number_nor_a_file_is_told_both() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the churn trace '5%': No such file.*give a rate such as 0\.05"):
        parse("5%", 4, 1.0, 50, 8)


# ---------------------------------------------------------------- asking about a time


@settings(deadline=None)
@given(seed=st.integers(0, 1000), start_s=st.floats(0, 120), end_s=st.floats(0, 120))
def test_the_changes_between_two_times_turn_the_one_set_into_the_other(seed: int, start_s: float, end_s: float) -> None:
    start_s, end_s = sorted((start_s, end_s))
    presence = Presence(by_rate(0.3, 5, 10.0, 10, seed), 5)
    present = set(presence.at(start_s))
    for change in presence.between(start_s, end_s):
        assert start_s < change.at_s <= end_s
        present ^= {change.peer}
    assert presence.at(end_s) == present


def test_a_change_holds_from_its_own_time_on() -> None:
    presence = Presence((Change(2.0, 0, False), Change(3.0, 0, True)), 2)
    assert [presence.at(time_s) for time_s in (0.0, 1.999, 2.0, 2.999, 3.0)] == [{0, 1}, {0, 1}, {1}, {1}, {0, 1}]
    assert presence.between(2.0, 3.0) == (Change(3.0, 0, True),)
    assert presence.between(0.0, 2.0) == (Change(2.0, 0, False),)


def test_without_changes_all_are_present_at_any_time() -> None:
    assert Presence((), 3).at(1e9) == {0, 1, 2}
    assert Presence((), 3).between(0.0, 1e9) == ()
