"""One exchange over a stream of the in-memory network: slow links, dead ones, and ends of every kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from peer.conversation import FRAME_S, LEAST_ON_THE_WAY_BYTES, ON_THE_WAY_S, SMALLEST_FRAME_BYTES, Conversation
from peer.core.codec import parse, parts
from peer.core.decision import Decision
from peer.core.exchange import Callee, Caller
from peer.core.frame import Frame, Said
from peer.core.gossip import Outer, start
from peer.core.phase import Phase
from peer.core.prior import guesses, start_priors
from peer.core.state import State
from peer.net.base import Stream
from peer.net.memory import Hub, MemoryNetwork
from peer.still import Still
from peer.view import View
from peer.wire.peer_pb2 import Commit, Message, Progress

SMALL: dict[str, tuple[int, ...]] = {"w": (160, 128), "bias": (33,)}
"""Under codec none 82 kB a leg: six of the smallest frames."""

LARGE: dict[str, tuple[int, ...]] = {f"w{number}": (512, 512) for number in range(4)}
"""4 MiB a leg: several times what may be on its way."""

HEAVY: dict[str, tuple[int, ...]] = {f"w{number}": (1024, 1024) for number in range(8)}
"""32 MiB a leg: much more than what may wait for its products."""

DEADLINE_S = 30.0
SLOWEST = 1.0
"""Bits a second at which frames are as small as they get."""


class Wire:
    """A stream as it is, with an eye on what goes through, and messages said and heard as a test wants it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.said: list[Said] = []
        self.heard: list[Said] = []
        self.on_the_way_bytes = self.most_on_the_way_bytes = 0

    @property
    def sent_bytes(self) -> int:
        return self._stream.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._stream.received_bytes

    async def send(self, said: Said, timeout_s: float) -> None:
        await self._stream.send(said, timeout_s)
        self.said.append(said)
        self._count()

    async def receive(self, timeout_s: float) -> Said | None:
        said = await self._stream.receive(timeout_s)
        if said is not None:
            self.heard.append(said)
        self._count()
        return said

    async def close(self) -> None:
        await self._stream.close()

    def _count(self) -> None:
        self.on_the_way_bytes = sum(frame_bytes(self.said)) - max(progress(self.heard), default=0)
        self.most_on_the_way_bytes = max(self.most_on_the_way_bytes, self.on_the_way_bytes)


class Slow(Wire):
    """A link that brings one frame after another, each in so many seconds; nothing overtakes one."""

    def __init__(self, stream: Stream, frame_s: float) -> None:
        super().__init__(stream)
        self._frame_s = frame_s

    async def receive(self, timeout_s: float) -> Said | None:
        said = await super().receive(timeout_s)
        if isinstance(said, Frame):
            await asyncio.sleep(self._frame_s)
        return said


class Narrow(Wire):
    """A link that brings so many bits of frames a second."""

    def __init__(self, stream: Stream, bits_per_s: float) -> None:
        super().__init__(stream)
        self._bits_per_s = bits_per_s

    async def receive(self, timeout_s: float) -> Said | None:
        said = await super().receive(timeout_s)
        if isinstance(said, Frame):
            await asyncio.sleep(8 * len(said.payload) / self._bits_per_s)
        return said


class Stuck(Wire):
    """A link that brings nothing any more from a message of some kind on."""

    def __init__(self, stream: Stream, body: str, after: int = 0) -> None:
        super().__init__(stream)
        self._body, self._left = body, after

    async def receive(self, timeout_s: float) -> Said | None:
        said = await super().receive(timeout_s)
        if said is not None and _is(said, self._body):
            if self._left == 0:
                await asyncio.Event().wait()
            self._left -= 1
        return said


class Babbling(Wire):
    """A link on which a frame becomes the same news again and again."""

    def __init__(self, stream: Stream, pause_s: float) -> None:
        super().__init__(stream)
        self._pause_s = pause_s

    async def send(self, said: Said, timeout_s: float) -> None:
        while isinstance(said, Frame):
            await self._stream.send(Message(progress=Progress(bytes=0)), timeout_s)
            await asyncio.sleep(self._pause_s)
        await super().send(said, timeout_s)


def _is(said: Said, body: str) -> bool:
    return body == ("frame" if isinstance(said, Frame) else said.WhichOneof("body"))


def frame_bytes(messages: list[Said]) -> list[int]:
    return [len(said.payload) for said in messages if isinstance(said, Frame)]


def progress(messages: list[Said]) -> list[int]:
    return [said.progress.bytes for said in messages if isinstance(said, Message) and said.HasField("progress")]


