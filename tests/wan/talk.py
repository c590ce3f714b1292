"""A program for emulated hosts: one gRPC stream of `peer.net.rpc`. It prints one JSON value, and ends.

    python -m tests.wan.talk serve PORT            take what is sent, and answer each message
    python -m tests.wan.talk call ADDRESS COUNT    send so many messages of 64 KiB, and wait for as many answers

The server prints how many bytes of messages have arrived, the caller how many seconds it took from dialling to the last
answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from peer.net.base import Stream
from peer.net.rpc import Rpc
from peer.wire.peer_pb2 import Done, Message, StateChunk

PATIENCE_S = 60.0
PAYLOAD_BYTES = 1 << 16


async def serve(port: int) -> int:
    """Serve one stream; return the bytes that came."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def take(stream: Stream) -> None:
        while await stream.receive(PATIENCE_S) is not None:
            await stream.send(Message(done=Done()), PATIENCE_S)
        ended.set_result(stream.received_bytes)

    rpc = Rpc()
    await rpc.start(take, port)
    try:
        return await asyncio.wait_for(ended, PATIENCE_S)
    finally:
        await rpc.close()


async def call(address: str, count: int) -> float:
    """Send that many messages and take as many answers; return the seconds that it took."""
    rpc = Rpc()
    began_s = time.monotonic()
    stream = await rpc.dial(address, PATIENCE_S)
    for index in range(count):
        await stream.send(Message(state_chunk=StateChunk(index=index, payload=bytes(PAYLOAD_BYTES))), PATIENCE_S)
    for _ in range(count):
        assert await stream.receive(PATIENCE_S) is not None, "the stream ended before all was answered"
    took_s = time.monotonic() - began_s
    await stream.close()
    await rpc.close()
    return took_s


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port]:
            print(json.dumps(asyncio.run(serve(int(port)))))
        case ["call", address, size]:
            print(json.dumps(asyncio.run(call(address, int(size)))))
        case _:
            sys.exit(__doc__)
