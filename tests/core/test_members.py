"""Who is alive, who is behind, who can give State."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.core.members import LONGEST_LIFE_S, Member, behind, donors, live, rejoining

NOW_S = 1_000_000.0
ANNA = Member("run", "anna", ("10.0.0.1:4000",), 5, 0, NOW_S + 60)
BEN = replace(ANNA, peer_id="ben", round=7)
ME = replace(ANNA, peer_id="me")


def at_rounds(*rounds: int) -> list[Member]:
    return [replace(ANNA, peer_id=f"peer{k}", round=round_) for k, round_ in enumerate(rounds)]


@pytest.mark.parametrize(
    ("record", "alive"),
    [
        (ANNA, True),
        (ME, False),
        (replace(ANNA, run_id="other"), False),
        (replace(ANNA, expires_s=NOW_S - 1), False),
        (replace(ANNA, expires_s=NOW_S), False),
        (replace(ANNA, expires_s=NOW_S + 0.001), True),
        (replace(ANNA, expires_s=NOW_S + LONGEST_LIFE_S), True),
        (replace(ANNA, expires_s=NOW_S + LONGEST_LIFE_S + 1), False),
        (replace(ANNA, expires_s=float("inf")), False),
        (replace(ANNA, expires_s=float("nan")), False),
        (replace(ANNA, addresses=()), True),
    ],
)
def test_a_record_counts_as_alive_or_not(record: Member, alive: bool) -> None:
    assert live([record], "run", NOW_S, "me") == ([record] if alive else [])


def test_the_living_are_sorted_by_peer_id() -> None:
    assert live([BEN, ME, ANNA], "run", NOW_S, "me") == [ANNA, BEN]


@pytest.mark.parametrize("reverse", [False, True])
def test_of_several_records_of_one_peer_the_one_that_expires_last_counts(reverse: bool) -> None:
    newer = replace(ANNA, round=6, expires_s=NOW_S + 90)
    absurd = replace(ANNA, round=999, expires_s=NOW_S + 2 * LONGEST_LIFE_S)
    records = [ANNA, newer, absurd]
    assert live(records[::-1] if reverse else records, "run", NOW_S, "me") == [newer]


@given(
    records=st.lists(
        st.builds(
            Member,
            run_id=st.sampled_from(["run", "other"]),
            peer_id=st.sampled_from(["me", "a", "b", "c"]),
            addresses=st.just(("10.0.0.1:4000",)),
            round=st.integers(0, 9),
            shard=st.just(0),
            expires_s=st.floats(NOW_S - 100, NOW_S + 2 * LONGEST_LIFE_S),
        )
    ),
    seed=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_the_order_of_records_does_not_matter(records: list[Member], seed: object) -> None:
    shuffled = list(records)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    alive = live(records, "run", NOW_S, "me")
    assert alive == live(shuffled, "run", NOW_S, "me")
    assert len({member.peer_id for member in alive}) == len(alive)


@pytest.mark.parametrize(
    ("others", "round_", "late"),
    [
        ((), 0, False),
        ((5,), 5, False),
        ((8,), 5, False),
        ((9,), 5, True),
        ((1,), 5, False),
        ((9, 5), 5, False),  # of two, one alone cannot say so
        ((9, 9), 5, True),
        ((2**60, 5, 6), 5, False),  # a liar among three
        ((9, 5, 9), 5, True),
        ((9, 9, 5, 5), 5, False),
        ((9, 9, 9, 5), 5, True),
    ],
)
def test_a_peer_is_behind_when_the_median_of_the_others_is_too_far_ahead(
    others: tuple[int, ...], round_: int, late: bool
) -> None:
    assert behind(at_rounds(*others), round_, 3) is late


def test_donors_are_those_ahead_that_can_be_called_most_advanced_first() -> None:
    members = [*at_rounds(4, 9, 5, 6), replace(BEN, round=8, addresses=()), replace(ME, round=20)]
    assert [member.round for member in donors(members, "me", 5)] == [9, 6]


def test_nobody_at_the_same_round_is_a_donor() -> None:
    assert donors(at_rounds(0, 0), "me", 0) == []


def test_newcomers_spread_over_donors_that_are_equally_advanced() -> None:
    members = at_rounds(*[9] * 8)
    asked = {donors(members, f"newcomer{k}", 0)[0].peer_id for k in range(100)}
    assert len(asked) >= 6
    assert donors(members, "newcomer", 0) == donors(members[::-1], "newcomer", 0)


@pytest.mark.parametrize(
    ("others", "found", "mine", "on"),
    [
        ((61, 53), 53, 56, 61),  # the donor, peer0, has gone on meanwhile
        ((61, 53), 53, 63, 63),  # this peer too, and further
        ((50, 60, 62), 50, 0, 60),  # the donor is slower than the others
        ((), 7, 3, 7),  # all are gone
        ((10**9,), 20, 3, 84),  # what a donor says of itself is good for some rounds
    ],
)
def test_who_has_caught_up_goes_on_where_the_donor_and_the_others_are_by_now(
    others: tuple[int, ...], found: int, mine: int, on: int
) -> None:
    members = at_rounds(*others)
    if len(members) == 1:  # the others' median is the donor's word alone
        members.append(replace(members[0], peer_id="peer1", round=found))
    assert rejoining(members, "peer0", found, mine, 64) == on
