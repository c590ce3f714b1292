"""The two sides of a stream between peers: one call of Talk, over grpc's reads and writes.

Messages are serialized here rather than by grpc, so that bytes are counted without serializing twice; HTTP/2 and TCP
add about 0.1 % to them in large frames. Reads and writes run as tasks of the stream, because grpc ends a whole call
when one of them is cancelled: so a deadline that passed or a caller that was cancelled leaves the stream as it was. One
task may send and another receive, but not two at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from peer.core.frame import Said, packed, unpacked
from peer.errors import ProtocolError, Unreachable
from peer.net.throttle import Throttle
from peer.wire.peer_pb2 import DESCRIPTOR

MAX_MESSAGE_BYTES = 4 << 20
LINGER_S = 2.0
QUIET_S = 0.25
STOP_S = 1.0
SERVICE: str = DESCRIPTOR.services_by_name["Peer"].full_name
METHOD = "Talk"

_FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
_CLOSED = "the stream is closed"


class _Side:
    """What both sides of a stream have in common; `call` has grpc's read and write."""

    def __init__(self, call: Any, throttle: Throttle) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._call = call
        self._throttle = throttle
        self._closed = False
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, said: Said, timeout_s: float) -> None:
        """Hand one message over; see `peer.net.base.Stream`. The time that our own limit takes is not timeout_s's."""
        data = packed(said)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
        if self._writing is not None:  # of a send that was given up
            await self._outcome(self._writing, timeout_s, "took")
        await self._passed(self._throttle.sent(len(data), self._lost))
        self._writing = asyncio.create_task(self._call.write(data))
        await self._outcome(self._writing, timeout_s, "took")
        self._writing = None
        self.sent_bytes += len(data)

    async def receive(self, timeout_s: float) -> Said | None:
        """Return the next message; see `peer.net.base.Stream`. Raises `ProtocolError` when it isn't one."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        data = await self._outcome(self._reading, timeout_s, "said")
        if data is _EOF:
            self._reading = None
            await self._ended()
            return None
        await self._passed(self._throttle.received(len(data), self._lost))  # unread, the next one holds the sender up
        self._reading = asyncio.create_task(self._call.read())  # the next one comes in while this one is dealt with
        self.received_bytes += len(data)
        try:
            return unpacked(data)
        except DecodeError as error:
            raise ProtocolError("malformed", "the other side sent something that is no message") from error

    async def _ended(self) -> None:
        """Make sure that the end of the other side's messages was an orderly one; raises `Unreachable`."""

    async def _passed(self, waiting: Awaitable[bool]) -> None:
        """Wait for our own limit, as long as the stream lasts; raises `Unreachable`."""
        if not await waiting or self._closed:
            raise Unreachable(self._lost.result() if self._lost.done() else _CLOSED)

    async def _outcome(self, task: asyncio.Task[Any], timeout_s: float, verb: str) -> Any:
        if not self._closed:
            await asyncio.wait((task, self._lost), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._closed:
            raise Unreachable(_CLOSED)
        if self._lost.done():
            raise Unreachable(self._lost.result())
        if task.cancelled():
            raise Unreachable(_CLOSED)
        if not task.done():
            raise Unreachable(f"the other side {verb} nothing for {timeout_s:g} s")
        try:
            return task.result()
        except _FAILURES as error:
            raise Unreachable(await self._why()) from error

    async def _why(self) -> str:
        """Return a sentence's worth of why the call failed."""
        return "the other side went away"

    def lose(self, reason: str) -> None:
        """Let all that waits for the other side, now or later, fail for this reason."""
        if not self._lost.done():
            self._lost.set_result(reason)

    async def settle(self) -> None:
        """End what is still under way, and take note of its outcome."""
        tasks = {task for task in (self._reading, self._writing) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()


class Dialled(_Side):
    """The side that opened the stream, and owns its connection."""

    def __init__(self, channel: Any, siblings: set[Dialled], throttle: Throttle) -> None:
        super().__init__(channel.stream_stream(f"/{SERVICE}/{METHOD}")(), throttle)
        self._channel = channel
        self._siblings = siblings
        self._closing: asyncio.Task[None] | None = None
        siblings.add(self)

    async def _why(self) -> str:
        if not self._call.done():
            return "the other side has ended the stream"
        return _reason(await self._call.code(), await self._call.details() or "")

    async def close(self) -> None:
        """End the stream, and wait a little until the other side has taken all that was sent."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.create_task(self._part())
        await asyncio.wait({self._closing})

    async def _part(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                await self._call.done_writing()
                if self._reading is not None:
                    await asyncio.wait({self._reading})
                while await self._call.read() is not _EOF:
                    pass
        except (TimeoutError, *_FAILURES):
            pass
        finally:
            await self.cut()

    async def cut(self) -> None:
        """Cut the stream off."""
        self._closed = True
        self._siblings.discard(self)
        self.lose(_CLOSED)
        self._call.cancel()
        await self.settle()
        await self._channel.close()


class Accepted(_Side):
    """The side that a stream was opened to; it ends when what serves it returns."""

    async def close(self) -> None:
        """Take no more part in the stream."""
        self._closed = True

    async def _ended(self) -> None:
        # When a caller vanishes, grpc first ends its messages as if it were done with them, and then says so.
        if (await asyncio.wait({self._lost}, timeout=QUIET_S))[0]:
            raise Unreachable(self._lost.result())

    async def drain(self) -> None:
        """Throw away what the caller still sends, until it ends or pauses.

        Otherwise a caller that is sending when the call ends would lose our last messages, which it has yet to read.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + LINGER_S
        while loop.time() < end_s:
            task = self._reading or asyncio.create_task(self._call.read())
            self._reading = task
            await asyncio.wait((task, self._lost), timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.cancelled() or task.exception() or task.result() is _EOF:
                return
            self._reading = None


def _reason(code: grpc.StatusCode, details: str) -> str:
    match code:
        case grpc.StatusCode.OK:
            return "the other side has ended the stream"
        case grpc.StatusCode.UNAVAILABLE:
            return f"the connection was lost ({details})"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"too much for the other side ({details})"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "what answers there is no peer"
        case grpc.StatusCode.ABORTED | grpc.StatusCode.CANCELLED | grpc.StatusCode.INTERNAL:
            return "the other side ended the stream early"
        case _:
            return f"the stream broke ({code.name.lower()}: {details})"
