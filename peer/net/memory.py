"""A whole network inside one process and one event loop, with faults on demand: for tests and the lab.

A `Hub` is the world; each peer gets a `MemoryNetwork` on it. Everything is decided by the order of the calls: no ports,
no threads, no chance but the sample's, whose generator can be given. Messages travel as bytes, as they do outside.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from peer.core.frame import Said, packed, unpacked
from peer.errors import PeerError, ProtocolError, Unreachable
from peer.net.base import Member, Serve, Stream

PIPE_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 4 << 20  # as over gRPC
SAMPLE = 256


class Hub:
    """What connects the networks of one process: who can be called, who published what, who is cut off from whom."""

    def __init__(self, now: Callable[[], float] = time.time, chance: random.Random | None = None) -> None:
        self.now = now
        self.chance = chance or random.Random(0)
        self.records: dict[tuple[str, str], Member] = {}
        self.up: dict[str, MemoryNetwork] = {}
        self.links: set[_Link] = set()
        self._islands: list[frozenset[str]] = []

    def kill(self, peer_id: str) -> None:
        """Let a peer vanish as by kill -9: its streams break, nobody can call it, its record stays until its end."""
        network = self.up.pop(peer_id, None)
        if network is not None:
            network.die()
        self._break(lambda link: peer_id in link.peers)

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut every group off from all others and from the rest, until the next call; none at all heals the network."""
        self._islands = [frozenset(group) for group in groups]
        self._break(lambda link: not self.connected(*link.peers))

    def connected(self, one: str, other: str) -> bool:
        """Tell whether two peers can reach each other."""
        return all((one in island) == (other in island) for island in self._islands)

    def _break(self, doomed: Callable[[_Link], bool]) -> None:
        for link in [link for link in self.links if doomed(link)]:
            link.cut("the other side went away")


class MemoryNetwork:
    """One peer's `peer.net.base.Network` on a hub; its address is its peer id with port 1."""

    def __init__(self, hub: Hub, peer_id: str) -> None:
        self._hub = hub
        self._peer_id = peer_id
        self._serve: Serve | None = None
        self._serving: set[asyncio.Future[None]] = set()

    async def start(self, serve: Serve) -> None:
        """Accept streams from now on."""
        self._serve = serve
        self._hub.up[self._peer_id] = self

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others on the hub reach this peer."""
        return (f"{self._peer_id}:1",)

    @property
    def bootstraps(self) -> tuple[str, ...]:
        """A hub needs none, so this is only a name for it."""
        return (f"/memory/{self._peer_id}",)

    @property
    def lonely(self) -> bool:
        """Never: the hub is always there."""
        return False

    async def publish(self, member: Member) -> bool:
        """Keep a record on the hub; refused unless it is our own, not yet over, and ends after the one before."""
        key = (member.run_id, member.peer_id)
        known = self._hub.records.get(key)
        if member.peer_id != self._peer_id or not self._alive or member.expires_s <= self._hub.now():
            return False
        if known is not None and known.expires_s > member.expires_s:
            return False
        self._hub.records[key] = member
        return True

    async def withdraw(self, member: Member) -> None:
        """Take our record off the hub."""
        if member.peer_id == self._peer_id and self._alive:
            self._hub.records.pop((member.run_id, member.peer_id), None)

    async def members(self, run_id: str) -> list[Member]:
        """Return a sample of the run's records that are not yet over."""
        now_s = self._hub.now()
        found = [record for (run, _), record in self._hub.records.items() if run == run_id and record.expires_s > now_s]
        return self._hub.chance.sample(found, SAMPLE) if len(found) > SAMPLE else found

    async def dial(self, address: str, timeout_s: float) -> Stream:
        """Open a stream to a peer on the hub."""
        peer_id = address.rpartition(":")[0]
        await asyncio.sleep(0)
        other = self._hub.up.get(peer_id)
        if other is None or not self._alive or not self._hub.connected(self._peer_id, peer_id):
            raise Unreachable(f"{address} cannot be reached")
        link = _Link(self._hub, self._peer_id, peer_id)
        other._accept(link.accepted)
        return link.dialled

    async def close(self) -> None:
        """Leave the hub and cut off all streams."""
        if self._hub.up.get(self._peer_id) is self:
            del self._hub.up[self._peer_id]
        self.die()
        for link in [link for link in self._hub.links if self._peer_id in link.peers]:
            link.cut("the other side went away")
        others = self._serving - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    def die(self) -> None:
        """Stop serving."""
        self._serve = None
        for task in self._serving:
            task.cancel()

    @property
    def _alive(self) -> bool:
        return self._serve is not None

    def _accept(self, stream: _End) -> None:
        if self._serve is None:
            return
        task = asyncio.ensure_future(self._serve(stream))
        self._serving.add(task)
        task.add_done_callback(lambda task: self._served(task, stream))

    def _served(self, task: asyncio.Future[None], stream: _End) -> None:
        self._serving.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            stream.end()
            return
        stream.link.cut("the other side ended the stream early")
        if error is not None and not isinstance(error, PeerError):
            task.get_loop().call_exception_handler({"message": "serving a stream failed", "exception": error})