def anything(norm: float) -> Decision:
    return Decision(True)


def unharmed(stream: Stream) -> Wire:
    return Wire(stream)


class Side:
    """One peer of a pair: its weights, its end of the stream, its exchange, and what it says and hears."""

    def __init__(self, exchange: Caller | Callee, shapes: dict[str, tuple[int, ...]], seed: int, wire: Wire) -> None:
        draw, outer = torch.Generator().manual_seed(seed), Outer()
        weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        self.state = State(weights, weights, start(outer.form, weights))
        self.still, self.exchange, self.wire = Still(), exchange, wire
        self.view = View(outer, self.state, self.still)

    def begin(self, silence_s: float, bits_per_s: float) -> None:
        self.conversation = Conversation(self.exchange, self.wire, self.view, silence_s, bits_per_s)
        self.began_s = time.monotonic()
        self.running = asyncio.create_task(self.conversation.run())

    @property
    def ending(self) -> tuple[Phase, str]:
        return self.exchange.phase, self.exchange.reason


@asynccontextmanager
async def pair(
    spec: str = "none",
    shapes: dict[str, tuple[int, ...]] = SMALL,
    caller_wire: Callable[[Stream], Wire] = unharmed,
    callee_wire: Callable[[Stream], Wire] = unharmed,
    silence_s: float = DEADLINE_S,
    callee_silence_s: float | None = None,
    bits_per_s: float = SLOWEST,
) -> AsyncIterator[tuple[Side, Side, Hub]]:
    """A caller and a callee in the middle of their meeting: the offer is accepted, and Cut is said next."""
    codec, hub = parse(spec), Hub()
    cut = parts(shapes, codec)
    ranks = [codec.rank or 0] * len(shapes) if codec.low else []
    ann, ben = MemoryNetwork(hub, "ann"), MemoryNetwork(hub, "ben")
    accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def serve(stream: Stream) -> None:
        accepted.set_result(stream)
        await over.wait()

    await ann.start(serve)
    await ben.start(serve)
    dialled = await ann.dial("ben:1", DEADLINE_S)
    caller = Side(
        Caller(codec, ranks, cut, guesses(cut, start_priors(shapes), 0), anything), shapes, 1, caller_wire(dialled)
    )
    callee = Side(Callee(codec, lambda ranks: cut, anything), shapes, 2, callee_wire(await accepted))
    caller.begin(silence_s, bits_per_s)
    callee.begin(silence_s if callee_silence_s is None else callee_silence_s, bits_per_s)
    try:
        yield caller, callee, hub
    finally:
        for side in (caller, callee):
            side.running.cancel()
        await asyncio.gather(caller.running, callee.running, return_exceptions=True)
        over.set()
        await ann.close()
        await ben.close()


async def ended(*sides: Side) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(side.running for side in sides))


@pytest.mark.parametrize("spec", ["none", "int4", "rank4", "rank4-int4"])
@pytest.mark.parametrize("bits_per_s", [SLOWEST, 1e6, 1e9])
async def test_both_sides_end_with_the_same_correction(spec: str, bits_per_s: float) -> None:
    async with pair(spec, bits_per_s=bits_per_s) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.APPLIED, "")
        assert caller.exchange.correction.norm() == callee.exchange.correction.norm() > 0


async def test_frames_begin_small_and_grow_with_what_has_arrived() -> None:
    async with pair(shapes=LARGE, callee_wire=lambda stream: Narrow(stream, 16e6), bits_per_s=16e6) as (
        caller,
        callee,
        _,
    ):
        await ended(caller, callee)
        sizes = frame_bytes(caller.wire.said)
        assert sizes[0] == SMALLEST_FRAME_BYTES
        assert 8 * SMALLEST_FRAME_BYTES < max(sizes) <= FRAME_S * 16e6 / 8


async def test_a_slow_transfer_that_moves_is_never_cut() -> None:
    """Twelve frames one after another, each in a fifth of the time after which silence would be one."""
    silence_s = 1.0

    def slow(stream: Stream) -> Wire:
        return Slow(stream, silence_s / 5)

    async with pair(caller_wire=slow, callee_wire=slow, silence_s=silence_s) as (caller, callee, _):
        await ended(caller, callee)
        assert time.monotonic() - caller.began_s > 2 * silence_s
        assert caller.ending == callee.ending == (Phase.APPLIED, "")


