"""Streams between peers over gRPC: the service Peer of proto/peer.proto. The only importer of grpc.

A stream is one call of Talk on a connection of its own. Messages are serialized here rather than by grpc, so that bytes
are counted without serializing twice; HTTP/2 and TCP add about 0.1 % to them in large frames. Reads and writes run as
tasks of the stream, because grpc ends a whole call when one of them is cancelled: so a deadline that passed or a caller
that was cancelled leaves the stream as it was. One task may send and another receive, but not two at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr what is raised as a sentence anyway

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from peer.errors import ConfigError, PeerError, ProtocolError, Unreachable
from peer.net.addresses import format_address, ip_version, parse_address
from peer.net.base import Serve
from peer.wire.peer_pb2 import DESCRIPTOR, Message

MAX_MESSAGE_BYTES = 4 << 20
MAX_STREAMS = 64
LINGER_S = 2.0
QUIET_S = 0.25
STOP_S = 1.0
SERVICE: str = DESCRIPTOR.services_by_name["Peer"].full_name
METHOD = "Talk"

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # finds a partner that vanished without a word, as behind a rebooted router
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [*_OPTIONS, ("grpc.so_reuseport", 0)]
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # a connection per stream: none inherits another one's failure
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]
_FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
_CLOSED = "the stream is closed"


class _Stream:
    """What both sides of a stream have in common; `call` has grpc's read and write."""

    def __init__(self, call: Any) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._call = call
        self._closed = False
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, message: Message, timeout_s: float) -> None:
        """Hand one message over; see `peer.net.base.Stream`."""
        data = message.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
        if self._writing is not None:  # of a send that was given up
            await self._outcome(self._writing, timeout_s, "took")
        self._writing = asyncio.create_task(self._call.write(data))
        await self._outcome(self._writing, timeout_s, "took")
        self._writing = None
        self.sent_bytes += len(data)

    async def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; see `peer.net.base.Stream`. Raises `ProtocolError` when it isn't one."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        data = await self._outcome(self._reading, timeout_s, "said")
        self._reading = None
        if data is _EOF:
            await self._ended()
            return None
        self._reading = asyncio.create_task(self._call.read())  # the next one comes in while this one is dealt with
        self.received_bytes += len(data)
        try:
            return Message.FromString(data)
        except DecodeError as error:
            raise ProtocolError("malformed", "the other side sent something that is no message") from error

    async def _ended(self) -> None:
        """Make sure that the end of the other side's messages was an orderly one; raises `Unreachable`."""

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


class _Dialled(_Stream):
    """The side that opened the stream, and owns its connection."""

    def __init__(self, channel: Any, siblings: set[_Dialled]) -> None:
        super().__init__(channel.stream_stream(f"/{SERVICE}/{METHOD}")())
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


class _Accepted(_Stream):
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


class Rpc:
    """A gRPC server for the streams that others open, and a client to open some."""

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self.port = 0
        self._max_streams = max_streams
        self._server: grpc.aio.Server | None = None
        self._dialled: set[_Dialled] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, serve: Serve, port: int = 0) -> None:
        """Listen on the TCP port of all interfaces (0: any free one); raises `ConfigError` when it is taken."""

        async def talk(_: Any, context: Any) -> None:
            await self._talk(serve, context)

        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=self._max_streams)
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(talk)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = server.add_insecure_port(f"[::]:{port}")
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"Port {port} cannot be used: it is taken. Choose another one with --port.") from error
        await server.start()
        self._server = server

    async def dial(self, address: str, timeout_s: float) -> _Dialled:
        """Open a stream to "host:port"; raises `Unreachable`."""
        try:
            host, port = parse_address(address)
        except ValueError as error:
            raise Unreachable(f"nobody can be called at {address[:80]!r}, which is not host:port") from error
        version = ip_version(host)
        target = (f"ipv{version}:" if version else "dns:///") + format_address(host, port)
        channel: Any = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(channel.close)
            try:
                async with asyncio.timeout(timeout_s):
                    await _connected(channel, address)
            except TimeoutError:
                raise Unreachable(f"{address} did not answer within {timeout_s:g} s") from None
            undo.pop_all()
        return _Dialled(channel, self._dialled)

    async def close(self) -> None:
        """Cut off all streams and stop listening; idempotent. Takes seconds at most, never raises."""
        server, self._server = self._server, None
        for stream in list(self._dialled):
            await stream.cut()
        serving = set(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving, timeout=STOP_S)
        if server is not None:
            await server.stop(STOP_S)

    async def _talk(self, serve: Serve, context: Any) -> None:
        """Let a stream be served, in a task of its own: grpc cancels this one as soon as the caller is gone."""
        stream = _Accepted(context)
        task = asyncio.ensure_future(serve(stream))
        self._serving.add(task)
        task.add_done_callback(self._served)
        try:
            await asyncio.wait({task})
            if task.cancelled() or task.exception() is not None:
                await context.abort(grpc.StatusCode.ABORTED, "gave up on the stream")
            await stream.drain()
        finally:
            stream.lose("the other side went away")
            await stream.settle()

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PeerError):
            task.get_loop().call_exception_handler({"message": "serving a stream failed", "exception": error})


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise Unreachable(f"{address} cannot be reached")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


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
