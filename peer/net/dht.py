"""Where peers find one another: signed, expiring records in hivemind's DHT.

A run's members are spread over 16 keys, "RUN_ID/0" to "RUN_ID/15", each holding peer id → signed record, so that no
node has to hold or send a whole swarm. Every node, a bootstrap too, stores and believes only records that are in order.

The node is kept up: p2pd is started again with the same key and port when it dies, bootstraps that do not answer are
tried again and again, and the addresses of others are remembered, so that a swarm outlives its bootstraps.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import random
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.core.members import LONGEST_LIFE_S
from peer.errors import ConfigError, ProtocolError, Unreachable
from peer.identity import write_secret
from peer.net.addresses import Multiaddr, parse_multiaddr
from peer.net.base import Member
from peer.net.node import Node
from peer.net.record import MAX_RECORD_BYTES, open_record

KEY_FILE = "dht.key"
KNOWN_FILE = "known-peers.txt"
BUCKETS = 16
SAMPLE = 256
MAX_KNOWN = 32
JOIN_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
PUBLISH_TIMEOUT_S = 20.0
READ_TIMEOUT_S = 8.0
ATTEMPTS = 3
RETRY_S = 5.0
LONGEST_RETRY_S = 60.0
CLOCK_SLACK_S = 60.0
_KEY_HEADER = b"\x08\x01\x12\x40"  # libp2p's PrivateKey message: type Ed25519, 64 bytes of seed and public key

_open = functools.lru_cache(maxsize=4096)(open_record)  # the same record comes from several nodes, again and again


class Dht:
    """A node that publishes at most one record and reads those of others.

    home: folder of the node's key and of the addresses that it remembers. bootstraps: multiaddrs. port: TCP, 0 for any
    free one. announce: host and port (None: the same) to tell others instead of this machine's own addresses.
    """

    def __init__(
        self,
        home: Path,
        bootstraps: Sequence[str] = (),
        port: int = 0,
        announce: tuple[str, int | None] | None = None,
        nat_port_map: bool = False,
        retry_s: float = RETRY_S,
    ) -> None:
        self._home = home
        self._bootstraps = [parse_multiaddr(text) for text in bootstraps]
        self._port = port
        self._announce = (announce[0], announce[1] or 0) if announce else None
        self._nat_port_map = nat_port_map
        self._retry_s = retry_s
        self._node: Node | None = None
        self._watching: asyncio.Task[None] | None = None
        self._record: bytes | None = None
        self._closed = False
        self._known: list[str] = []
        self.multiaddrs: tuple[str, ...] = ()

    async def start(self) -> None:
        """Come up, and try the bootstraps for some seconds.

        Raises `ConfigError` when the port is taken or the key unusable, `Unreachable` when p2pd does not come up.
        """
        key = self._home / KEY_FILE
        _ensure_key(key)
        self._known = _read_known(self._home / KNOWN_FILE)
        await self._come_up()
        self._watching = asyncio.create_task(self._watch())

    @property
    def port(self) -> int:
        """The TCP port that the node listens on, known once it has started."""
        return self._port

    @property
    def lonely(self) -> bool:
        """Whether bootstraps were asked for, and neither they nor anybody else is in reach."""
        return bool(self._bootstraps) and (self._node is None or not self._node.neighbours)

    async def publish(self, signed: bytes) -> bool:
        """Store a signed record, and again whenever the node comes up anew; False when that failed. Never raises."""
        self._record = signed
        return await self._store(signed)

    async def withdraw(self, signed: bytes) -> None:
        """Store a record without addresses, which must expire last of all that were published. Never raises."""
        self._record = None
        await self._store(signed)

    async def members(self, run_id: str, limit: int = SAMPLE) -> list[Member]:
        """Return a random sample of a run's live records; what cannot be read in time is missing. Never raises."""
        if self._node is None:
            return []
        found = await self._node.get([f"{run_id}/{bucket}" for bucket in range(BUCKETS)], READ_TIMEOUT_S)
        now_s = time.time()
        records = [_opened(value) for entries in found.values() for value in entries.values()]
        alive = [record for record in records if record and record.addresses and record.expires_s > now_s]
        return random.sample(alive, limit) if len(alive) > limit else alive

    async def close(self) -> None:
        """Go down and leave no child process; idempotent. Takes seconds at most, never raises."""
        self._closed = True
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        node, self._node = self._node, None
        if node is not None:
            await self._remember(node)
            await node.stop()

    async def _come_up(self) -> None:
        node = await Node.start(self._home / KEY_FILE, self._port, self._announce, self._nat_port_map, place_of)
        self._port, self.multiaddrs = node.port, node.multiaddrs
        self._bootstraps = [address for address in self._bootstraps if address.key != node.key]
        self._node = node
        await self._join(node)

    async def _join(self, node: Node) -> None:
        """Connect to the bootstraps that the node does not know; with no success and all alone, to remembered peers."""
        alone = not node.neighbours
        missing = [address for address in self._bootstraps if address.key not in node.neighbours]
        if not await _connect(node, missing) and not node.neighbours:
            remembered = [parse_multiaddr(text) for text in self._known]
            await _connect(node, [address for address in remembered if address.key != node.key])
        if alone and self._record is not None:  # whom we met now, if anybody, has not seen it
            await self._store(self._record)

    async def _watch(self) -> None:
        """Keep the node up and in company, for ever."""
        pause_s = self._retry_s
        while True:
            node = self._node
            if node is None or await node.died(pause_s) or not await node.answers(ANSWER_TIMEOUT_S):
                self._node = None
                if node is not None:
                    await node.stop()
                try:
                    await self._come_up()
                except (ConfigError, Unreachable):
                    await asyncio.sleep(pause_s)
            else:
                await self._join(node)
                await self._remember(node)
            settled = self._node is not None and not self.lonely
            pause_s = LONGEST_RETRY_S if settled else min(2 * pause_s, LONGEST_RETRY_S)

    async def _store(self, signed: bytes) -> bool:
        try:
            member = open_record(signed)
            if member.expires_s <= time.time():
                return False
            key = _key_of(member)
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                for attempt in range(ATTEMPTS):
                    await asyncio.sleep(attempt)
                    if self._closed:
                        return False
                    if self._node is None:
                        continue  # it is being rebuilt
                    if await self._node.store(key, member.peer_id, signed, member.expires_s):
                        return True
                    # False also says that some nodes have it already
                    if (await self._node.get([key], READ_TIMEOUT_S)).get(key, {}).get(member.peer_id) == signed:
                        return True
        except (TimeoutError, Unreachable, ProtocolError):
            pass
        return False

    async def _remember(self, node: Node) -> None:
        fresh = [str(address) for address in await node.neighbour_addresses(1.0)]
        known = list(dict.fromkeys([*fresh, *self._known]))[:MAX_KNOWN]
        if known != self._known:
            self._known = known
            with contextlib.suppress(OSError):
                _write_known(self._home / KNOWN_FILE, known)


