"""A peer's limits on real streams: what arrives is bounded from above, whatever the machine is busy with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peer.errors import Unreachable
from peer.net.base import Serve, Stream
from peer.net.rpc import Rpc
from peer.net.throttle import BURST_BYTES, Throttle
from peer.wire.peer_pb2 import Inquiry, Message

S = 20.0
RATE = 8e6
BYTES_PER_S = RATE / 8
CARGO = Message(inquiry=Inquiry(meeting_id=bytes(40_000)))
CARGO_BYTES = CARGO.ByteSize()
TIMES = 10
LARGE = Message(inquiry=Inquiry(meeting_id=bytes(BURST_BYTES)))
HUGE = Message(inquiry=Inquiry(meeting_id=bytes(4_000_000)))


@asynccontextmanager
async def up(serve: Serve, throttle: Throttle | None = None) -> AsyncIterator[Rpc]:
    rpc = Rpc(throttle=throttle)
    await rpc.start(serve)
    try:
        yield rpc
    finally:
        await rpc.close()


class Arrivals:
    """Notes when how many bytes have come in, over all streams."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.start_s = self.clock()
        self.size_bytes = 0
        self.noted: list[tuple[float, int]] = []

    async def listen(self, stream: Stream) -> None:
        while (message := await stream.receive(S)) is not None:
            assert message == CARGO
            self.size_bytes += CARGO_BYTES
            self.noted.append((self.clock() - self.start_s, self.size_bytes))

    def check(self, times: int) -> None:
        """All came, and never more than the rate allows."""
        assert self.size_bytes == times * CARGO_BYTES
        for after_s, size_bytes in self.noted:
            assert size_bytes <= BYTES_PER_S * after_s + BURST_BYTES


async def pour(stream: Stream) -> None:
    for _ in range(TIMES):
        await stream.send(CARGO, S)


async def nothing(stream: Stream) -> None:
    pass


async def test_what_a_peer_sends_keeps_its_limit_on_streams_of_both_kinds_together() -> None:
    arrivals, throttle = Arrivals(), Throttle(max_upload=RATE)
    async with up(pour, throttle) as limited, up(arrivals.listen) as free:
        ours = await limited.dial(f"127.0.0.1:{free.port}", S)
        theirs = await free.dial(f"127.0.0.1:{limited.port}", S)
        await theirs.send(Message(), S)  # or gRPC does not open the call
        await asyncio.gather(pour(ours), arrivals.listen(theirs))
        await ours.close()
        await theirs.close()
    arrivals.check(2 * TIMES)
    assert throttle.sent_bytes == 2 * TIMES * CARGO_BYTES


async def test_what_a_peer_receives_keeps_its_limit_on_streams_of_both_kinds_together() -> None:
    arrivals, throttle = Arrivals(), Throttle(max_download=RATE)
    async with up(arrivals.listen, throttle) as limited, up(pour) as free:
        ours = await limited.dial(f"127.0.0.1:{free.port}", S)
        await ours.send(Message(), S)
        theirs = await free.dial(f"127.0.0.1:{limited.port}", S)
        await asyncio.gather(pour(theirs), arrivals.listen(ours))
        while arrivals.size_bytes < 2 * TIMES * CARGO_BYTES:
            await asyncio.sleep(0.01)
        await ours.close()
        await theirs.close()
    arrivals.check(2 * TIMES)
    assert throttle.received_bytes == 2 * TIMES * CARGO_BYTES


async def test_a_sender_is_held_up_by_who_receives_slowly() -> None:
    arrivals = Arrivals()
    async with up(arrivals.listen, Throttle(max_download=RATE)) as limited, up(nothing) as free:
        stream = await free.dial(f"127.0.0.1:{limited.port}", S)
        for _ in range(TIMES):
            await stream.send(CARGO, S)
            ahead = stream.sent_bytes - arrivals.size_bytes
            assert ahead <= BURST_BYTES + 4 * CARGO_BYTES
        await stream.close()


