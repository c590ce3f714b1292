"""Streams between peers over gRPC: the service Peer of proto/peer.proto. Beside `streams` the only importer of grpc.

A stream is one call of Talk on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr what is raised as a sentence anyway

import grpc
import grpc.aio

from peer.errors import ConfigError, PeerError, Unreachable
from peer.net.addresses import format_address, ip_version, parse_address
from peer.net.base import Serve
from peer.net.streams import MAX_MESSAGE_BYTES, METHOD, SERVICE, STOP_S, Accepted, Dialled
from peer.net.throttle import Throttle

MAX_STREAMS = 64

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
_HOLD_UP = [("grpc.http2.bdp_probe", 0)]
"""With a limit: one message and 64 KB come in ahead of who reads them, not the megabytes that fast links would hold."""


class Rpc:
    """A gRPC server for the streams that others open, and a client to open some; the throttle is for all of them."""

    def __init__(self, max_streams: int = MAX_STREAMS, throttle: Throttle | None = None) -> None:
        self.port = 0
        self._throttle = throttle or Throttle()
        self._options = _HOLD_UP if self._throttle.limits_download else []
        self._max_streams = max_streams
        self._server: grpc.aio.Server | None = None
        self._dialled: set[Dialled] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, serve: Serve, port: int = 0) -> None:
        """Listen on the TCP port of all interfaces (0: any free one); raises `ConfigError` when it is taken."""

        async def talk(_: Any, context: Any) -> None:
            await self._talk(serve, context)

        server = grpc.aio.server(options=_SERVER_OPTIONS + self._options, maximum_concurrent_rpcs=self._max_streams)
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(talk)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = server.add_insecure_port(f"[::]:{port}")
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"Port {port} cannot be used: it is taken. Choose another one with --port.") from error
        await server.start()
        self._server = server

    async def dial(self, address: str, timeout_s: float) -> Dialled:
        """Open a stream to "host:port"; raises `Unreachable`."""
        try:
            host, port = parse_address(address)
        except ValueError as error:
            raise Unreachable(f"nobody can be called at {address[:80]!r}, which is not host:port") from error
        version = ip_version(host)
        target = (f"ipv{version}:" if version else "dns:///") + format_address(host, port)
        channel: Any = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS + self._options)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(channel.close)
            try:
                async with asyncio.timeout(timeout_s):
                    await _connected(channel, address)
            except TimeoutError:
                raise Unreachable(f"{address} did not answer within {timeout_s:g} s") from None
            undo.pop_all()
        return Dialled(channel, self._dialled, self._throttle)

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
        stream = Accepted(context, self._throttle)
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
