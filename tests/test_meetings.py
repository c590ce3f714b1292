"""Two peers' meetings over the in-memory network, and what becomes of them when messages get lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import tail
from peer.account import Account
from peer.boundary import Boundary
from peer.core.exchange import Caller
from peer.core.frame import Frame, Said
from peer.core.gossip import start
from peer.core.members import Member
from peer.core.state import State
from peer.core.terms import Terms
from peer.endings import Endings
from peer.errors import Unreachable
from peer.events import EventLog
from peer.manifest import Manifest
from peer.meetings import Meetings
from peer.net.base import Stream
from peer.net.memory import Hub, MemoryNetwork
from peer.planner import Planner
from peer.proposals import PROTOCOL
from peer.roster import Roster
from peer.still import Still
from peer.talk import Talk
from peer.view import View
from peer.wire.peer_pb2 import Inquiry, Message, Offer, Outcome

SHAPES: dict[str, tuple[int, ...]] = {"w": (48, 32), "bias": (32,)}
RUN = Manifest.preset("gpt-nano")
DEADLINE_S = 20.0


@dataclass
class Walk:
    """A pace that a test sets by hand."""

    round: int = 0
    fraction: float = 0.99
    step_s: float = 0.01
    round_s: float = 60.0
    sensitivity: Mapping[str, float] = field(default_factory=dict)


class Peer:
    """One side: meetings, a State, and a stand-in for training that serves the boundary."""

    def __init__(self, hub: Hub, name: str, folder: Path, run: Manifest = RUN, origin: str = "same") -> None:
        self.name, self.hub, self.run = name, hub, run
        self.network = MemoryNetwork(hub, name)
        weights = {key: torch.randn(shape, generator=_seeded(name)) for key, shape in SHAPES.items()}
        anchor = {key: tensor.clone() for key, tensor in weights.items()}
        self.state = State(weights, anchor, start(run.outer.form, weights))
        self.boundary, self.still, self.pace = Boundary(), Still(), Walk()
        self.log = folder / f"{name}.jsonl"
        view, planner = View(run.outer, self.state, self.still), Planner(run.exchange, SHAPES, self.pace, 0.5)
        self.account = Account(EventLog(self.log))
        self.roster = Roster(self.network, Member(run.run_id, name, (), 0, 0, 0.0))
        self.meetings = Meetings(
            name,
            run,
            origin,
            self.network,
            self.roster,
            self.boundary,
            view,
            self.pace,
            planner,
            self.account,
            Endings(),
        )
        self.tamper: Callable[[Stream], Stream] = lambda stream: stream

    async def serve(self, stream: Stream) -> None:
        stream = self.tamper(stream)
        message = await stream.receive(DEADLINE_S)
        if not isinstance(message, Message):
            return
        if message.HasField("offer"):
            await self.meetings.invited(stream, message.offer)
        elif message.HasField("inquiry"):
            await self.meetings.inquired(stream, message.inquiry)

    async def train(self) -> None:
        while True:
            with self.still.changing():
                self.boundary.serve(self.state)
            await asyncio.sleep(0.001)

    def events(self, kind: str) -> list[tail.Record]:
        return [event for event in tail.read(self.log) if event["event"] == kind]


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))


@asynccontextmanager
async def pair(folder: Path, calls: str = "ann", **other: Any) -> AsyncIterator[tuple[Peer, Peer]]:
    """Ann and Ben, alive and known to each other; those named in `calls` ask for meetings."""
    hub = Hub()
    peers = (Peer(hub, "ann", folder), Peer(hub, "ben", folder, **other))
    tasks = []
    for peer in peers:
        await peer.network.start(peer.serve)
        await peer.roster.publish(0, 0)
        tasks.append(asyncio.create_task(peer.train()))
    for peer in peers:
        await peer.roster.refresh()
        if peer.name in calls:
            tasks.append(asyncio.create_task(peer.meetings.run()))
    try:
        yield peers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in peers:
            await peer.network.close()


def has_met(peer: Peer, times: int) -> bool:
    return peer.account.counts.meetings >= times


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def total(*peers: Peer) -> torch.Tensor:
    return torch.stack([peer.state.weights["w"] for peer in peers]).double().sum(0)


async def test_both_sides_of_a_meeting_apply_it_to_weights_and_anchor_and_the_mean_stays(tmp_path: Path) -> None:
    async with pair(tmp_path) as (ann, ben):
        mean, apart = total(ann, ben), (ann.state.weights["w"] - ben.state.weights["w"]).norm()
        await until(lambda: ann.account.counts.meetings == ben.account.counts.meetings == RUN.exchange.meetings)
        await until(lambda: torch.allclose(total(ann, ben), mean, atol=1e-5))
        assert (ann.state.weights["w"] - ben.state.weights["w"]).norm() < 0.9 * apart
        for peer in (ann, ben):
            assert torch.equal(peer.state.weights["w"], peer.state.anchor["w"])
            assert not peer.state.outer["momentum"]["w"].any()
        ours, theirs = ann.events("meeting"), ben.events("meeting")
        assert [event["role"] for event in ours] == ["caller"] * len(ours)
        assert [event["role"] for event in theirs] == ["callee"] * len(theirs)
        assert [event["correction"] for event in ours] == [event["correction"] for event in theirs]
        assert [event["bytes_sent"] for event in ours] == [event["bytes_received"] for event in theirs]


async def test_meetings_are_spread_over_the_round_and_no_more_than_the_run_has(tmp_path: Path) -> None:
    async with pair(tmp_path) as (ann, ben):
        ann.pace.fraction = 0.0
        await asyncio.sleep(0.2)
        assert ann.account.counts.meetings == 0
        for done in range(1, RUN.exchange.meetings + 1):
            ann.pace.fraction = (done - 0.49) / RUN.exchange.meetings
            await until(partial(has_met, ann, done))
        ann.pace.fraction = 1.0
        await asyncio.sleep(0.2)
        assert ann.account.counts.meetings == RUN.exchange.meetings
        ann.pace.round = ben.pace.round = 1
        await until(lambda: ann.account.counts.meetings == 2 * RUN.exchange.meetings)


async def test_offers_that_cross_end_in_meetings_and_never_in_a_deadlock(tmp_path: Path) -> None:
    async with pair(tmp_path, calls="ann ben") as (ann, ben):
        mean = total(ann, ben)
        for round in range(5):
            ann.pace.round = ben.pace.round = round
            await until(partial(has_met, ann, (round + 1) * RUN.exchange.meetings))
            await until(partial(has_met, ben, (round + 1) * RUN.exchange.meetings))
        assert ann.account.counts.failed == ben.account.counts.failed == 0
        await until(lambda: torch.allclose(total(ann, ben), mean, atol=1e-4))


@pytest.mark.parametrize("reason", ["origin", "lag"])
async def test_a_refused_offer_is_counted_on_both_sides_with_its_reason(tmp_path: Path, reason: str) -> None:
    other: dict[str, Any] = {"origin": "other"} if reason == "origin" else {}
    async with pair(tmp_path, **other) as (ann, ben):
        if reason == "lag":
            ben.pace.round = RUN.exchange.max_lag + 1
        await until(lambda: bool(ann.events("skip")) and bool(ben.events("skip")))
        for peer, partner in ((ann, "ben"), (ben, "ann")):
            event = peer.events("skip")[0]
            assert (event["partner"], event["outcome"], event["reason"]) == (partner, "declined", reason)
            assert event["detail"]
        assert ann.account.counts.meetings == 0


async def test_a_peer_that_leaves_declines_and_a_dead_one_is_unreachable(tmp_path: Path) -> None:
    async with pair(tmp_path) as (ann, ben):
        await ben.meetings.close(0.1)
        await until(lambda: bool(ann.events("skip")))
        assert ann.events("skip")[0]["reason"] == "stopping"
        ann.hub.kill("ben")
        await until(lambda: any(event["reason"] == "unreachable" for event in ann.events("skip")))
        assert ann.account.counts.failed >= 1


class Cut:
    """A stream that ends, for both sides, in place of the first message of a kind that this side sends."""

    def __init__(self, stream: Stream, body: str) -> None:
        self._stream, self._body = stream, body
        self._cut = False

    @property
    def sent_bytes(self) -> int:
        return self._stream.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._stream.received_bytes

    async def send(self, message: Said, timeout_s: float) -> None:
        if ("frame" if isinstance(message, Frame) else message.WhichOneof("body")) == self._body:
            self._cut = True
            await self._stream.close()
        if self._cut:
            raise Unreachable("cut")
        await self._stream.send(message, timeout_s)

    async def receive(self, timeout_s: float) -> Said | None:
        if self._cut:
            raise Unreachable("cut")
        return await self._stream.receive(timeout_s)

    async def close(self) -> None:
        await self._stream.close()


def cut_once(body: str) -> Callable[[Stream], Stream]:
    left = [body]
    return lambda stream: Cut(stream, left.pop()) if left else stream


async def test_a_lost_done_is_asked_after_and_both_sides_end_up_with_the_correction(tmp_path: Path) -> None:
    async with pair(tmp_path) as (ann, ben):
        mean = total(ann, ben)
        ben.tamper = cut_once("done")
        await until(lambda: ann.account.counts.meetings >= 1)
        assert ann.account.counts.failed == 0
        assert ben.account.counts.meetings >= 1
        await until(lambda: torch.allclose(total(ann, ben), mean, atol=1e-5))


@pytest.mark.parametrize("body", ["answer", "frame"])
async def test_a_stream_that_breaks_earlier_leaves_both_untouched_and_the_next_meeting_goes_well(
    tmp_path: Path, body: str
) -> None:
    async with pair(tmp_path) as (ann, ben):
        before = {peer.name: peer.state.weights["w"].clone() for peer in (ann, ben)}
        ben.tamper = cut_once(body)
        await until(lambda: bool(ann.events("skip")) and bool(ben.events("skip")))
        if ann.account.counts.meetings == 0:
            for peer in (ann, ben):
                assert torch.equal(peer.state.weights["w"], before[peer.name])
        assert ann.events("skip")[0]["reason"] in ("lost", "unreachable")
        await until(lambda: ann.account.counts.meetings >= 1)


async def test_a_lost_done_of_a_peer_that_is_gone_for_good_stays_in_doubt_and_is_counted(tmp_path: Path) -> None:
    async with pair(tmp_path) as (ann, ben):
        before = ann.state.weights["w"].clone()

        def vanish(stream: Stream) -> Stream:
            class Last(Cut):
                async def send(self, message: Said, timeout_s: float) -> None:
                    if isinstance(message, Message) and message.HasField("done"):
                        ann.hub.kill("ben")
                        raise Unreachable("killed")
                    await self._stream.send(message, timeout_s)

            return Last(stream, "done")

        ben.tamper = vanish
        await until(lambda: bool(ann.events("skip")))
        assert ann.events("skip")[0]["reason"] == "in-doubt"
        assert torch.equal(ann.state.weights["w"], before)


async def test_an_inquiry_ends_a_meeting_that_is_still_going_on_untouched(tmp_path: Path) -> None:
    async with pair(tmp_path, calls="") as (ann, ben):
        stream = await ann.network.dial("ben:1", 5)
        offer = Offer(
            protocol=PROTOCOL,
            run_id=RUN.run_id,
            origin="same",
            peer_id="ann",
            round=0,
            meeting_id=bytes(16),
            codec="rank-int4",
            budget_bytes=10_000,
            weight=0.5,
            patience_ms=100,
        )
        await stream.send(Message(offer=offer), 5)
        answer = await stream.receive(5)
        assert isinstance(answer, Message)
        assert answer.answer.accepted
        endings = []
        for meeting_id in (bytes(16), bytes(15) + b"x"):
            asking = await ann.network.dial("ben:1", 5)
            await asking.send(Message(inquiry=Inquiry(meeting_id=meeting_id)), 5)
            told = await asking.receive(5)
            assert isinstance(told, Message)
            endings.append(told.outcome.ending)
        assert endings == [Outcome.UNTOUCHED, Outcome.UNKNOWN]
        await until(lambda: ben.account.counts.failed == 1)
        again = await ann.network.dial("ben:1", 5)
        await again.send(Message(offer=offer), 5)
        refused = await again.receive(5)
        assert isinstance(refused, Message)
        assert refused.answer.reason == "replayed"


async def test_a_peer_that_leaves_accepts_no_correction_that_it_would_not_add(tmp_path: Path) -> None:
    """The caller is still computing what to say first when the callee's training ends."""
    async with pair(tmp_path, calls="") as (ann, ben):
        gate, begin = threading.Event(), ann.meetings._caller

        def late(talk: Talk, terms: Terms) -> Caller:
            gate.wait(DEADLINE_S)
            return begin(talk, terms)

        ann.meetings._caller = late  # type: ignore[method-assign]
        before = total(ann, ben)
        (member,) = [each for each in ann.roster.members if each.peer_id == "ben"]
        asking = asyncio.create_task(ann.meetings.ask(member))
        await until(lambda: bool(ben.meetings._talks))
        await ben.meetings.close(0.1)
        ben.boundary.close(ben.state)
        gate.set()
        await asking
        await until(lambda: not ben.meetings._talks)
        assert (ann.account.counts.meetings, ben.account.counts.meetings) == (0, 0)
        assert torch.equal(total(ann, ben), before)
        assert ben.events("skip")[0]["reason"] == "stopping"