async def test_without_limits_all_is_counted_and_nobody_waits() -> None:
    throttle, end = Throttle(), asyncio.get_running_loop().create_future()
    for step in (throttle.sent(10**9, end), throttle.received(10**10, end)):
        with pytest.raises(StopIteration) as done:
            step.send(None)  # runs to its end at once, without the event loop
        assert done.value.value is True
    assert (throttle.sent_bytes, throttle.received_bytes) == (10**9, 10**10)


async def test_one_direction_leaves_the_other_alone() -> None:
    throttle, end = Throttle(max_upload=1000.0), asyncio.get_running_loop().create_future()
    assert not throttle.limits_download
    async with asyncio.timeout(S):
        assert await throttle.received(10**9, end)


@pytest.mark.parametrize("limit", ["max_upload", "max_download"])
async def test_waiting_for_the_limit_is_not_the_partners_silence(limit: str) -> None:
    """The limit takes a second, twice what the deadline allows the partner."""

    async def echo(stream: Stream) -> None:
        while (message := await stream.receive(S)) is not None:
            await stream.send(message, S)

    async with up(echo) as free:
        rpc = Rpc(throttle=Throttle(**{limit: 8.0 * BURST_BYTES}))
        stream = await rpc.dial(f"127.0.0.1:{free.port}", S)
        for _ in range(2):
            await stream.send(LARGE, 0.5)
            assert await stream.receive(0.5) == LARGE
        await stream.close()
        await rpc.close()


async def test_a_sender_that_is_cancelled_takes_nothing_from_the_others() -> None:
    arrivals, throttle = Arrivals(), Throttle(max_upload=8e3)
    async with up(arrivals.listen) as free, up(nothing, throttle) as limited:
        first, second = [await limited.dial(f"127.0.0.1:{free.port}", S) for _ in range(2)]
        waiting = asyncio.create_task(first.send(HUGE, S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        async with asyncio.timeout(S):  # 500 s behind the one that was cancelled
            await second.send(CARGO, S)
        assert throttle.sent_bytes == CARGO_BYTES
        await first.close()
        await second.close()


async def test_a_message_is_not_lost_when_its_receiver_gives_up_waiting_for_the_limit() -> None:
    throttle = Throttle(max_download=8.0 * BURST_BYTES)

    async def send(stream: Stream) -> None:
        await stream.send(LARGE, S)
        await stream.send(LARGE, S)

    async with up(send) as free:
        rpc = Rpc(throttle=throttle)
        stream = await rpc.dial(f"127.0.0.1:{free.port}", S)
        await stream.send(Message(), S)
        assert await stream.receive(S) == LARGE  # all of the burst, so the next one has a second to wait
        given_up = 0
        give_up_s = asyncio.get_running_loop().time() + S
        while throttle.received_bytes == LARGE.ByteSize():
            assert asyncio.get_running_loop().time() < give_up_s
            try:
                async with asyncio.timeout(0.1):
                    assert await stream.receive(S) == LARGE
            except TimeoutError:
                given_up += 1
        assert given_up > 1
        assert throttle.received_bytes == stream.received_bytes == 2 * LARGE.ByteSize()
        assert await stream.receive(S) is None
        await stream.close()
        await rpc.close()


async def test_closing_ends_the_waiting_for_the_limit() -> None:
    throttle = Throttle(max_upload=8e3)
    async with up(nothing) as free:
        rpc = Rpc(throttle=throttle)
        stream = await rpc.dial(f"127.0.0.1:{free.port}", S)
        waiting = asyncio.create_task(stream.send(HUGE, S))
        await asyncio.sleep(0)
        async with asyncio.timeout(S):
            await rpc.close()
            with pytest.raises(Unreachable, match="the stream is closed"):
                await waiting
        assert throttle.sent_bytes == 0
