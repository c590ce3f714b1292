"""Every reason to refuse an offer or a correction, a row each."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peer.core.admit import Standing, admit_answer, admit_correction, admit_offer
from peer.wire.peer_pb2 import Answer, Offer

MINE = Standing(run_id="run" * 10, origin="origin" * 5, peer_id="mmm", round=10, max_lag=3, codecs=("rank4-int8",))


def offer(**changes: Any) -> Offer:
    good: dict[str, Any] = {
        "protocol": 1,
        "run_id": MINE.run_id,
        "origin": MINE.origin,
        "peer_id": "aaa",
        "round": 10,
        "meeting_id": bytes(16),
        "codec": MINE.codecs[0],
        "budget_bytes": 1000,
        "weight": 0.5,
        "patience_ms": 20_000,
    }
    return Offer(**{**good, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"round": 7},
        {"round": 13},
        {"weight": 1e-6},
        {"peer_id": "x" * 128},
        {"patience_ms": 600_000},
        {"patience_ms": 0},
    ],
)
def test_a_good_offer_is_accepted(changes: dict[str, Any]) -> None:
    decision = admit_offer(offer(**changes), MINE, busy=False, offering=False)
    assert decision
    assert (decision.reason, decision.detail) == ("", "")


@pytest.mark.parametrize(
    ("changes", "reason", "quoted"),
    [
        ({"protocol": 2}, "protocol", "speaks protocol 2, we speak 1"),
        ({"protocol": 0}, "protocol", "speaks protocol 0, we speak 1"),
        ({"protocol": 2, "weight": -1.0, "run_id": ""}, "protocol", "must upgrade"),
        ({"run_id": ""}, "malformed", "run_id has 0 characters"),
        ({"run_id": "x" * 129}, "malformed", "run_id has 129 characters"),
        ({"origin": ""}, "malformed", "origin has 0 characters"),
        ({"peer_id": ""}, "malformed", "peer_id has 0 characters"),
        ({"peer_id": "x" * 129}, "malformed", "peer_id has 129 characters"),
        ({"peer_id": "a\x1b[2J"}, "malformed", "peer_id has 5 characters, 1 to 128 printable"),
        ({"peer_id": "ä"}, "malformed", "peer_id"),
        ({"codec": ""}, "malformed", "codec has 0 characters"),
        ({"codec": "x" * 10_000}, "malformed", "codec has 10000 characters"),
        ({"meeting_id": b""}, "malformed", "meeting_id has 0 bytes, not 16"),
        ({"meeting_id": bytes(15)}, "malformed", "meeting_id has 15 bytes"),
        ({"meeting_id": bytes(17)}, "malformed", "meeting_id has 17 bytes"),
        ({"weight": 0.0}, "malformed", "weight 0 "),
        ({"weight": -0.5}, "malformed", "weight -0.5"),
        ({"weight": 0.51}, "malformed", "weight 0.51"),
        ({"weight": math.nan}, "malformed", "weight nan"),
        ({"weight": math.inf}, "malformed", "weight inf"),
        ({"patience_ms": 600_001}, "malformed", "patience_ms 600001"),
        ({"budget_bytes": 0}, "malformed", "no bytes"),
        ({"peer_id": "mmm"}, "self", "our own peer id"),
        ({"run_id": "other"}, "run", "join with the same manifest"),
        ({"run_id": "other", "origin": "other", "codec": "none", "round": 99}, "run", "the offer is for run other"),
        ({"origin": "other"}, "origin", "start anew"),
        ({"codec": "none"}, "codec", "wants codec none, the run uses rank4-int8"),
        ({"codec": "x" * 100}, "codec", "wants codec " + "x" * 32 + ","),
        ({"round": 14}, "lag", "at round 14, we are at 10, 3 may lie between; we have to catch up"),
        ({"round": 6}, "lag", "at round 6, we are at 10, 3 may lie between; the caller has to catch up"),
        ({"round": 2**64 - 1}, "lag", "catch up"),
    ],
)
def test_an_offer_is_refused_with_its_reason(changes: dict[str, Any], reason: str, quoted: str) -> None:
    for busy, offering in ((False, False), (True, True)):  # what we do meanwhile is the last thing looked at
        decision = admit_offer(offer(**changes), MINE, busy, offering)
        assert not decision
        assert decision.reason == reason
        assert quoted in decision.detail


@pytest.mark.parametrize(
    ("caller", "busy", "offering", "reason"),
    [
        ("aaa", True, False, "busy"),
        ("aaa", True, True, "busy"),
        ("aaa", False, True, ""),  # crossing: the smaller id, theirs, stays the caller
        ("zzz", False, True, "crossing"),  # crossing: ours does
        ("zzz", True, True, "busy"),
        ("zzz", False, False, ""),
    ],
)
def test_what_we_do_meanwhile_decides_last(caller: str, busy: bool, offering: bool, reason: str) -> None:
    decision = admit_offer(offer(peer_id=caller), MINE, busy, offering)
    assert bool(decision) is (reason == "")
    assert decision.reason == reason
    assert bool(decision.detail) is (reason != "")


@pytest.mark.parametrize(
    ("changes", "reason", "quoted"),
    [
        ({}, "", ""),
        ({"accepted": False, "reason": "busy", "detail": "ask someone else"}, "busy", "ask someone else"),
        ({"accepted": False, "reason": "x" * 1000}, "x" * 64, ""),
        ({"accepted": False}, "malformed", ""),
        ({"codec": "none"}, "malformed", "codec none is not the run's"),
        ({"weight": 0.0}, "malformed", "weight 0 "),
        ({"weight": math.nan}, "malformed", "weight nan"),
        ({"weight": 0.75}, "malformed", "weight 0.75"),
        ({"budget_bytes": 0}, "malformed", "no bytes"),
    ],
)
def test_an_answer_is_a_yes_that_a_meeting_can_be_held_by_or_a_no_with_its_reason(
    changes: dict[str, Any], reason: str, quoted: str
) -> None:
    good: dict[str, Any] = {"accepted": True, "codec": "rank4-int8", "weight": 0.5, "budget_bytes": 1000}
    decision = admit_answer(Answer(**{**good, **changes}), MINE.codecs)
    assert bool(decision) is (reason == "")
    assert decision.reason == reason
    assert quoted in decision.detail


@pytest.mark.parametrize(("one", "other"), [("aaa", "bbb"), ("bbb", "aaa"), ("a", "aa"), ("Z", "a")])
def test_of_two_offers_that_cross_exactly_one_is_accepted(one: str, other: str) -> None:
    def at(me: str, caller: str) -> bool:
        mine = Standing(MINE.run_id, MINE.origin, me, 10, 3, MINE.codecs)
        return bool(admit_offer(offer(peer_id=caller), mine, busy=False, offering=True))

    assert at(one, other) is not at(other, one)
    assert at(max(one, other), min(one, other))


REFUSED_41 = "correction norm 41 exceeds 10 × median 3.2; nothing of it is applied"
EIGHT = [3.0, 3.1, 3.2, 3.2, 3.2, 3.3, 3.4, 3.5]


@pytest.mark.parametrize(
    ("norm", "model_norm", "reason"),
    [
        (0.0, 0.0, ""),
        (0.0, 50.0, ""),
        (100.0, 50.0, ""),
        (100.1, 50.0, "proportion"),
        (1e10, 50.0, "proportion"),
        (math.inf, 50.0, "non-finite"),
        (math.nan, 50.0, "non-finite"),
        (1.0, math.nan, "non-finite"),
        (1.0, math.inf, "non-finite"),
    ],
)
def test_a_correction_is_admitted_or_refused(norm: float, model_norm: float, reason: str) -> None:
    decision = admit_correction(norm, model_norm)
    assert bool(decision) is (reason == "")
    assert decision.reason == reason
    assert bool(decision.detail) is (reason != "")
