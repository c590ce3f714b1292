"""Offer, exchange, correction, again and again, beside training."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass

from peer.account import PASSING, Account
from peer.boundary import Boundary
from peer.conversation import Conversation
from peer.core.admit import LONGEST_PATIENCE_MS, MEETING_ID_BYTES, Standing, admit_correction, admit_offer
from peer.core.allocation import Allocation
from peer.core.codec import parse
from peer.core.decision import Decision
from peer.core.exchange import Callee, Caller, Phase
from peer.core.gossip import pair_weight
from peer.core.members import Member
from peer.core.partners import choose
from peer.core.prior import guesses, next_priors, seed_of, start_priors
from peer.core.state import State
from peer.endings import ANSWER_S, DIAL_S, Endings, inquire, told
from peer.errors import ProtocolError, Unreachable
from peer.events import Meeting
from peer.manifest import Manifest
from peer.net.base import Network, Stream
from peer.roster import REFRESH_S, Roster
from peer.timetable import Pace, Timetable
from peer.wire.peer_pb2 import Answer, Inquiry, Message, Offer

PROTOCOL = 3
SILENCE_S = 15.0
TICK_S = 0.05
IDLE_S = 0.25
RECORD_AGE_S = 2 * REFRESH_S
"""A record is read and renewed every REFRESH_S; the round in it is at most this old."""


@dataclass
class _Talk:
    """One meeting from the offer to its end, as this side sees it."""

    role: str
    partner: str
    meeting_id: bytes
    exchange: Caller | Callee
    began_s: float
    partner_round: int = 0
    patience_ms: int = 0
    stream: Stream | None = None
    conversation: Conversation | None = None


class Meetings:
    """A peer's meetings: those it asks for, spread over the round, and those it is asked for. One at a time.

    origin: hash of the first weights. shapes: of the parameters, in the model's order.
    """

    def __init__(
        self,
        peer_id: str,
        run: Manifest,
        shapes: dict[str, tuple[int, ...]],
        origin: str,
        network: Network,
        roster: Roster,
        boundary: Boundary,
        pace: Pace,
        account: Account,
    ) -> None:
        self._peer_id, self._run, self._origin = peer_id, run, origin
        self._network, self._roster, self._boundary = network, roster, boundary
        self._pace, self._account = pace, account
        self._timetable = Timetable(run.exchange.meetings, pace)
        self._codec = parse(run.exchange.codec)
        self._allocation = Allocation(shapes, self._codec)
        self._weight = pair_weight(run.outer.alpha)
        self._random = random.Random(peer_id)
        self._priors = start_priors(shapes)
        self._talk: _Talk | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._offering_to: str | None = None
        self._endings = Endings()
        self._stopping = False

    async def run(self) -> None:
        """Ask for meetings for ever, as many a round as the run has it."""
        while True:
            if self._stopping or self._talk is not None or not self._timetable.due:
                await asyncio.sleep(TICK_S)
                continue
            choice = choose(
                self._roster.members,
                self._peer_id,
                self._pace.round,
                self._run.exchange.max_lag + self._timetable.rounds_in(RECORD_AGE_S),
                self._account.ledger,
                time.time(),
                self._random,
            )
            if isinstance(choice, Decision):
                self._account.idle(choice)
                await asyncio.sleep(IDLE_S)
            else:
                await self.ask(choice)

    async def close(self, grace_s: float) -> None:
        """Decline from now on; give the meeting that is under way a little time to end, then abandon it."""
        self._stopping = True
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s / 2):
                    await self._free.wait()
            if self._talk is not None and self._talk.conversation is not None:
                self._talk.conversation.abandon()

    # ------------------------------------------------------------------ as callee

    async def invited(self, stream: Stream, offer: Offer) -> None:
        """Answer an offer, and if it is accepted, hold the meeting."""
        decision = self._decide(offer)
        answer = Answer(
            accepted=bool(decision),
            reason=decision.reason,
            detail=decision.detail,
            peer_id=self._peer_id,
            round=self._pace.round,
            patience_ms=self._timetable.patience_ms,
        )
        if not decision:
            with suppress(Unreachable):
                await stream.send(Message(answer=answer), ANSWER_S)
            if decision.reason not in ("busy", "crossing", "stopping"):  # these are the caller's to count
                self._account.declined(offer.peer_id[:64], decision)
            return
        talk = _Talk(
            "callee",
            offer.peer_id,
            offer.meeting_id,
            Callee(self._allocation.parts(offer.ranks), self._codec, admit_correction),
            time.monotonic(),
            offer.round,
            offer.patience_ms,
            stream,
        )
        self._begin(talk)
        try:
            await stream.send(Message(answer=answer), ANSWER_S)
            await self._converse(talk, stream)
        except Unreachable as error:
            talk.exchange.lost("lost", str(error))
        finally:
            self._conclude(talk)

    async def inquired(self, stream: Stream, inquiry: Inquiry) -> None:
        """Tell a caller that lost the last message how a meeting ended; one that is still going on ends untouched."""
        talk = self._talk
        if talk is not None and talk.role == "callee" and talk.meeting_id == inquiry.meeting_id:
            talk.exchange.lost("lost", "the caller lost the stream")
            known: bool | None = talk.exchange.phase is Phase.APPLIED
        else:
            known = self._endings.of(inquiry.meeting_id)
        await stream.send(told(known), ANSWER_S)

    # ------------------------------------------------------------------ as caller

    async def ask(self, partner: Member) -> None:
        """Offer a meeting to one partner, and hold it if the partner accepts."""
        meeting_id = os.urandom(MEETING_ID_BYTES)
        ranks = self._allocation.ranks(self._priors, self._pace.sensitivity)
        parts = self._allocation.parts(ranks)
        start = guesses(parts, self._priors, seed_of(meeting_id))
        exchange = Caller(parts, self._codec, start, admit_correction)
        talk = _Talk("caller", partner.peer_id, meeting_id, exchange, time.monotonic())
        try:
            talk.stream = await self._network.dial(partner.addresses[0], DIAL_S)
            self._offering_to = partner.peer_id
            await talk.stream.send(Message(offer=self._offer(talk.meeting_id, ranks)), ANSWER_S)
            if await self._accepted(exchange, talk):
                await self._converse(talk, talk.stream)
                if exchange.phase is Phase.DOUBTED:
                    applied = await inquire(self._network, partner.addresses[0], meeting_id)
                    if applied is not None:
                        exchange.resolve(applied)
        except Unreachable as error:
            exchange.lost("unreachable", str(error))
        except ProtocolError as error:
            exchange.lost(error.reason, error.detail)
        finally:
            self._offering_to = None
            self._conclude(talk)
            if talk.stream is not None:
                await talk.stream.close()

    def _offer(self, meeting_id: bytes, ranks: list[int]) -> Offer:
        return Offer(
            protocol=PROTOCOL,
            run_id=self._run.run_id,
            origin=self._origin,
            peer_id=self._peer_id,
            round=self._pace.round,
            meeting_id=meeting_id,
            codec=self._codec.spec,
            weight=self._weight,
            patience_ms=self._timetable.patience_ms,
            ranks=ranks,
        )

    async def _accepted(self, exchange: Caller, talk: _Talk) -> bool:
        """Wait for the answer; from a yes on, this peer is busy."""
        stream = talk.stream
        message = await stream.receive(ANSWER_S) if stream else None
        if message is None or stream is None:
            raise Unreachable("the partner ended the stream before it answered")
        talk.partner_round, talk.patience_ms = (
            message.answer.round,
            min(message.answer.patience_ms, LONGEST_PATIENCE_MS),
        )
        self._offering_to = None
        if message.HasField("answer") and message.answer.accepted and self._talk is not None:
            # meanwhile we accepted an offer that crossed this one
            await stream.send(exchange.abort("busy", "this peer is in another meeting"), ANSWER_S)
            return False
        exchange.receive(message)
        if exchange.phase is not Phase.PROBING:
            return False
        self._begin(talk)
        return True

    # ------------------------------------------------------------------ both

    def _begin(self, talk: _Talk) -> None:
        self._talk = talk
        self._free.clear()

    async def _converse(self, talk: _Talk, stream: Stream) -> None:
        slower_s = max(talk.patience_ms, self._timetable.patience_ms) / 1000
        silence_s = SILENCE_S + 2 * slower_s
        talk.conversation = Conversation(talk.exchange, stream, self._boundary, self._run.outer, silence_s)
        await talk.conversation.run()

    def _conclude(self, talk: _Talk) -> None:
        """Apply what was agreed, count what was not, and be free again."""
        exchange, stream = talk.exchange, talk.stream
        if self._talk is talk:
            self._talk = None
            self._free.set()
        if talk.role == "callee":
            self._endings.remember(talk.meeting_id, exchange.phase is Phase.APPLIED)
        sent, received = (stream.sent_bytes, stream.received_bytes) if stream else (0, 0)
        if exchange.phase is Phase.APPLIED:
            self._apply(talk, sent, received)
            return
        doubted = exchange.phase is Phase.DOUBTED
        decision = Decision(False, "in-doubt" if doubted else exchange.reason or "lost", exchange.detail)
        if exchange.phase is Phase.DECLINED or decision.reason in PASSING:
            self._account.declined(talk.partner, decision)
        else:
            self._account.failed(talk.partner, decision, sent, received)

    def _apply(self, talk: _Talk, sent: int, received: int) -> None:
        correction = talk.exchange.correction
        weight = -self._weight if talk.role == "caller" else self._weight

        def add(state: State) -> None:
            correction.add_(state.weights, weight)
            correction.add_(state.anchor, weight)

        self._boundary.post(add)
        self._priors = next_priors(correction, self._priors)
        self._timetable.met()
        self._account.met(
            Meeting(
                partner=talk.partner,
                role=talk.role,
                round=self._pace.round,
                partner_round=talk.partner_round,
                codec=self._codec.spec,
                weight=self._weight,
                bytes_sent=sent,
                bytes_received=received,
                seconds=time.monotonic() - talk.began_s,
                correction=correction.norm(),
            )
        )

    def _decide(self, offer: Offer) -> Decision:
        if self._stopping:
            return Decision(False, "stopping", "this peer is leaving the swarm; ask someone else")
        if offer.meeting_id in self._endings:
            return Decision(False, "replayed", "a meeting of this id was held before; draw a new one")
        mine = Standing(
            self._run.run_id,
            self._origin,
            self._peer_id,
            self._pace.round,
            self._run.exchange.max_lag,
            self._codec.spec,
            PROTOCOL,
        )
        decision = admit_offer(offer, mine, self._talk is not None, self._offering_to)
        if decision and offer.weight != self._weight:
            return Decision(False, "weight", f"the offer has weight {offer.weight:g}, the run has {self._weight:g}")
        if decision:
            try:
                self._allocation.parts(offer.ranks)
            except ProtocolError as error:
                return Decision(False, error.reason, f"{error.detail}; upgrade the caller")
        return decision
