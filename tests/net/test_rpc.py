"""What is particular to gRPC: strangers that send nonsense, full servers, and processes that die."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from peer.core.frame import Frame, Said
from peer.core.legs import framed
from peer.errors import ConfigError, ProtocolError, Unreachable
from peer.net.base import Serve, Stream
from peer.net.rpc import Rpc
from peer.net.streams import MAX_MESSAGE_BYTES, METHOD, SERVICE
from peer.wire.peer_pb2 import Inquiry, Message

S = 20.0
HELLO = Message(inquiry=Inquiry(meeting_id=b"hello"))


async def echo(stream: Stream) -> None:
    while (message := await stream.receive(S)) is not None:
        await stream.send(message, S)


async def nothing(stream: Stream) -> None:
    pass


@asynccontextmanager
async def up(serve: Serve, **options: Any) -> AsyncIterator[Rpc]:
    rpc = Rpc(**options)
    await rpc.start(serve)
    try:
        yield rpc
    finally:
        await rpc.close()


@asynccontextmanager
async def stranger(rpc: Rpc, method: str = f"/{SERVICE}/{METHOD}") -> AsyncIterator[Any]:
    """Call a method with no code of ours on the calling side; messages are bytes."""
    channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}")
    async with channel:
        yield channel.stream_stream(method)(timeout=S)


async def test_the_service_is_the_one_of_the_contract() -> None:
    assert f"/{SERVICE}/{METHOD}" == "/peerloom.v1.Peer/Talk"


async def test_a_message_is_just_its_bytes_on_the_wire() -> None:
    async with up(echo) as rpc, stranger(rpc) as call:
        await call.write(HELLO.SerializeToString())
        assert await call.read() == HELLO.SerializeToString()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_bytes_that_are_no_message_are_a_protocol_error() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen(stream: Stream) -> None:
        with pytest.raises(ProtocolError) as caught:
            await stream.receive(S)
        await heard.put(caught.value.reason)
        await stream.send(HELLO, S)

    async with up(listen) as rpc, stranger(rpc) as call:
        await call.write(b"\xff\xff\xff")
        assert await heard.get() == "malformed"
        assert await call.read() == HELLO.SerializeToString()


async def test_another_service_is_no_peer() -> None:
    async with up(echo) as rpc, stranger(rpc, "/other.Service/Talk") as call:
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await call.read()


async def test_a_stranger_cannot_send_what_is_too_large() -> None:
    lost: asyncio.Queue[Exception] = asyncio.Queue()

    async def listen(stream: Stream) -> None:
        with pytest.raises(Unreachable) as caught:
            await stream.receive(S)
        await lost.put(caught.value)

    async with up(listen) as rpc, stranger(rpc) as call:
        await call.write(bytes(MAX_MESSAGE_BYTES + 1))
        await lost.get()
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await call.read()


async def test_a_caller_that_vanishes_is_never_taken_for_one_that_has_ended() -> None:
    """A race inside grpc, so many times: in about one of fifty the end of the messages comes before the bad news."""
    ends: asyncio.Queue[Said | str | None] = asyncio.Queue()

    async def listen(stream: Stream) -> None:
        await ends.put(await stream.receive(S))
        try:
            await ends.put(await stream.receive(S))
        except Unreachable as error:
            await ends.put(str(error))

    async with up(listen) as rpc:
        for _ in range(100):
            async with stranger(rpc) as call:
                await call.write(HELLO.SerializeToString())
                assert await ends.get() == HELLO
                call.cancel()
                assert await ends.get() == "the other side went away"


async def exchange(stream: Stream, message: Said) -> Said | None:
    await stream.send(message, S)
    return await stream.receive(S)


async def test_a_full_server_turns_streams_away_and_takes_them_again_later() -> None:
    async with up(echo, max_streams=2) as rpc:
        address = f"127.0.0.1:{rpc.port}"
        first, second, third = [await rpc.dial(address, S) for _ in range(3)]
        for stream in (first, second):
            assert await exchange(stream, HELLO) == HELLO
        with pytest.raises(Unreachable, match="too much for the other side"):
            await exchange(third, HELLO)
        await first.close()
        await third.close()
        fourth = await rpc.dial(address, S)
        assert await exchange(fourth, HELLO) == HELLO
        await second.close()
        await fourth.close()


@asynccontextmanager
async def other_server(greeting: bytes) -> AsyncIterator[str]:
    """Listen for one connection, which is greeted and then ignored."""
    leave, left = asyncio.Event(), asyncio.Event()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await leave.wait()
        writer.close()
        left.set()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        leave.set()
        await left.wait()


async def test_a_server_that_accepts_and_says_nothing_is_given_up_at_the_deadline() -> None:
    async with other_server(b"") as address:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"):
            await Rpc().dial(address, 0.2)


async def test_a_server_of_another_kind_is_no_peer() -> None:
    async with other_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        with pytest.raises(Unreachable):
            await Rpc().dial(address, S)


async def test_ipv6_is_listened_on_where_there_is_any() -> None:
    async with up(echo) as rpc:
        for address in (f"[::1]:{rpc.port}", f"localhost:{rpc.port}"):
            stream = await rpc.dial(address, S)
            assert await exchange(stream, HELLO) == HELLO
            await stream.close()


async def test_a_port_that_is_taken_is_named() -> None:
    async with up(nothing) as rpc:
        second = Rpc()
        with pytest.raises(ConfigError, match=rf"Port {rpc.port} .*--port"):
            await second.start(nothing, rpc.port)
        await second.close()


SECOND = """
import asyncio, sys
from peer.errors import ConfigError
from peer.net.rpc import Rpc