def bucket_of(peer_id: str) -> int:
    """Return which of a run's keys a peer's record stands under."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % BUCKETS


def place_of(signed: bytes) -> tuple[str, str, float] | None:
    """Return the key, sub-key and end under which a signed record belongs; None for what is no such record.

    Expired ones have a place too: a node may still hand them out among others, and one bad entry condemns them all.
    """
    member = _opened(signed)
    if member is None or member.expires_s > time.time() + LONGEST_LIFE_S + CLOCK_SLACK_S:
        return None
    return _key_of(member), member.peer_id, member.expires_s


def _key_of(member: Member) -> str:
    return f"{member.run_id}/{bucket_of(member.peer_id)}"


def _opened(signed: object) -> Member | None:
    try:
        return _open(signed) if isinstance(signed, bytes) and len(signed) <= MAX_RECORD_BYTES else None
    except ProtocolError:
        return None


async def _connect(node: Node, addresses: Iterable[Multiaddr]) -> bool:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.connect(address, JOIN_TIMEOUT_S)) for address in addresses]
    return any(task.result() for task in tasks)


def _ensure_key(path: Path) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        write_secret(path, _KEY_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw())
        return
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    seed, public = data[4:36], data[36:]
    if len(data) != 68 or data[:4] != _KEY_HEADER or _public(seed) != public:
        raise ConfigError(f"{path} is damaged: move it away, and this node gets a new key and a new multiaddr.")


def _public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _read_known(path: Path) -> list[str]:
    try:
        lines = path.read_bytes()[:16384].decode("ascii", errors="ignore").split("\n")
    except OSError:
        return []
    known = []
    for line in lines:
        with contextlib.suppress(ConfigError):
            known.append(str(parse_multiaddr(line)))
    return known[:MAX_KNOWN]


def _write_known(path: Path, known: Sequence[str]) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    beside.write_text("".join(f"{line}\n" for line in known), encoding="ascii")
    os.replace(beside, path)