@pytest.mark.parametrize("after", [0, 3])
async def test_a_transfer_that_stands_still_is_cut(after: int) -> None:
    silence_s = 0.5
    async with pair(callee_wire=lambda stream: Stuck(stream, "frame", after), silence_s=silence_s) as (
        caller,
        callee,
        _,
    ):
        await ended(caller, callee)
        assert callee.ending == (Phase.ABORTED, "silent")
        assert caller.ending == (Phase.ABORTED, "silent")
        assert time.monotonic() - caller.began_s >= silence_s


async def test_words_that_say_nothing_new_are_silence() -> None:
    silence_s = 0.5
    async with pair(caller_wire=lambda stream: Babbling(stream, silence_s / 5), callee_silence_s=silence_s) as (
        _caller,
        callee,
        _,
    ):
        await ended(callee)
        assert callee.ending == (Phase.ABORTED, "silent")
        assert len(callee.wire.heard) > 4


async def test_a_done_that_never_comes_leaves_the_caller_in_doubt_and_the_callee_applied() -> None:
    async with pair(caller_wire=lambda stream: Stuck(stream, "done"), silence_s=0.5) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.ending == (Phase.DOUBTED, "silent")
        assert callee.exchange.phase is Phase.APPLIED


async def test_a_peer_that_computes_for_long_does_not_take_its_partner_for_dead() -> None:
    """Training holds the weights for several times as long as silence may last."""
    silence_s = 0.3
    async with pair(callee_silence_s=silence_s) as (caller, callee, _):
        with callee.still.changing():
            done, _going_on = await asyncio.wait({caller.running, callee.running}, timeout=4 * silence_s)
            assert not done
            assert callee.exchange.heard_bytes > 0
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.APPLIED, "")


async def test_no_more_than_the_window_is_on_its_way() -> None:
    second = 8 * LEAST_ON_THE_WAY_BYTES  # of the link, which is slower than what it is taken for
    async with pair(shapes=LARGE, callee_wire=lambda stream: Narrow(stream, 8 * second)) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.exchange.phase is Phase.APPLIED
        most = max(frame_bytes(caller.wire.said))
        assert ON_THE_WAY_S == 1.0
        assert LEAST_ON_THE_WAY_BYTES < caller.wire.most_on_the_way_bytes <= second + LEAST_ON_THE_WAY_BYTES + most


async def test_before_anything_has_arrived_no_more_than_the_least_is_on_its_way() -> None:
    async with pair(shapes=LARGE, callee_wire=lambda stream: Stuck(stream, "frame"), bits_per_s=16 * 2**20) as (
        caller,
        callee,
        _,
    ):
        async with asyncio.timeout(DEADLINE_S):
            while caller.wire.on_the_way_bytes <= LEAST_ON_THE_WAY_BYTES:
                await asyncio.sleep(0.01)
        await asyncio.wait({caller.running, callee.running}, timeout=0.2)
        assert caller.wire.most_on_the_way_bytes <= LEAST_ON_THE_WAY_BYTES + SMALLEST_FRAME_BYTES


async def test_while_frames_arrive_their_sender_hears_of_it() -> None:
    async with pair(callee_wire=lambda stream: Slow(stream, 0.1)) as (caller, callee, _):
        await ended(caller, callee)
        told, sent = progress(caller.wire.heard), frame_bytes(caller.wire.said)
        assert len(sent) >= 6
        assert len(told) >= len(sent) - 2  # not of what arrived in the first moment, nor when all was over
        assert told == sorted(set(told))
        assert told[-1] <= sum(sent)
        assert caller.conversation.gauge.bits_per_s == pytest.approx(8 * SMALLEST_FRAME_BYTES / 0.1, rel=0.5)


@pytest.mark.parametrize("who", ["caller", "callee"])
async def test_a_side_that_abandons_it_ends_both(who: str) -> None:
    def slow(stream: Stream) -> Wire:
        return Slow(stream, 0.1)

    async with pair(caller_wire=slow, callee_wire=slow) as (caller, callee, _):
        async with asyncio.timeout(DEADLINE_S):
            while not callee.exchange.heard_bytes:
                await asyncio.sleep(0.01)
        (caller if who == "caller" else callee).conversation.abandon()
        await ended(caller, callee)
        assert caller.exchange.phase is callee.exchange.phase is Phase.ABORTED
        assert (caller if who == "caller" else callee).exchange.reason == "stopping"