try:
    asyncio.run(Rpc().start(None, int(sys.argv[1])))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
async def test_a_port_that_is_taken_makes_no_noise() -> None:
    async with up(nothing) as rpc:
        command = [sys.executable, "-c", SECOND, str(rpc.port)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"Port {rpc.port} cannot be used: it is taken. Choose another one with --port.\n"
    assert done.stderr == ""


async def test_a_port_is_free_again_after_closing() -> None:
    async with up(echo) as rpc:
        port = rpc.port
        stream = await rpc.dial(f"127.0.0.1:{port}", S)
        assert await exchange(stream, HELLO) == HELLO
        await stream.close()
    again = Rpc()
    await again.start(nothing, port)
    assert again.port == port
    await again.close()


async def test_a_sender_that_is_cancelled_leaves_the_stream_in_order() -> None:
    received: list[int] = []

    async def slow(stream: Stream) -> None:
        while (message := await stream.receive(S)) is not None:
            assert isinstance(message, Frame)
            received.append(message.offset)
            await stream.send(Message(), S)

    async with up(slow) as rpc:
        stream = await rpc.dial(f"127.0.0.1:{rpc.port}", S)
        for number in range(20):
            sending = asyncio.create_task(stream.send(framed(1, number, bytes(10_000)), S))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait({sending})
        await stream.send(framed(1, 20, b""), S)
        while not received or received[-1] != 20:
            await stream.receive(S)
        assert received == sorted(set(received))
        await stream.close()


async def test_serving_that_fails_is_reported_and_ends_only_that_stream() -> None:
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.put_nowait(report))

    async def fail(stream: Stream) -> None:
        if await stream.receive(S) == HELLO:
            raise ZeroDivisionError("a defect")
        await stream.send(HELLO, S)

    async with up(fail) as rpc:
        stream = await rpc.dial(f"127.0.0.1:{rpc.port}", S)
        with pytest.raises(Unreachable):
            await exchange(stream, HELLO)
        await stream.close()
        assert isinstance((await reports.get())["exception"], ZeroDivisionError)
        other = await rpc.dial(f"127.0.0.1:{rpc.port}", S)
        assert await exchange(other, Message()) == HELLO
        await other.close()


async def test_closing_does_not_wait_for_who_serves_on() -> None:
    cancelled: list[bool] = []

    async def stay(stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with up(stay) as rpc, up(nothing) as other:
        stream = await other.dial(f"127.0.0.1:{rpc.port}", S)
        await stream.send(HELLO, S)
        waiting = asyncio.create_task(stream.receive(S))
        await asyncio.sleep(0.05)
        await rpc.close()
        with pytest.raises(Unreachable):
            await waiting
        assert cancelled == [True]


SERVER = """
import asyncio, sys
from peer.net.rpc import Rpc

async def echo(stream):
    while (message := await stream.receive(60)) is not None:
        await stream.send(message, 60)

async def main():
    rpc = Rpc()
    await rpc.start(echo)
    print(rpc.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_server_that_is_killed_is_unreachable_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        port = int(await asyncio.to_thread(process.stdout.readline))
        rpc = Rpc()
        stream = await rpc.dial(f"127.0.0.1:{port}", S)
        assert await exchange(stream, HELLO) == HELLO
        waiting = asyncio.create_task(stream.receive(S))
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(Unreachable, match="connection was lost"):
            await waiting
        with pytest.raises(Unreachable):
            await stream.send(HELLO, S)
        await stream.close()
        with pytest.raises(Unreachable, match="cannot be reached"):
            await rpc.dial(f"127.0.0.1:{port}", S)
        await rpc.close()
