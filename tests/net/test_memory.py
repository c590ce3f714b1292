"""What only the network in memory can do: faults on demand, and a clock of one's own."""

from __future__ import annotations

import random

import pytest

from peer.errors import Unreachable
from peer.net.base import Member, Stream
from peer.net.memory import SAMPLE, Hub, MemoryNetwork
from peer.wire.peer_pb2 import Inquiry, Message

HELLO = Message(inquiry=Inquiry(meeting_id=b"hello"))


async def echo(stream: Stream) -> None:
    while (message := await stream.receive(5)) is not None:
        await stream.send(message, 5)


async def up(hub: Hub, *names: str) -> list[MemoryNetwork]:
    networks = [MemoryNetwork(hub, name) for name in names]
    for network in networks:
        await network.start(echo)
    return networks


def record(name: str, expires_s: float = 100.0) -> Member:
    return Member("run", name, (f"{name}:1",), 0, 0, expires_s)


async def test_a_killed_peer_breaks_its_streams_and_leaves_its_record() -> None:
    hub = Hub(now=lambda: 0.0)
    a, b = await up(hub, "a", "b")
    await b.publish(record("b"))
    stream = await a.dial("b:1", 1)
    hub.kill("b")
    with pytest.raises(Unreachable, match="went away"):
        await stream.receive(5)
    with pytest.raises(Unreachable, match="cannot be reached"):
        await a.dial("b:1", 1)
    with pytest.raises(Unreachable):
        await b.dial("a:1", 1)
    assert await a.members("run") == [record("b")]
    assert not await b.publish(record("b", 200.0))


async def test_a_killed_peer_can_come_again() -> None:
    hub = Hub()
    [a, _] = await up(hub, "a", "b")
    hub.kill("b")
    await up(hub, "b")
    stream = await a.dial("b:1", 1)
    await stream.send(HELLO, 1)
    assert await stream.receive(5) == HELLO


async def test_a_partition_cuts_streams_across_it_and_no_others_until_it_heals() -> None:
    hub = Hub()
    a, _, c = await up(hub, "a", "b", "c")
    inside, across = await a.dial("b:1", 1), await a.dial("c:1", 1)
    hub.partition(["a", "b"])
    with pytest.raises(Unreachable):
        await across.receive(5)
    with pytest.raises(Unreachable):
        await c.dial("b:1", 1)
    await inside.send(HELLO, 1)
    assert await inside.receive(5) == HELLO
    hub.partition()
    stream = await c.dial("b:1", 1)
    await stream.send(HELLO, 1)
    assert await stream.receive(5) == HELLO


async def test_records_end_by_the_hubs_clock() -> None:
    now_s = 0.0
    hub = Hub(now=lambda: now_s)
    [a] = await up(hub, "a")
    assert await a.publish(record("a", 10.0))
    now_s = 9.0
    assert await a.members("run") == [record("a", 10.0)]
    now_s = 10.0
    assert await a.members("run") == []
    assert not await a.publish(record("a", 10.0))


async def test_a_large_swarm_is_sampled_alike_with_the_same_seed() -> None:
    samples = []
    for _ in range(2):
        hub = Hub(now=lambda: 0.0, chance=random.Random(7))
        networks = await up(hub, *(f"peer{i}" for i in range(SAMPLE + 50)))
        for i, network in enumerate(networks):
            await network.publish(record(f"peer{i}"))
        samples.append(await networks[0].members("run"))
    assert samples[0] == samples[1]
    assert len(set(samples[0])) == SAMPLE


async def test_a_stream_that_both_sides_ended_is_forgotten() -> None:
    hub = Hub()
    [a, b] = await up(hub, "a", "b")
    stream = await a.dial("b:1", 1)
    await stream.send(HELLO, 1)
    assert await stream.receive(1) == HELLO
    assert len(hub.links) == 1
    await stream.close()
    await b.close()  # waits for what serves it
    assert not hub.links
