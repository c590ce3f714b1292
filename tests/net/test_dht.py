"""The DHT under attack, under failures, and alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from peer.errors import ConfigError
from peer.identity import Identity
from peer.net import dht as dhts
from peer.net import lean
from peer.net.base import Member
from peer.net.dht import BUCKETS, SAMPLE, Dht, bucket_of, place_of
from peer.net.node import Node
from peer.net.record import sign
from tests.net.worlds import eventually

ME = Identity(bytes(range(32)))
OTHER = Identity(bytes(32))


def record(identity: Identity, run_id: str = "run", life_s: float = 300.0, host: str = "203.0.113.5:7700") -> Member:
    return Member(run_id, identity.peer_id, (host,), 0, 0, time.time() + life_s)


def local(dht: Dht) -> list[str]:
    """Return the multiaddrs that always work on this machine."""
    return [text for text in dht.multiaddrs if "/127.0.0.1/" in text]


Start = Callable[..., Awaitable[Dht]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start nodes that are closed at the end: start("name", bootstraps=[...]). The same name is the same home."""
    async with AsyncExitStack() as stack:

        async def start(name: str, **options: Any) -> Dht:
            home = tmp_path / name
            home.mkdir(exist_ok=True)
            dht = Dht(home, **options)
            await dht.start()
            stack.push_async_callback(dht.close)
            return dht

        yield start


def sees(dht: Dht, *members: Member, run_id: str = "run") -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return sorted(await dht.members(run_id), key=repr) == sorted(members, key=repr)

    return check


def pid(dht: Dht) -> int | None:
    return dht._node.pid if dht._node is not None else None


