"""What every network keeps to: one suite, run against the one in memory and against gRPC and the DHT on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count

import pytest
import pytest_asyncio

from peer.core.frame import Frame, packed
from peer.core.legs import checksum, framed
from peer.errors import ProtocolError, Unreachable
from peer.net.base import Stream
from peer.wire.peer_pb2 import Abort, Inquiry, Message
from tests.net.worlds import DEADLINE_S, InternetWorld, MemoryWorld, Peer, World, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

S = DEADLINE_S
RUNS = (f"run-{number}" for number in count())


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[MemoryWorld, InternetWorld], ids=["memory", "internet"]
)
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    world: World = request.param(tmp_path_factory.mktemp("world"))
    await world.join()
    await world.join()
    yield world
    await world.end()


@pytest.fixture
def pair(world: World) -> tuple[Peer, Peer]:
    """Two peers that know each other and outlive the tests."""
    a, b = world.peers[:2]
    for peer in (a, b):
        peer.serve = None
        peer.dismissed.clear()
    return a, b


async def part(stream: Stream, callee: Peer) -> None:
    """Close a stream that the callee has handed to the test."""
    callee.dismissed.set()
    await stream.close()


@pytest.fixture
def run_id() -> str:
    return next(RUNS)


def note(number: int, size_bytes: int = 1) -> Frame:
    payload = number.to_bytes(4) * (size_bytes // 4 + 1)
    return framed(1, number, payload)


async def echo(stream: Stream) -> None:
    while (message := await stream.receive(S)) is not None:
        await stream.send(message, S)


# ---------------------------------------------------------------- finding one another


async def test_a_published_record_is_found_by_others_and_by_its_owner(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    mine, theirs = a.record(run_id), b.record(run_id, round=7)
    assert await a.network.publish(mine)
    assert await b.network.publish(theirs)
    for peer in pair:
        await eventually(lambda peer=peer: peer.has(run_id, mine, theirs))  # type: ignore[misc]


async def test_a_newer_record_takes_the_place_of_the_older_one(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    older, newer = a.record(run_id, 300), a.record(run_id, 301, round=5)
    assert await a.network.publish(older)
    await eventually(lambda: b.has(run_id, older))
    assert await a.network.publish(newer)
    await eventually(lambda: b.has(run_id, newer))


async def test_a_withdrawn_record_is_found_no_more_and_a_later_one_is(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    record = a.record(run_id)
    await a.network.publish(record)
    await eventually(lambda: b.has(run_id, record))
    await a.network.withdraw(record)
    await eventually(lambda: b.has(run_id))
    again = replace(record, expires_s=record.expires_s + 1)
    assert await a.network.publish(again)
    await eventually(lambda: b.has(run_id, again))


async def test_a_record_ends_by_itself(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    brief, lasting = a.record(run_id, 1.0), b.record(run_id)
    await a.network.publish(brief)
    await b.network.publish(lasting)
    await eventually(lambda: b.has(run_id, brief, lasting))
    await eventually(lambda: b.has(run_id, lasting))


async def test_another_runs_records_are_not_seen(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    other = a.record(f"{run_id}-other")
    await a.network.publish(other)
    await eventually(lambda: b.has(f"{run_id}-other", other))
    assert await b.has(run_id)


async def test_nobody_can_publish_for_somebody_else(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    mine, forged = b.record(run_id), replace(b.record(run_id, 400), addresses=("203.0.113.66:1",))
    await b.network.publish(mine)
    assert not await a.network.publish(forged)
    await a.network.withdraw(forged)
    for peer in pair:
        await eventually(lambda peer=peer: peer.has(run_id, mine))  # type: ignore[misc]


async def test_a_record_that_is_over_cannot_be_published(pair: tuple[Peer, Peer], run_id: str) -> None:
    a, b = pair
    assert not await a.network.publish(a.record(run_id, -1))
    assert await b.has(run_id)


# ---------------------------------------------------------------- streams


async def test_messages_go_both_ways_and_bytes_are_counted_alike(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    there = await a.dial(b)
    here = await b.accepted.get()
    await there.send(note(1, 1000), S)
    assert await here.receive(S) == note(1, 1000)
    await here.send(note(2), S)
    await here.send(note(3), S)
    assert [await there.receive(S), await there.receive(S)] == [note(2), note(3)]
    assert there.sent_bytes == here.received_bytes == len(packed(note(1, 1000)))
    assert here.sent_bytes == there.received_bytes == len(packed(note(2))) + len(packed(note(3)))
    await part(there, b)


async def test_order_is_kept(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo
    stream = await a.dial(b)

    async def send() -> None:
        for number in range(300):
            await stream.send(note(number), S)

    sending = asyncio.create_task(send())
    assert [await stream.receive(S) for _ in range(300)] == [note(number) for number in range(300)]
    await sending
    await stream.close()


async def test_large_frames_arrive_whole(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo
    stream = await a.dial(b)
    for number in range(4):
        await stream.send(note(number, 1 << 20), S)
        message = await stream.receive(S)
        assert message is not None
        assert isinstance(message, Frame)
        assert len(message.payload) > 1 << 20
        assert checksum(message.payload) == message.checksum
    await stream.close()


async def test_many_streams_run_side_by_side(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo

    async def talk(number: int) -> None:
        stream = await a.dial(b)
        await stream.send(note(number, 10_000), S)
        assert await stream.receive(S) == note(number, 10_000)
        await stream.close()

    async with asyncio.TaskGroup() as group:
        for number in range(24):
            group.create_task(talk(number))


async def test_a_receiver_that_does_not_read_holds_the_sender_back(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    there = await a.dial(b)
    here = await b.accepted.get()
    taken: list[int] = []

    async def fill() -> None:
        for number in range(64):
            await there.send(note(number, 1 << 20), 0.5)
            taken.append(number)

    with pytest.raises(Unreachable, match="took nothing"):
        await fill()
    assert [await here.receive(S) for _ in taken] == [note(number, 1 << 20) for number in taken]
    await part(there, b)


async def test_the_callers_end_is_an_orderly_one_once_all_was_read(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    there = await a.dial(b)
    here = await b.accepted.get()
    for number in range(20):
        await there.send(note(number, 10_000), S)
    closing = asyncio.create_task(there.close())
    assert [await here.receive(S) for _ in range(20)] == [note(number, 10_000) for number in range(20)]
    assert await here.receive(S) is None
    assert await here.receive(S) is None
    b.dismissed.set()
    await closing


async def test_the_callees_end_is_an_orderly_one_once_all_was_read(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    async def three(stream: Stream) -> None:
        for number in range(3):
            await stream.send(note(number), S)

    b.serve = three
    stream = await a.dial(b)
    assert [await stream.receive(S) for _ in range(4)] == [note(0), note(1), note(2), None]
    assert await stream.receive(S) is None
    await stream.close()


async def test_a_caller_that_is_still_sending_hears_the_callees_last_word(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    abort = Message(abort=Abort(reason="checksum", detail="frame 3"))

    async def refuse(stream: Stream) -> None:
        for _ in range(3):
            await stream.receive(S)
        await stream.send(abort, S)

    b.serve = refuse
    stream = await a.dial(b)

    for number in range(40):
        try:
            await stream.send(note(number, 100_000), S)
        except Unreachable:
            break
        await asyncio.sleep(0.005)
    assert await stream.receive(S) == abort
    await stream.close()


@pytest.mark.parametrize("trouble", [Unreachable("it went"), ProtocolError("gap", "frame 2")])
async def test_a_callee_that_gives_up_is_unreachable(pair: tuple[Peer, Peer], trouble: Exception) -> None:
    a, b = pair

    async def give_up(stream: Stream) -> None:
        await stream.receive(S)
        raise trouble

    b.serve = give_up
    stream = await a.dial(b)
    await stream.send(note(1), S)
    with pytest.raises(Unreachable):
        await stream.receive(S)
    await stream.close()


async def test_a_peer_that_vanishes_is_unreachable_for_who_called_it(world: World, pair: tuple[Peer, Peer]) -> None:
    a, _ = pair
    c = await world.join()
    stream = await a.dial(c)
    await c.accepted.get()
    waiting = asyncio.create_task(stream.receive(S))
    await asyncio.sleep(0)
    await world.kill(c)
    with pytest.raises(Unreachable) as caught:
        await waiting
    assert "said nothing" not in str(caught.value)
    with pytest.raises(Unreachable):
        await stream.send(note(1), S)
    with pytest.raises(Unreachable):
        await a.dial(c)
    await stream.close()


async def test_a_peer_that_vanishes_is_unreachable_for_whom_it_called(world: World, pair: tuple[Peer, Peer]) -> None:
    _, b = pair
    c = await world.join()
    stream = await c.dial(b)
    await stream.send(note(1), S)
    here = await b.accepted.get()
    assert await here.receive(S) == note(1)
    waiting = asyncio.create_task(here.receive(S))
    await asyncio.sleep(0)
    await world.kill(c)
    with pytest.raises(Unreachable, match="went away"):
        await waiting
    with pytest.raises(Unreachable):
        await here.send(note(2), S)


async def test_a_deadline_that_passes_leaves_the_stream_as_it_was(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    there = await a.dial(b)
    here = await b.accepted.get()
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"said nothing for 0\.05 s"):
            await there.receive(0.05)
        with pytest.raises(Unreachable, match="said nothing"):
            await here.receive(0.05)
    await there.send(note(1), S)
    await here.send(note(2), S)
    assert await here.receive(S) == note(1)
    assert await there.receive(S) == note(2)
    await part(there, b)


async def test_a_receive_that_is_cancelled_loses_no_message(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    there = await a.dial(b)
    here = await b.accepted.get()
    for stream, other in ((there, here), (here, there)):
        waiting = asyncio.create_task(stream.receive(S))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        await other.send(note(1), S)
        assert await stream.receive(S) == note(1)
    await part(there, b)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nobody.invalid:7700", "nonsense", "unix:/tmp/socket", "", "a:b:c"])
async def test_where_nobody_is_nobody_can_be_dialled(pair: tuple[Peer, Peer], address: str) -> None:
    with pytest.raises(Unreachable):
        await pair[0].network.dial(address, S)


async def test_a_closed_stream_is_of_no_use_and_closes_again(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo
    stream = await a.dial(b)
    await stream.send(note(1), S)
    await asyncio.gather(stream.close(), stream.close())
    await stream.close()
    with pytest.raises(Unreachable, match="closed"):
        await stream.send(note(2), S)
    with pytest.raises(Unreachable, match="closed"):
        await stream.receive(S)


async def test_a_callee_can_close_its_stream_and_is_heard_before(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    async def say_and_close(stream: Stream) -> None:
        await stream.send(note(1), S)
        await stream.close()
        with pytest.raises(Unreachable, match="closed"):
            await stream.receive(S)

    b.serve = say_and_close
    stream = await a.dial(b)
    assert [await stream.receive(S), await stream.receive(S)] == [note(1), None]
    await stream.close()


async def test_a_message_that_is_too_large_cannot_be_sent_and_harms_nothing(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo
    stream = await a.dial(b)
    with pytest.raises(ValueError, match="larger than"):
        await stream.send(note(1, 4 << 20), S)
    await stream.send(note(2), S)
    assert await stream.receive(S) == note(2)
    await stream.close()


async def test_an_empty_message_is_a_message(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.serve = echo
    stream = await a.dial(b)
    for message in (Message(), Message(inquiry=Inquiry())):
        await stream.send(message, S)
        assert await stream.receive(S) == message
    await stream.close()


# ---------------------------------------------------------------- the end


async def test_a_network_that_is_closed_cuts_its_streams_and_closes_again(
    world: World, pair: tuple[Peer, Peer]
) -> None:
    a, b = pair
    c = await world.join()
    outward, inward = await c.dial(b), await a.dial(c)
    await c.accepted.get()
    await c.network.close()
    await c.network.close()
    for stream in (outward, inward):
        with pytest.raises(Unreachable):
            await stream.receive(S)
    assert await c.network.members("any") == []
    assert not await c.network.publish(c.record("any"))
    await inward.close()
