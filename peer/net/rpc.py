"""Streams between peers over gRPC: the service Peer of proto/peer.proto. The only importer of grpc.

A stream is one call of Talk on a connection of its own. Messages are serialized here rather than by grpc, so that bytes
are counted without serializing twice. Reads and writes run as tasks of the stream, because grpc ends a whole call when
one of them is cancelled: a deadline or a cancelled caller leaves the stream as it was.

Bytes are those of the serialized messages; HTTP/2 and TCP add about 0.1 % for large frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr, what we raise as sentences anyway

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


class _Stream:
    """What both sides of a stream have in common; `call` has grpc's read and write."""

    def __init__(self, call: Any) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._call = call
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, message: Message, timeout_s: float) -> None:
        """Hand one message over; see `peer.net.base.Stream`."""
        data = message.SerializeToString()
        async with _deadline(timeout_s, "took nothing"):
            if self._writing is not None:  # of a send that was given up
                await self._outcome(self._writing)
            self._writing = asyncio.create_task(self._call.write(data))
            await self._outcome(self._writing)
        self._writing = None
        self.sent_bytes += len(data)

    async def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; see `peer.net.base.Stream`. Raises `ProtocolError` when it isn't one."""
        async with _deadline(timeout_s, "said nothing"):
            if self._reading is None:
                self._reading = asyncio.create_task(self._call.read())
            data = await self._outcome(self._reading)
        self._reading = None
        if data is grpc.aio.EOF:
            await self._ended()
            return None
        self.received_bytes += len(data)
        try:
            return Message.FromString(data)
        except DecodeError as error:
            raise ProtocolError("malformed", "the other side sent something that is no message") from error

    async def _ended(self) -> None:
        """Find out whether the end of the other side's messages was an orderly one; raises `Unreachable` if not."""

    async def _outcome(self, task: asyncio.Task[Any]) -> Any:
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Unreachable(self._lost.result())
        if task.cancelled():
            raise Unreachable("the stream is closed")
        try:
            return task.result()
        except _FAILURES as error:
            raise Unreachable(_reason(error)) from error

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    async def _settle(self) -> None:
        """End what is still under way and take note of its outcome."""
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

    def __init__(self, channel: grpc.aio.Channel, owner: set[_Dialled]) -> None:
        super().__init__(channel.stream_stream(f"/{SERVICE}/{METHOD}")())
        self._channel = channel
        self._owner = owner
        self._closing: asyncio.Task[None] | None = None
        owner.add(self)

    async def close(self) -> None:
        """End the stream, and wait a little until the other side has taken all that was sent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError, *_FAILURES):
            async with asyncio.timeout(LINGER_S):
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                await self._call.done_writing()
                if self._reading is not None:
                    await asyncio.wait({self._reading})
                while await self._call.read() is not grpc.aio.EOF:
                    pass
        await self.abandon()

    async def abandon(self) -> None:
        """Cut the stream off."""
        self._lose("the stream is closed")
        self._call.cancel()
        await self._settle()
        await self._channel.close()
        self._owner.discard(self)


class _Accepted(_Stream):
    """The side that a stream was opened to; it ends when what serves it returns."""

    async def close(self) -> None:
        """Take part in nothing any more."""
        self._lose("the stream is closed")

    async def _ended(self) -> None:
        # grpc ends the messages of a caller that vanished just as those of one that is done; a moment later it says so
        done, _ = await asyncio.wait({self._lost}, timeout=QUIET_S)
        if done:
            raise Unreachable(self._lost.result())

    async def drain(self) -> None:
        """Throw away what the caller still sends, until it ends or pauses.

        If the call ended under a caller that is sending, grpc would throw away our last messages on its side.
        """
        with contextlib.suppress(Unreachable, ProtocolError):
            async with asyncio.timeout(LINGER_S):
                while await self.receive(QUIET_S) is not None:
                    pass


class Rpc:
    """A gRPC server for the streams that others open, and a client to open some."""

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self.port = 0
        self._max_streams = max_streams
        self._server: grpc.aio.Server | None = None
        self._serve: Serve | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._dialled: set[_Dialled] = set()

    async def start(self, serve: Serve, port: int = 0) -> None:
        """Listen on the TCP port of all interfaces (0: any free one); raises `ConfigError` when it is taken."""
        self._serve = serve
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=self._max_streams)
        handler = grpc.stream_stream_rpc_method_handler(self._talk)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            self.port = server.add_insecure_port(f"[::]:{port}")
        except RuntimeError as error:
            raise ConfigError(f"Port {port} is in use. Choose another one with --port.") from error
        await server.start()
        self._server = server

    async def dial(self, address: str, timeout_s: float) -> _Dialled:
        """Open a stream to "host:port"; raises `Unreachable`."""
        try:
            host, port = parse_address(address)
        except ValueError as error:
            raise Unreachable(f"there is no peer at {address!r}, which is not host:port") from error
        version = ip_version(host)
        target = f"ipv{version}:" if version else "dns:///"
        channel = grpc.aio.insecure_channel(target + format_address(host, port), options=_CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(timeout_s):
                await _connected(channel, address)
        except TimeoutError:
            await channel.close()
            raise Unreachable(f"{address} did not answer within {timeout_s:g} s") from None
        except (Unreachable, asyncio.CancelledError):
            await channel.close()
            raise
        return _Dialled(channel, self._dialled)

    async def close(self) -> None:
        """Cut off all streams and stop listening; idempotent. Takes seconds at most, never raises."""
        server, self._server = self._server, None
        for stream in list(self._dialled):
            await stream.abandon()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=STOP_S)
        if server is not None:
            await server.stop(STOP_S)

    async def _talk(self, _: Any, context: Any) -> None:
        stream = _Accepted(context)
        task = asyncio.create_task(self._attend(stream, context))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            await asyncio.shield(task)
            await stream.drain()
        except asyncio.CancelledError:  # grpc's way to say that the caller is gone
            stream._lose("the other side went away")
            raise
        finally:
            await stream._settle()

    async def _attend(self, stream: _Accepted, context: Any) -> None:
        if self._serve is None:
            return
        try:
            await self._serve(stream)
        except PeerError:
            pass

def _reason(error: Exception) -> str:
    ...
