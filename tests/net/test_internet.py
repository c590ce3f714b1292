"""The real network put together: which addresses it tells, which ports it takes, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from peer.errors import ConfigError
from peer.identity import Identity
from peer.net.base import Stream
from peer.net.internet import Internet
from peer.net.throttle import Throttle
from peer.wire.peer_pb2 import Inquiry, Message

KEY = "12D3KooWFif5sUGT1UfvoSmQbZVf82WbfYunwJkBNGcxBN8AKLde"
Start = Callable[..., Awaitable[Internet]]


async def nothing(stream: Stream) -> None:
    pass


def make(home: Path, **options: Any) -> Internet:
    return Internet(Identity.load(home), home, **options)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(name: str, **options: Any) -> Internet:
            network = make(tmp_path / name, **options)
            stack.push_async_callback(network.close)
            await network.start(nothing)
            return network

        yield start


def free_pair() -> int:
    """Return a port that is free together with the next one, for now."""
    while True:
        with socket.socket() as one, socket.socket() as next:
            one.bind(("", 0))
            port = int(one.getsockname()[1])
            try:
                next.bind(("", port + 1))
            except OSError:
                continue
            return port


async def test_beside_a_bootstrap_on_this_machine_loopback_is_told(start: Start) -> None:
    a = await start("a")
    [local] = [text for text in a.bootstraps if "/127.0.0.1/" in text]
    b = await start("b", bootstraps=[local])
    assert b.addresses[0].startswith("127.0.0.1:")
    assert b.bootstraps[0].startswith("/ip4/127.0.0.1/tcp/")
    assert b.routable
    assert not b.lonely


async def test_loopback_told_to_a_swarm_elsewhere_is_not_routable(start: Start) -> None:
    a = await start("a", bootstraps=[f"/ip4/127.0.0.1/tcp/1/p2p/{KEY}"], announce="127.0.0.1")
    assert a.lonely
    assert a.routable
    b = make(Path(os.devnull).parent, bootstraps=[f"/ip4/203.0.113.5/tcp/1/p2p/{KEY}"], announce="localhost:7")
    assert not b.routable


async def test_what_is_announced_wins(start: Start) -> None:
    a = await start("a", announce="peer.example.org:7700")
    assert a.addresses == ("peer.example.org:7700",)
    [multiaddr] = a.bootstraps
    assert multiaddr.startswith("/dns/peer.example.org/tcp/7701/p2p/12D3KooW")


async def test_an_announced_host_keeps_its_own_ports(start: Start) -> None:
    port = free_pair()
    a = await start("a", announce="2001:db8::5", port=port)
    assert a.addresses == (f"[2001:db8::5]:{port}",)
    assert [text.split("/p2p/")[0] for text in a.bootstraps] == [f"/ip6/2001:db8::5/tcp/{port + 1}"]


async def test_addresses_stay_the_same_over_a_restart(start: Start, tmp_path: Path) -> None:
    port = free_pair()
    a = await start("a", port=port)
    addresses, bootstraps = a.addresses, a.bootstraps
    assert addresses[0].endswith(f":{port}")
    assert f"/tcp/{port + 1}/" in bootstraps[0]
    await a.close()
    again = await start("a", port=port)
    assert (again.addresses, again.bootstraps) == (addresses, bootstraps)


@pytest.mark.parametrize("which", [0, 1], ids=["streams", "dht"])
async def test_a_port_that_is_taken_is_named_and_nothing_is_left_running(tmp_path: Path, which: int) -> None:
    port = free_pair()
    with socket.socket() as taken:
        taken.bind(("", port + which))
        taken.listen()
        network = make(tmp_path, port=port)
        with pytest.raises(ConfigError, match=rf"Port {port + which} .*--port"):
            await network.start(nothing)
    await network.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("", port))


async def test_streams_go_through_the_throttle(start: Start) -> None:
    throttle, hello = Throttle(), Message(inquiry=Inquiry(meeting_id=b"hello"))
    a = await start("a", throttle=throttle)
    stream = await a.dial(a.addresses[0], 20.0)
    await stream.send(hello, 20.0)
    await stream.close()
    assert throttle.sent_bytes == hello.ByteSize()


def test_the_last_port_has_no_next_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="65535"):
        make(tmp_path, port=65535)


async def test_closing_leaves_no_child_process(tmp_path: Path) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    network = make(tmp_path)
    await network.start(nothing)
    assert len(children() - before) == 1
    await asyncio.gather(network.close(), network.close())
    assert children() <= before
