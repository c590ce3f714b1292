"""Whom to ask next for a meeting.

The choice is local: of the live peers that are near enough in rounds and not resting after a failure, the one that was
not met for longest, and at random among those never met. Two that met a moment ago have little left to tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peer.core.decision import Decision
from peer.core.members import Member

BUSY_REST_S = 0.5
FIRST_REST_S = 2.0
LONGEST_REST_S = 300.0
REMEMBERED_PEERS = 1024


class Random(Protocol):
    """A source of randomness; `random.Random` is one."""

    def random(self) -> float:
        """Return a number from 0 to below 1."""


@dataclass(frozen=True)
class Backoff:
    """How a peer is doing: failures in a row since its last success, and until when (Unix time) it is left alone."""

    failures: int = 0
    until_s: float = 0.0


class Ledger:
    """What came of asking each peer, so until when each is left alone; and in which order they were met last.

    Memory is bounded: past `capacity` peers, the one whose rest ends first is forgotten, and whom was met longest ago.
    """

    def __init__(self, capacity: int = REMEMBERED_PEERS) -> None:
        self._capacity = capacity
        self._backoffs: dict[str, Backoff] = {}
        self._meetings = 0
        self._met: dict[str, int] = {}

    def succeeded(self, peer_id: str) -> None:
        """Note a meeting that took place: whatever failed before is forgotten."""
        self._backoffs.pop(peer_id, None)
        self._met.pop(peer_id, None)
        self._meetings += 1
        self._met[peer_id] = self._meetings
        if len(self._met) > self._capacity:
            del self._met[next(iter(self._met))]

    def last_met(self, peer_id: str) -> int:
        """Return which meeting was the last one with a peer, counted from 1; 0 if there was none."""
        return self._met.get(peer_id, 0)

    def busy(self, peer_id: str, now_s: float, rest_s: float = 0.0) -> None:
        """Note that a peer declined for now: a short rest, or the one that it asked for, and no failure."""
        known, rest_s = self.backoff(peer_id), min(max(rest_s, BUSY_REST_S), LONGEST_REST_S)
        self._note(peer_id, Backoff(known.failures, max(known.until_s, now_s + rest_s)))

    def failed(self, peer_id: str, now_s: float) -> None:
        """Note a peer that could not be reached, broke off, or declined for good: 2 s of rest, doubled up to 5 min."""
        failures = self.backoff(peer_id).failures + 1
        rest_s = min(FIRST_REST_S * 2.0 ** min(failures - 1, 30), LONGEST_REST_S)
        self._note(peer_id, Backoff(failures, now_s + rest_s))

    def backoff(self, peer_id: str) -> Backoff:
        """Return how a peer is doing; an unknown one is doing well."""
        return self._backoffs.get(peer_id, Backoff())

    def __len__(self) -> int:
        return len(self._backoffs)

    def _note(self, peer_id: str, backoff: Backoff) -> None:
        self._backoffs[peer_id] = backoff
        if len(self._backoffs) > self._capacity:
            del self._backoffs[min(self._backoffs, key=lambda known: self._backoffs[known].until_s)]


def choose(
    members: Sequence[Member],
    me: str,
    round: int,
    max_lag: int,
    ledger: Ledger,
    now_s: float,
    random: Random,
) -> Member | Decision:
    """Return the peer to ask next, of those that may be asked who was not met for longest, or why there is none.

    members: records of this run; our own (me: our peer id) and expired ones are passed over.
    Reasons: "alone" (nobody lives), "address" (nobody can be called), "lag" (nobody is within max_lag rounds),
    "resting" (all who could be asked are left alone for now).
    """
    others = [member for member in members if member.peer_id != me and member.expires_s > now_s]
    if not others:
        return Decision(False, "alone", "no other live peer of this run is known; others join with --bootstrap")
    open_ = [member for member in others if member.addresses]
    if not open_:
        detail = (
            f"none of {len(others)} live peers gives an address to call; they have to call us, so keep our port open"
        )
        return Decision(False, "address", detail)
    near = [member for member in open_ if abs(member.round - round) <= max_lag]
    if not near:
        return _too_far(open_, round, max_lag)
    ready = [member for member in near if ledger.backoff(member.peer_id).until_s <= now_s]
    if not ready:
        wait_s = min(ledger.backoff(member.peer_id).until_s for member in near) - now_s
        detail = f"all {len(near)} peers in reach failed or were busy lately; the next may be asked in {wait_s:.1f} s"
        return Decision(False, "resting", detail)
    longest = min(ledger.last_met(member.peer_id) for member in ready)
    due = [member for member in ready if ledger.last_met(member.peer_id) == longest]
    return due[min(int(random.random() * len(due)), len(due) - 1)]


def _too_far(members: Sequence[Member], round: int, max_lag: int) -> Decision:
    nearest = min((member.round for member in members), key=lambda other: abs(other - round))
    advice = "catch up first" if nearest > round else "they have to catch up"
    detail = (
        f"the nearest of {len(members)} live peers is at round {nearest}, we are at {round}, {max_lag} may lie between"
    )
    return Decision(False, "lag", f"{detail}; {advice}")