def running(process: int) -> bool:
    """Tell whether a process exists and isn't merely waiting to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- what is stored and believed


@dataclass
class Attack:
    """One store request, as a stranger may send it. None: what belongs there."""

    value: bytes
    key: str | None = None
    subkey: str | None = None
    end_s: float | None = None
    packed: bytes | None = None


def attacks() -> dict[str, Attack]:
    member = record(OTHER)
    good = sign(member, OTHER)
    late = record(OTHER, life_s=7200)
    return {
        "altered": Attack(good[:-1] + bytes([good[-1] ^ 1])),
        "another sub-key": Attack(good, subkey=ME.peer_id),
        "another bucket": Attack(good, key=f"run/{(bucket_of(OTHER.peer_id) + 1) % BUCKETS}"),
        "another run": Attack(good, key=f"other/{bucket_of(OTHER.peer_id)}"),
        "prolonged": Attack(good, end_s=member.expires_s + 100),
        "living too long": Attack(sign(late, OTHER)),
        "no record": Attack(b"hello", key="run/0", subkey="x", end_s=time.time() + 60),
        "too large": Attack(bytes(100_000), key="run/0", subkey="x", end_s=time.time() + 60),
        "not bytes": Attack(good, packed=b"\xa5hello"),
        "an object": Attack(good, packed=b"\xc7\x01\x50\x00"),
        "empty": Attack(good, packed=b""),
    }


async def strike(attacker: Node, victim: Dht, attack: Attack) -> bool:
    """Ask a node to store something, past all checks of our own; tell whether it did."""
    hivemind, _ = lean.load()
    place = place_of(attack.value) or ("", "", 0.0)
    key = place[0] if attack.key is None else attack.key
    subkey = place[1] if attack.subkey is None else attack.subkey
    end_s = attack.end_s or place[2] or time.time() + 60
    value = hivemind.MSGPackSerializer.dumps(attack.value) if attack.packed is None else attack.packed
    assert victim._node is not None
    answer = await attacker._dht.protocol.call_store(
        victim._node._p2p.peer_id, [hivemind.DHTID.generate(key)], [value], [end_s], [subkey]
    )
    assert answer is not None, "the victim did not answer"
    return bool(answer[0])


async def test_a_node_refuses_every_forgery_and_takes_what_is_in_order(start: Start) -> None:
    victim = await start("victim")
    attacker = await start("attacker", bootstraps=local(victim))
    assert attacker._node is not None
    taken = {name: await strike(attacker._node, victim, attack) for name, attack in attacks().items()}
    assert taken == dict.fromkeys(taken, False)
    assert await victim.members("run") == []
    member = record(OTHER)
    assert await strike(attacker._node, victim, Attack(sign(member, OTHER)))
    assert await victim.members("run") == [member]


async def test_what_a_liar_hands_out_is_not_believed(start: Start) -> None:
    honest = await start("honest")
    liar = await start("liar", bootstraps=local(honest))
    hivemind, _ = lean.load()
    assert liar._node is not None
    truth = record(ME)
    forged = replace(record(ME, life_s=600, host="203.0.113.66:1"), round=9)
    lie = sign(replace(forged, peer_id=OTHER.peer_id), OTHER)
    assert await honest.publish(sign(truth, ME))
    liar._node._dht.protocol.storage.store_subkey(
        hivemind.DHTID.generate(f"run/{bucket_of(ME.peer_id)}"),
        ME.peer_id,
        hivemind.MSGPackSerializer.dumps(lie),
        forged.expires_s,
    )
    assert await honest.members("run") == [truth]


async def test_a_withdrawal_cannot_be_undone_by_storing_the_old_record_again(start: Start) -> None:
    victim = await start("victim")
    attacker = await start("attacker", bootstraps=local(victim))
    assert attacker._node is not None
    old = record(ME)
    await victim.publish(sign(old, ME))
    await victim.withdraw(sign(replace(old, addresses=(), expires_s=old.expires_s + 0.001), ME))
    assert await victim.members("run") == []
    assert not await strike(attacker._node, victim, Attack(sign(old, ME)))
    assert await victim.members("run") == []


async def test_publishing_the_same_record_twice_succeeds_twice(start: Start) -> None:
    a = await start("a")
    b = await start("b", bootstraps=local(a))
    signed = sign(record(ME), ME)
    assert await a.publish(signed)
    assert await a.publish(signed)
    assert await b.publish(signed)


async def test_a_large_swarm_is_read_as_a_random_sample_from_all_buckets(start: Start) -> None:
    a = await start("a")
    identities = [Identity(random.Random(number).randbytes(32)) for number in range(SAMPLE + 30)]
    async with asyncio.TaskGroup() as group:
        stores = [group.create_task(a.publish(sign(record(each), each))) for each in identities]
    assert all(store.result() for store in stores)
    found = await a.members("run")
    assert len({member.peer_id for member in found}) == SAMPLE
    assert {bucket_of(member.peer_id) for member in found} == set(range(BUCKETS))
    assert len(await a.members("run", limit=5)) == 5
    assert len(await a.members("run", limit=1000)) == len(identities)


# ---------------------------------------------------------------- failures


async def test_a_node_whose_p2pd_is_killed_comes_back_as_the_same_and_is_found_again(start: Start) -> None:
    a = await start("a")
    b = await start("b", bootstraps=local(a))
    c = await start("c", bootstraps=local(a))
    member = record(ME)
    assert await b.publish(sign(member, ME))
    await eventually(sees(c, member))
    before, addresses = pid(b), b.multiaddrs
    assert before is not None
    os.kill(before, signal.SIGKILL)

    async def back() -> bool:
        return pid(b) not in (None, before) and not b.lonely

    await eventually(back)
    assert b.multiaddrs == addresses
    renewed = replace(member, expires_s=member.expires_s + 1)
    assert await b.publish(sign(renewed, ME))
    for dht in (a, b, c):
        await eventually(sees(dht, renewed))


async def test_a_bootstrap_that_lost_everything_is_told_again(start: Start) -> None:
    a = await start("a")
    b = await start("b", bootstraps=local(a), retry_s=0.1)
    member = record(ME)
    assert await b.publish(sign(member, ME))
    before = pid(b)
    assert before is not None
    port, addresses = a.port, local(a)
    await a.close()
    a = await start("a", port=port)
    assert local(a) == addresses
    os.kill(before, signal.SIGKILL)  # b comes back to a bootstrap that has never heard of it
    await eventually(sees(a, member))


async def test_a_node_without_its_bootstrap_starts_alone_and_joins_when_it_appears(start: Start) -> None:
    a = await start("a")
    port, addresses = a.port, local(a)
    await a.close()
    b = await start("b", bootstraps=addresses, retry_s=0.1)
    assert b.lonely
    member = record(ME)
    assert await b.publish(sign(member, ME)), "alone, it is its own swarm"
    assert await b.members("run") == [member]
    a = await start("a", port=port)
    await eventually(sees(a, member))
    assert not b.lonely


async def test_a_node_finds_its_swarm_again_without_the_bootstrap(start: Start) -> None:
    a = await start("a")
    b = await start("b", bootstraps=local(a))
    c = await start("c", bootstraps=local(a))
    gone = local(a)
    member = record(ME)
    assert await b.publish(sign(member, ME))
    await eventually(sees(c, member))
    await c.close()
    await a.close()
    c = await start("c", bootstraps=gone)
    assert not c.lonely
    await eventually(sees(c, member))


async def test_a_node_is_no_bootstrap_of_itself(start: Start) -> None:
    a = await start("a")
    port, addresses = a.port, local(a)
    await a.close()
    a = await start("a", port=port, bootstraps=addresses)
    assert not a.lonely


async def test_a_hung_p2pd_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dhts, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("peer.net.node.STOP_TIMEOUT_S", 0.2)
    a = await start("a", retry_s=0.1)
    before = pid(a)
    assert before is not None
    os.kill(before, signal.SIGSTOP)

    async def replaced() -> bool:
        return pid(a) not in (None, before)

    await eventually(replaced)
    assert not running(before)


@pytest.mark.parametrize("hung", [False, True])
async def test_closing_leaves_no_process_and_no_socket(
    start: Start, hung: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.net.node.STOP_TIMEOUT_S", 0.2)
    a = await start("a")
    process, node = pid(a), a._node
    assert process is not None
    assert node is not None
    sockets = [Path(node._p2p._daemon_listen_maddr["unix"]), Path(node._p2p._client_listen_maddr["unix"])]
    assert sockets[0].exists()
    if hung:
        os.kill(process, signal.SIGSTOP)
    await a.close()
    assert not running(process)
    assert not any(socket.exists() for socket in sockets)
    await a.close()
    assert await a.members("run") == []
    assert not await a.publish(sign(record(ME), ME))


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    dht = Dht(tmp_path)
    starting = asyncio.create_task(dht.start())
    children: set[int] = set()

    async def spawned() -> bool:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        children.update(int(child) for child in listed if "p2pd" in Path(f"/proc/{child}/cmdline").read_text())
        return bool(children)

    await eventually(spawned)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await dht.close()

    async def gone() -> bool:
        return not any(map(running, children))

    await eventually(gone)


DAEMON = """
import asyncio, pathlib, sys
from peer.net.dht import Dht