class _Link:
    """A stream between two peers: two ends, and the reason why it broke, if it did."""

    def __init__(self, hub: Hub, caller: str, callee: str) -> None:
        self.peers = (caller, callee)
        self.dialled = _End(self)
        self.accepted = _End(self)
        self.broken: str | None = None
        self.changed = asyncio.Event()
        self._hub = hub
        hub.links.add(self)

    def cut(self, reason: str) -> None:
        """Let both ends fail, now and later."""
        if self.broken is None:
            self.broken = reason
        self._hub.links.discard(self)
        self.changed.set()

    def other(self, end: _End) -> _End:
        """Return the end that faces this one."""
        return self.dialled if end is self.accepted else self.accepted

    def ended(self) -> None:
        """Take note that an end was ended."""
        if self.dialled.over and self.accepted.over:
            self._hub.links.discard(self)
        self.changed.set()


class _End:
    """One side of a stream; a `peer.net.base.Stream`."""

    def __init__(self, link: _Link) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.over = False  # sends and receives no more
        self.link = link
        self._inbox: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._closed = False

    async def send(self, said: Said, timeout_s: float) -> None:
        """Hand one message over, as soon as the other side's inbox has room."""
        data = packed(said)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
        other = self.link.other(self)
        await self._until(lambda: other.over or other._waiting_bytes < PIPE_BYTES, timeout_s, "took")
        if other.over:
            raise Unreachable("the other side has ended the stream")
        other._inbox.append(data)
        other._waiting_bytes += len(data)
        self.sent_bytes += len(data)
        self.link.changed.set()

    async def receive(self, timeout_s: float) -> Said | None:
        """Return the next message, or None once the other side has ended and its messages are read."""
        await self._until(lambda: bool(self._inbox) or self.link.other(self).over, timeout_s, "said")
        if not self._inbox:
            return None
        data = self._inbox.popleft()
        self._waiting_bytes -= len(data)
        self.received_bytes += len(data)
        self.link.changed.set()
        try:
            return unpacked(data)
        except DecodeError as error:
            raise ProtocolError("malformed", "the other side sent something that is no message") from error

    async def close(self) -> None:
        """End the stream on the side that dialled; on the other one it ends when what serves it returns."""
        self._closed = True
        if self is self.link.dialled:
            self.end()

    def end(self) -> None:
        """Neither send nor receive any more; what was sent stays to be read."""
        self.over = True
        self.link.ended()

    async def _until(self, ready: Callable[[], bool], timeout_s: float, verb: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._closed or self.link.broken or ready()):
                    self.link.changed.clear()
                    await self.link.changed.wait()
        except TimeoutError:
            raise Unreachable(f"the other side {verb} nothing for {timeout_s:g} s") from None
        if self._closed:
            raise Unreachable("the stream is closed")
        if self.link.broken:
            raise Unreachable(self.link.broken)
