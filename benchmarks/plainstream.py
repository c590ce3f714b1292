"""What gRPC itself costs: the same bytes over one plain stream of it, both directions at once, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

FRAME_BYTES = 2**20
METHOD = "/plain.Stream/Copy"
DEADLINE_S = 60.0

_OPTIONS = [("grpc.max_send_message_length", 4 * FRAME_BYTES), ("grpc.max_receive_message_length", 4 * FRAME_BYTES)]


class PlainServer:
    """Answers every stream with so many bytes, while it takes what comes."""

    def __init__(self) -> None:
        self.port = 0
        self.send_bytes = 0
        self._server = grpc.aio.server(options=_OPTIONS)

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        service, _, method = METHOD.strip("/").partition("/")
        handler = grpc.method_handlers_generic_handler(
            service, {method: grpc.stream_stream_rpc_method_handler(self._serve)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening."""
        await self._server.stop(None)

    async def _serve(self, _: Any, context: Any) -> None:
        receive_bytes = int.from_bytes(await context.read(), "little")
        await asyncio.gather(_send(context, self.send_bytes), _receive(context, receive_bytes))


async def copy(port: int, send_bytes: int, receive_bytes: int) -> float:
    """Send so many bytes over a new stream while receiving as many as the server sends; return the seconds."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        began_s = loop.time()
        call: Any = channel.stream_stream(METHOD)()
        await call.write(send_bytes.to_bytes(8, "little"))
        await asyncio.gather(_send(call, send_bytes), _receive(call, receive_bytes))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in its stubs
            pass
        return loop.time() - began_s


async def _send(call: Any, size_bytes: int) -> None:
    frame = bytes(FRAME_BYTES)
    for first in range(0, size_bytes, FRAME_BYTES):
        await call.write(frame[: size_bytes - first])


async def _receive(call: Any, size_bytes: int) -> None:
    while size_bytes > 0:
        size_bytes -= len(await call.read())
