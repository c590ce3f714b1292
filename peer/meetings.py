"""Offer, exchange, correction, again and again, beside training."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress

from peer.account import PASSING, Account
from peer.boundary import Boundary
from peer.conversation import Conversation
from peer.core.admit import (
    LONGEST_PATIENCE_MS,
    MEETING_ID_BYTES,
)
from peer.core.change import Correction
from peer.core.decision import Decision
from peer.core.exchange import CPU, Callee, Caller
from peer.core.frame import Frame
from peer.core.members import Member
from peer.core.partners import choose
from peer.core.prior import guesses, next_priors, seed_of
from peer.core.state import State
from peer.core.terms import Terms
from peer.endings import ANSWER_S, DIAL_S, Endings, inquire, told
from peer.errors import ProtocolError, Unreachable
from peer.events import Meeting
from peer.manifest import Manifest
from peer.net.base import Network, Stream
from peer.planner import Planner
from peer.proposals import Proposals
from peer.roster import REFRESH_S, Roster
from peer.talk import Talk
from peer.timetable import Pace, Timetable
from peer.view import View
from peer.wire.peer_pb2 import Answer, Inquiry, Message, Offer

SILENCE_S = 5.0
ROUND_TRIPS = 8
"""A partner that owes something is lost after SILENCE_S, so many round trips, and twice its patience without a word."""

SEATS = 3
"""Meetings at once, at most: a slow partner keeps one of them busy, not this peer."""

TICK_S = 0.05
IDLE_S = 0.25
RECORD_AGE_S = 2 * REFRESH_S
"""A record is read and renewed every REFRESH_S; the round in it is at most this old."""


class Meetings:
    """A peer's meetings: those it asks for, spread over the round, and those it is asked for.

    origin: hash of the first weights.
    """

    def __init__(
        self,
        peer_id: str,
        run: Manifest,
        origin: str,
        network: Network,
        roster: Roster,
        boundary: Boundary,
        view: View,
        pace: Pace,
        planner: Planner,
        account: Account,
        endings: Endings,
    ) -> None:
        self._endings = endings
        self._peer_id, self._run = peer_id, run
        self._network, self._roster, self._boundary, self._view = network, roster, boundary, view
        self._pace, self._planner, self._account = pace, planner, account
        self._timetable = Timetable(pace)
        self._proposals = Proposals(peer_id, run, origin, pace, planner, self._timetable)
        self._random = random.Random(peer_id)
        self._learning = asyncio.Lock()
        self._talks: list[Talk] = []
        self._unapplied = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._free = asyncio.Event()
        self._stopping = False
        self._stall_s = 0.0
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Ask for meetings for ever, as many a round as the plan has."""
        try:
            while self._fault is None:
                pause_s = TICK_S if self._open() else IDLE_S
                await asyncio.sleep(pause_s)
            raise self._fault
        finally:
            for task in self._asking:
                task.cancel()
            await asyncio.gather(*self._asking, return_exceptions=True)

    def _open(self) -> bool:
        """Begin a meeting if one is due; False if there is nobody to ask."""
        planned = self._planner.plan
        self._account.planned(planned, self._planner.line, self._pace.round)
        if self._stopping or self._at_once >= SEATS or self._timetable.spent(planned.round_bytes):
            return True
        if not self._timetable.due(planned.meetings, len(self._talks)):
            return True
        engaged = {talk.partner for talk in self._talks}
        members = self._roster.members
        choice = choose(
            [member for member in members if member.peer_id not in engaged],
            self._peer_id,
            self._pace.round,
            self._run.exchange.max_lag + self._timetable.rounds_in(RECORD_AGE_S),
            self._account.ledger,
            time.time(),
            self._random,
        )
        if isinstance(choice, Decision):
            if not engaged:
                self._account.idle(choice)
            return False
        task = asyncio.create_task(self.ask(choice))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return True

    async def close(self, grace_s: float) -> None:
        """Decline from now on; give the meetings that are under way a little time to end, then abandon them."""
        self._stopping = True
        for _ in range(2):
            end_s = time.monotonic() + grace_s / 2
            while self._talks and (left_s := end_s - time.monotonic()) > 0:
                self._free.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._free.wait()
            self.abandon()

    def abandon(self) -> None:
        """End the meetings that are under way, without a correction."""
        for talk in self._talks:
            talk.abandon()

    # ------------------------------------------------------------------ as callee

    async def invited(self, stream: Stream, offer: Offer) -> None:
        """Answer an offer, and if it is accepted, hold the meeting."""
        decision, terms = self._decide(offer)
        answer = self._proposals.answer(decision, terms)
        if terms is None:
            with suppress(Unreachable):
                await stream.send(Message(answer=answer), ANSWER_S)
            if decision.reason not in PASSING:  # these are the caller's to count
                self._account.declined(offer.peer_id[:64], decision)
            return
        talk = Talk("callee", offer.peer_id, offer.meeting_id, terms)
        talk.partner_round, talk.patience_ms, talk.stream = offer.round, offer.patience_ms, stream
        allocation = self._planner.allocations[terms.codec]
        talk.exchange = Callee(
            allocation.codec, lambda ranks: allocation.parts(ranks, terms.budget_bytes), talk.admit, self._view.device
        )
        self._talks.append(talk)
        try:
            await stream.send(Message(answer=answer), ANSWER_S)
            cut = await stream.receive(ANSWER_S + 2 * talk.patience_ms / 1000)
            if cut is None:
                raise Unreachable("the caller ended the stream after it was accepted")
            talk.exchange.receive(cut)
            await self._converse(talk, stream)
        except Unreachable as error:
            talk.lost("lost", str(error))
        except ProtocolError as error:
            with suppress(Unreachable):
                await stream.send(talk.exchange.abort(error.reason, error.detail), ANSWER_S)
        finally:
            self._conclude(talk)

    async def inquired(self, stream: Stream, inquiry: Inquiry) -> None:
        """Tell a caller that lost the last message how a meeting ended; one that is still going on ends untouched."""
        going_on = [talk for talk in self._talks if talk.role == "callee" and talk.meeting_id == inquiry.meeting_id]
        for talk in going_on:
            talk.lost("lost", "the caller lost the stream")
        known = going_on[0].applied if going_on else self._endings.of(inquiry.meeting_id)
        await stream.send(told(known), ANSWER_S)

    def _decide(self, offer: Offer) -> tuple[Decision, Terms | None]:
        """Decide on an offer, and by which terms the meeting is held."""
        if self._stopping:
            return Decision(False, "stopping", "this peer is leaving the swarm; ask someone else"), None
        if offer.meeting_id in self._endings:
            return Decision(False, "replayed", "a meeting of this id was held before; draw a new one"), None
        with_caller = [talk for talk in self._talks if talk.partner == offer.peer_id]
        offering = any(talk.exchange is None and talk.role == "caller" for talk in with_caller)
        busy = self._at_once >= SEATS or (bool(with_caller) and not offering)
        return self._proposals.decide(offer, busy, offering, self._at_once + 1)

    # ------------------------------------------------------------------ as caller

    async def ask(self, partner: Member) -> None:
        """Offer a meeting to one partner, and hold it if the partner accepts."""
        talk = Talk("caller", partner.peer_id, os.urandom(MEETING_ID_BYTES))
        self._talks.append(talk)
        wish = self._proposals.wish(partner.peer_id, self._at_once)
        try:
            talk.stream = await self._network.dial(partner.addresses[0], DIAL_S)
            asked_s = time.monotonic()
            await talk.stream.send(Message(offer=self._proposals.offer(talk.meeting_id, wish)), ANSWER_S)
            answer = await self._answer(talk.stream)
            talk.rtt_s = time.monotonic() - asked_s
            talk.partner_round, talk.rest_s = answer.round, answer.rest_ms / 1000
            talk.patience_ms = min(answer.patience_ms, LONGEST_PATIENCE_MS)
            terms = self._proposals.accepted(wish, answer)
            if isinstance(terms, Decision):
                talk.declined = terms
                return
            talk.terms = terms
            async with self._learning:
                talk.exchange = await asyncio.to_thread(self._caller, talk, terms)
            await self._converse(talk, talk.stream)
            if talk.doubted:
                applied = await inquire(self._network, partner.addresses[0], talk.meeting_id)
                if applied is not None:
                    talk.exchange.resolve(applied)
        except Unreachable as error:
            talk.lost("unreachable", str(error))
        except ProtocolError as error:
            talk.lost(error.reason, error.detail)
        finally:
            self._conclude(talk)
            if talk.stream is not None:
                await talk.stream.close()

    async def _answer(self, stream: Stream) -> Answer:
        message = await stream.receive(ANSWER_S)
        if message is None:
            raise Unreachable("the partner ended the stream before it answered")
        if isinstance(message, Frame) or not (message.HasField("answer") or message.HasField("abort")):
            raise ProtocolError("malformed", "the partner said something else than an answer to an offer")
        if message.HasField("abort"):
            return Answer(reason=message.abort.reason, detail=message.abort.detail)
        return message.answer

    def _caller(self, talk: Talk, terms: Terms) -> Caller:
        """Decide what a meeting is about."""
        allocation, began_s = self._planner.allocations[terms.codec], time.thread_time()
        priors = self._planner.priors
        ranks = allocation.ranks(priors, self._pace.sensitivity, terms.budget_bytes)
        parts = allocation.parts(ranks, terms.budget_bytes)
        found = guesses(parts, priors, seed_of(talk.meeting_id))
        talk.computed_s = time.thread_time() - began_s
        return Caller(allocation.codec, ranks, parts, found, talk.admit, self._view.device)

    # ------------------------------------------------------------------ both

    @property
    def _at_once(self) -> int:
        """How many meetings go on now, or have ended so lately that the weights don't have their correction yet."""
        return len(self._talks) + self._unapplied

    def _applied(self, adding: asyncio.Future[None]) -> None:
        self._unapplied -= 1
        self._fault = self._fault or (None if adding.cancelled() else adding.exception())

    async def _converse(self, talk: Talk, stream: Stream) -> None:
        assert talk.exchange is not None
        talk.model_norm = await asyncio.to_thread(self._view.norm)
        if self._stopping:
            talk.abandon()
        slower_s = max(talk.patience_ms, self._timetable.patience_ms) / 1000
        rtt_s = self._planner.line.rtt_s if talk.rtt_s is None else talk.rtt_s
        silence_s = SILENCE_S + ROUND_TRIPS * rtt_s + 2 * slower_s
        rate = self._planner.line.to(talk.partner)
        talk.conversation = Conversation(talk.exchange, stream, self._view, silence_s, rate, rtt_s)
        await talk.conversation.run()

    def _conclude(self, talk: Talk) -> None:
        """Apply what was agreed, count what was not, and have the seat free again."""
        self._talks.remove(talk)
        self._free.set()
        if talk.role == "callee":
            self._endings.remember(talk.meeting_id, talk.applied)
        self._timetable.spend(sum(talk.bytes))
        self._planner.line.met(talk.partner, talk.gauge, talk.rtt_s)
        decision = talk.why()
        if talk.applied and self._apply(talk):
            self._note(talk)
        elif talk.applied:
            detail = "this peer had left when it learned that the partner has the correction"
            self._account.failed(talk.partner, Decision(False, "in-doubt", detail), *talk.bytes)
        elif talk.declined is not None or decision.reason in PASSING:
            self._account.declined(talk.partner, decision, *talk.bytes, talk.rest_s)
        else:
            self._account.failed(talk.partner, decision, *talk.bytes)

    def _apply(self, talk: Talk) -> bool:
        """Have the correction added at the next step boundary; False if there is none any more."""
        assert talk.exchange is not None and talk.terms is not None
        correction = talk.exchange.correction
        weight = -talk.terms.weight if talk.role == "caller" else talk.terms.weight

        def add(state: State) -> None:
            began_s = time.perf_counter()
            self._view.await_products()
            correction.add_(weight, state.weights, state.anchor)
            self._stall_s += time.perf_counter() - began_s

        adding = self._boundary.post(add)
        if adding.done() and isinstance(adding.exception(), Unreachable):
            return False  # only a doubt that was resolved after this peer left comes so late
        self._unapplied += 1
        asyncio.wrap_future(adding).add_done_callback(self._applied)
        return True

    def take_stall_s(self) -> float:
        """Return the seconds that training spent on corrections since this was last asked."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def _note(self, talk: Talk) -> None:
        """Tell of a meeting that took place, and learn from it."""
        assert talk.exchange is not None and talk.terms is not None
        correction, terms = talk.exchange.correction, talk.terms
        sent, received = talk.bytes
        seconds = time.monotonic() - talk.began_s
        self._timetable.met()
        self._planner.met(seconds - talk.flowing_s)
        self._account.met(
            Meeting(
                partner=talk.partner,
                role=talk.role,
                round=self._pace.round,
                partner_round=talk.partner_round,
                codec=terms.codec,
                budget_bytes=terms.budget_bytes,
                weight=terms.weight,
                bytes_sent=sent,
                bytes_received=received,
                seconds=seconds,
                rtt_s=talk.rtt_s,
                up_bits_per_s=talk.gauge.bits_per_s,
                correction=talk.exchange.norm,
            )
        )
        learning = asyncio.create_task(self._learn(correction, terms.codec, talk.all_computed_s, sent + received))
        self._asking.add(learning)
        learning.add_done_callback(self._asking.discard)

    async def _learn(self, correction: Correction, codec: str, computed_s: float, size_bytes: int) -> None:
        """Remember what a meeting found, for the next one, and what it was to compute, this included."""

        def learn() -> float:
            began_s = time.thread_time()
            self._planner.priors = next_priors(correction.to(CPU), self._planner.priors)
            return time.thread_time() - began_s

        async with self._learning:
            computed_s += await asyncio.to_thread(learn)
        self._planner.computed(codec, computed_s, size_bytes)
