"""What a peer says before a meeting: the offer it makes, its decision on one, and the answer."""

from __future__ import annotations

from dataclasses import replace

from peer.core.admit import Standing, admit_answer, admit_offer
from peer.core.decision import Decision
from peer.core.gossip import pair_weight
from peer.core.terms import Terms, agree, ladder
from peer.manifest import Manifest
from peer.planner import Planner
from peer.timetable import Pace, Timetable
from peer.wire.peer_pb2 import Answer, Offer

PROTOCOL = 4


class Proposals:
    """Of one peer in one run. origin: hash of the first weights."""

    def __init__(
        self, peer_id: str, run: Manifest, origin: str, pace: Pace, planner: Planner, timetable: Timetable
    ) -> None:
        self._peer_id, self._run, self._origin = peer_id, run, origin
        self._pace, self._planner, self._timetable = pace, planner, timetable
        self._ladder = ladder(run.exchange.codec)

    def wish(self, partner: str, at_once: int) -> Terms:
        """Return the terms that this peer would like, if it then has so many meetings at once."""
        codec, budget_bytes = self._planner.wish(self._planner.plan, partner)
        return Terms(codec, budget_bytes, pair_weight(self._run.outer.alpha, at_once))

    def offer(self, meeting_id: bytes, wish: Terms) -> Offer:
        """Return what to ask a partner with."""
        return Offer(
            protocol=PROTOCOL,
            run_id=self._run.run_id,
            origin=self._origin,
            peer_id=self._peer_id,
            round=self._pace.round,
            meeting_id=meeting_id,
            codec=wish.codec,
            weight=wish.weight,
            patience_ms=self._timetable.patience_ms,
            budget_bytes=wish.budget_bytes,
        )

    def accepted(self, wish: Terms, answer: Answer) -> Terms | Decision:
        """Return what holds after an answer to an offer, or why the meeting does not come about."""
        decision = admit_answer(answer, self._ladder)
        if not decision:
            return decision
        return self._agreed(wish, Terms(answer.codec, answer.budget_bytes, answer.weight))

    def decide(self, offer: Offer, busy: bool, offering: bool, at_once: int) -> tuple[Decision, Terms | None]:
        """Decide on an offer, and by which terms the meeting is held, as one of so many at once.

        busy: this peer has no seat for it. offering: it is asking the same partner.
        """
        mine = Standing(
            self._run.run_id,
            self._origin,
            self._peer_id,
            self._pace.round,
            self._run.exchange.max_lag,
            self._ladder,
            PROTOCOL,
        )
        decision = admit_offer(offer, mine, busy, offering)
        if not decision:
            return decision, None
        if self._timetable.spent(self._planner.plan.round_bytes):
            detail = (
                "this peer has used up its share of the link for this round; ask someone else, or again in the next"
            )
            return Decision(False, "spent", detail), None
        theirs = Terms(offer.codec, offer.budget_bytes, offer.weight)
        return decision, self._agreed(self.wish(offer.peer_id, at_once), theirs)

    def _agreed(self, mine: Terms, theirs: Terms) -> Terms:
        """Return what holds for both; a budget for one codec may be too much to compute under a poorer one."""
        terms = agree(mine, theirs, self._ladder)
        most = self._planner.most_bytes(terms.codec)
        return terms if most is None else replace(terms, budget_bytes=min(terms.budget_bytes, most))

    def answer(self, decision: Decision, terms: Terms | None) -> Answer:
        """Return what to say to an offer."""
        answer = Answer(
            accepted=bool(decision),
            reason=decision.reason,
            detail=decision.detail,
            peer_id=self._peer_id,
            round=self._pace.round,
            patience_ms=self._timetable.patience_ms,
        )
        if terms is not None:
            answer.codec, answer.weight, answer.budget_bytes = terms.codec, terms.weight, terms.budget_bytes
        elif decision.reason == "spent":
            answer.rest_ms = int(1000 * self._timetable.left_s)
        return answer