async def test_what_a_meeting_carried_counts_however_it_ended(tmp_path: Path) -> None:
    async with pair(tmp_path, calls="") as (ann, ben):
        ben.tamper = cut_once("frame")
        (member,) = [each for each in ann.roster.members if each.peer_id == "ben"]
        await ann.meetings.ask(member)
        assert ann.account.counts.meetings == 0
        sent = ann.account.counts.bytes_sent + ann.account.counts.bytes_received
        assert sent > 100
        assert ann.meetings._timetable.spent(sent)
        assert not ann.meetings._timetable.spent(sent + 1)


async def test_a_partner_that_falls_silent_is_given_up_and_training_never_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.meetings.SILENCE_S", 0.0)
    async with pair(tmp_path, calls="") as (ann, ben):

        async def hold(stream: Stream) -> None:
            offer = await stream.receive(5)
            assert isinstance(offer, Message)
            from peer.wire.peer_pb2 import Answer

            yes = Answer(accepted=True, peer_id="ben", patience_ms=100, codec=offer.offer.codec)
            yes.weight, yes.budget_bytes = offer.offer.weight, offer.offer.budget_bytes
            await stream.send(Message(answer=yes), 5)
            await asyncio.sleep(3600)

        await ben.network.close()
        await ben.network.start(hold)
        asking = asyncio.create_task(ann.meetings.run())
        await until(lambda: bool(ann.events("skip")))
        assert ann.events("skip")[0]["reason"] == "silent"
        assert ann.meetings.take_stall_s() < 1.0
        asking.cancel()
