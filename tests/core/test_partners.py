"""Whom to ask next: the ledger's rests, and of those that may be asked who was not met for longest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.core.decision import Decision
from peer.core.members import Member
from peer.core.partners import BUSY_REST_S, LONGEST_REST_S, Backoff, Ledger, choose

NOW_S = 1_000_000.0
ANNA = Member("run", "anna", ("10.0.0.1:4000",), 5, 0, NOW_S + 60)
BEN = replace(ANNA, peer_id="ben")


def chosen(
    members: list[Member], ledger: Ledger | None = None, now_s: float = NOW_S, seed: int = 0
) -> Member | Decision:
    return choose(members, "me", 5, 3, Ledger() if ledger is None else ledger, now_s, Random(seed))


def test_failures_rest_2_seconds_doubled_up_to_5_minutes() -> None:
    ledger, rests = Ledger(), []
    for _ in range(10):
        ledger.failed("anna", NOW_S)
        rests.append(ledger.backoff("anna").until_s - NOW_S)
    assert rests == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert ledger.backoff("ben") == Backoff()


def test_a_peer_that_fails_for_ever_rests_no_longer_than_the_longest_rest() -> None:
    ledger = Ledger()
    for _ in range(3000):
        ledger.failed("anna", NOW_S)
    assert ledger.backoff("anna").until_s == NOW_S + LONGEST_REST_S


def test_a_busy_peer_rests_shortly_and_it_is_no_failure() -> None:
    ledger = Ledger()
    for _ in range(5):
        ledger.busy("anna", NOW_S)
    assert ledger.backoff("anna") == Backoff(0, NOW_S + BUSY_REST_S)
    ledger.failed("anna", NOW_S)
    assert ledger.backoff("anna") == Backoff(1, NOW_S + 2)


def test_busy_does_not_cut_a_longer_rest_short() -> None:
    ledger = Ledger()
    ledger.failed("anna", NOW_S)
    ledger.failed("anna", NOW_S)
    ledger.busy("anna", NOW_S + 1)
    assert ledger.backoff("anna") == Backoff(2, NOW_S + 4)


def test_success_clears_everything() -> None:
    ledger = Ledger()
    ledger.failed("anna", NOW_S)
    ledger.failed("anna", NOW_S)
    ledger.succeeded("anna")
    assert ledger.backoff("anna") == Backoff()
    ledger.succeeded("nobody")
    ledger.failed("anna", NOW_S)
    assert ledger.backoff("anna").until_s == NOW_S + 2


def test_a_full_ledger_forgets_the_peer_whose_rest_ends_first() -> None:
    ledger = Ledger(capacity=3)
    for peer_id, now_s in (("anna", 30.0), ("ben", 10.0), ("carl", 20.0), ("dora", 40.0)):
        ledger.failed(peer_id, now_s)
    assert len(ledger) == 3
    assert ledger.backoff("ben") == Backoff()
    assert ledger.backoff("carl").failures == 1


def test_a_ledger_stays_bounded_whoever_fails() -> None:
    ledger = Ledger()
    for k in range(3000):
        ledger.failed(f"peer{k}", NOW_S + k)
    assert len(ledger) == 1024


@pytest.mark.parametrize(
    ("members", "reason", "quoted"),
    [
        ([], "alone", "no other live peer"),
        ([replace(ANNA, peer_id="me")], "alone", "no other live peer"),
        ([replace(ANNA, expires_s=NOW_S)], "alone", "no other live peer"),
        ([replace(ANNA, addresses=()), replace(BEN, addresses=())], "address", "none of 2 live peers gives an address"),
        ([replace(ANNA, round=9), replace(BEN, round=20)], "lag", "nearest of 2 live peers is at round 9, we are at 5"),
        ([replace(ANNA, round=9)], "lag", "catch up first"),
        ([replace(ANNA, round=1)], "lag", "they have to catch up"),
        ([replace(ANNA, round=9), replace(BEN, addresses=())], "lag", "nearest of 1 live peers"),
    ],
)
def test_when_there_is_nobody_to_ask_the_reason_is_given(members: list[Member], reason: str, quoted: str) -> None:
    decision = chosen(members)
    assert isinstance(decision, Decision)
    assert not decision
    assert decision.reason == reason
    assert quoted in decision.detail


def test_when_all_are_resting_it_is_said_when_the_next_may_be_asked() -> None:
    ledger = Ledger()
    ledger.failed("anna", NOW_S)
    ledger.failed("anna", NOW_S)
    ledger.failed("ben", NOW_S)
    decision = chosen([ANNA, BEN, replace(ANNA, peer_id="far", round=99)], ledger, NOW_S + 0.5)
    assert isinstance(decision, Decision)
    assert decision.reason == "resting"
    assert "all 2 peers" in decision.detail
    assert "in 1.5 s" in decision.detail
    assert chosen([ANNA, BEN], ledger, NOW_S + 2) == BEN


@pytest.mark.parametrize("round_", [2, 3, 5, 7, 8])
def test_a_peer_within_the_lag_either_way_may_be_asked(round_: int) -> None:
    member = replace(ANNA, round=round_)
    assert chosen([member]) == member


@given(
    members=st.lists(
        st.builds(
            Member,
            run_id=st.just("run"),
            peer_id=st.sampled_from(["me", "a", "b", "c", "d"]),
            addresses=st.sampled_from([(), ("10.0.0.1:4000",)]),
            round=st.integers(0, 12),
            shard=st.just(0),
            expires_s=st.floats(NOW_S - 10, NOW_S + 100),
        ),
        unique_by=lambda member: member.peer_id,
    ),
    failures=st.lists(st.sampled_from(["a", "b", "c"])),
    busy=st.lists(st.sampled_from(["a", "b", "c"])),
    later_s=st.floats(0, 20),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_only_a_peer_that_may_be_asked_is_chosen_and_one_is_if_there_is_any(
    members: list[Member], failures: list[str], busy: list[str], later_s: float, seed: int
) -> None:
    ledger, now_s = Ledger(), NOW_S + later_s
    for peer_id in failures:
        ledger.failed(peer_id, NOW_S)
    for peer_id in busy:
        ledger.busy(peer_id, NOW_S)
    eligible = []
    for member in members:
        rest_s = 2.0 ** failures.count(member.peer_id) if member.peer_id in failures else 0.0
        rest_s = max(min(rest_s, 300.0), BUSY_REST_S if member.peer_id in busy else 0.0)
        resting = now_s < NOW_S + rest_s
        near = 2 <= member.round <= 8
        if member.peer_id != "me" and member.expires_s > now_s and member.addresses and near and not resting:
            eligible.append(member)
    found = chosen(members, ledger, now_s, seed)
    if eligible:
        assert found in eligible
    else:
        assert isinstance(found, Decision)
        assert found.reason in ("alone", "address", "lag", "resting")


def test_the_choice_is_uniform_among_those_never_met() -> None:
    members = [replace(ANNA, peer_id=f"peer{k}", round=4 + k % 3) for k in range(10)]
    random, ledger, draws = Random(12), Ledger(), 10_000
    counts: Counter[str] = Counter()
    for _ in range(draws):
        member = choose(members, "me", 5, 3, ledger, NOW_S, random)
        assert isinstance(member, Member)
        counts[member.peer_id] += 1
    expected = draws / len(members)
    chi_square = sum((counts[member.peer_id] - expected) ** 2 / expected for member in members)
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


def test_the_last_of_the_eligible_can_be_chosen_and_nothing_beyond() -> None:
    class Highest:
        def random(self) -> float:
            return 1 - 2**-53

    assert choose([ANNA, BEN], "me", 5, 3, Ledger(), NOW_S, Highest()) == BEN


def test_who_was_not_met_for_longest_is_asked_first() -> None:
    members, ledger = [replace(ANNA, peer_id=name) for name in ("ann", "ben", "cat")], Ledger()
    order = []
    for seed in range(9):
        member = chosen(members, ledger, seed=seed)
        assert isinstance(member, Member)
        ledger.succeeded(member.peer_id)
        order.append(member.peer_id)
    assert sorted(order[:3]) == ["ann", "ben", "cat"]
    assert order == order[:3] * 3
    ledger.failed(order[0], NOW_S)  # one that rests is passed over
    assert chosen(members, ledger) == members[["ann", "ben", "cat"].index(order[1])]


def test_the_order_of_meetings_is_remembered_of_so_many_peers_only() -> None:
    ledger = Ledger(capacity=3)
    for name in ("ann", "ben", "ann", "cat", "dan"):
        ledger.succeeded(name)
    assert [ledger.last_met(name) for name in ("ann", "ben", "cat", "dan", "eve")] == [3, 0, 4, 5, 0]