@pytest.mark.parametrize("who", ["caller", "callee"])
async def test_a_side_that_is_cancelled_says_so(who: str) -> None:
    def slow(stream: Stream) -> Wire:
        return Slow(stream, 0.1)

    async with pair(caller_wire=slow, callee_wire=slow) as (caller, callee, _):
        async with asyncio.timeout(DEADLINE_S):
            while not callee.exchange.heard_bytes:
                await asyncio.sleep(0.01)
        one, other = (caller, callee) if who == "caller" else (callee, caller)
        one.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.running
        await ended(other)
        assert one.ending == other.ending == (Phase.ABORTED, "stopping")


async def test_a_stream_that_breaks_ends_both() -> None:
    async with pair(callee_wire=lambda stream: Slow(stream, 0.1)) as (caller, callee, hub):
        async with asyncio.timeout(DEADLINE_S):
            while not callee.exchange.heard_bytes:
                await asyncio.sleep(0.01)
        hub.kill("ben")
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.ABORTED, "lost")


class Damaging(Wire):
    """A link that swaps one message for another."""

    def __init__(self, stream: Stream, body: str, swap: Callable[[Said], Said]) -> None:
        super().__init__(stream)
        self._body, self._swap = body, swap

    async def receive(self, timeout_s: float) -> Said | None:
        said = await super().receive(timeout_s)
        return self._swap(said) if said is not None and _is(said, self._body) else said


def damaged(said: Said) -> Said:
    assert isinstance(said, Frame)
    return Frame(said.leg, said.offset, said.payload, said.checksum ^ 1)


@pytest.mark.parametrize(
    ("swap", "reason"), [(damaged, "checksum"), (lambda said: Message(commit=Commit()), "truncated")]
)
async def test_a_partner_that_breaks_a_rule_is_told_which(swap: Callable[[Said], Said], reason: str) -> None:
    async with pair(callee_wire=lambda stream: Damaging(stream, "frame", swap)) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.ABORTED, reason)


async def test_an_error_of_our_own_is_no_ending_but_an_error() -> None:
    async with pair() as (_caller, callee, _):
        callee.state.weights.pop("w")
        with pytest.raises(KeyError):
            await ended(callee)


async def test_a_callee_whose_way_out_is_slow_goes_on_hearing_what_has_arrived() -> None:
    def narrow(stream: Stream) -> Wire:
        return Narrow(stream, 128e6)

    async with pair(shapes=HEAVY, caller_wire=narrow, bits_per_s=10e6, silence_s=3.0) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.APPLIED, "")


async def test_a_first_meeting_over_a_very_slow_link_is_not_taken_for_silence() -> None:
    """16 KiB take a second; what a line is taken for before anybody knows lets frames take many."""

    def narrow(stream: Stream) -> Wire:
        return Narrow(stream, 8 * 2**14 / 0.2)

    async with pair(caller_wire=narrow, callee_wire=narrow, bits_per_s=10e6, silence_s=1.0) as (caller, callee, _):
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.APPLIED, "")


class Reluctant(Slow):
    """A link whose frames take long to be taken, too."""

    async def send(self, said: Said, timeout_s: float) -> None:
        await super().send(said, timeout_s)
        if isinstance(said, Frame):
            await asyncio.sleep(0.3)


async def test_a_partner_hears_why_a_meeting_was_abandoned() -> None:
    """Not that its own frames, which were on their way then, come late."""
    shapes: dict[str, tuple[int, ...]] = {f"w{number}": (64, 64) for number in range(20)}
    async with pair(shapes=shapes, callee_wire=lambda stream: Reluctant(stream, 0.02)) as (caller, callee, _):
        while not callee.exchange.said_bytes:
            await asyncio.sleep(0.001)
        callee.conversation.abandon()
        await ended(caller, callee)
        assert caller.ending == callee.ending == (Phase.ABORTED, "stopping")


class Held(Wire):
    """A stream that takes Done only after a long time."""

    async def send(self, said: Said, timeout_s: float) -> None:
        if not isinstance(said, Frame) and _is(said, "done"):
            await asyncio.Event().wait()
        await super().send(said, timeout_s)


async def test_a_callee_that_has_decided_to_apply_never_says_that_it_has_not() -> None:
    async with pair(callee_wire=Held, silence_s=2.0) as (caller, callee, hub):
        async with asyncio.timeout(DEADLINE_S):
            while callee.exchange.phase is not Phase.APPLIED:
                await asyncio.sleep(0.001)
        callee.running.cancel()
        await asyncio.gather(callee.running, return_exceptions=True)
        hub.kill("ben")
        await ended(caller)
        assert callee.exchange.phase is Phase.APPLIED
        assert caller.exchange.phase is Phase.DOUBTED