async def main():
    dht = Dht(pathlib.Path(sys.argv[1]))
    await dht.start()
    p2p = dht._node._p2p
    print(dht._node.pid, p2p._daemon_listen_maddr["unix"], p2p._client_listen_maddr["unix"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
async def test_a_killed_daemon_leaves_no_p2pd_behind(tmp_path: Path, how: signal.Signals) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, tmp_path], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    with daemon, daemon.stdout:
        first, *sockets = (await asyncio.to_thread(daemon.stdout.readline)).split()
        child = int(first)
        assert running(child)
        daemon.send_signal(how)
        await asyncio.to_thread(daemon.wait)

        async def gone() -> bool:
            return not running(child)

        await eventually(gone)
        for socket in sockets:  # which nobody is left to remove
            Path(socket).unlink(missing_ok=True)


# ---------------------------------------------------------------- bad input


async def test_a_port_that_is_taken_is_named(start: Start) -> None:
    a = await start("a")
    with pytest.raises(ConfigError, match=rf"Port {a.port} .*--port"):
        await start("b", port=a.port)


@pytest.mark.parametrize("content", [b"", b"\x08\x01\x12\x40" + bytes(64), b"\x08\x00\x12\x40" + bytes(64), bytes(67)])
async def test_a_damaged_key_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dht.key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"dht\.key is damaged: move it away"):
        await Dht(tmp_path).start()
    assert path.read_bytes() == content


async def test_remembered_addresses_that_are_nonsense_do_no_harm(start: Start, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "known-peers.txt").write_bytes(b"nonsense\n\xff\xfe\n/ip4/127.0.0.1/tcp/1/p2p/Qm" + b"1" * 44)
    a = await start("a")
    assert not a.lonely
