"""Two worlds for the contract suite: a hub in memory, and the internet as far as loopback has it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from peer.identity import Identity
from peer.net.base import Member, Network, Serve, Stream
from peer.net.internet import Internet
from peer.net.memory import Hub, MemoryNetwork

DEADLINE_S = 20.0


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float = DEADLINE_S) -> None:
    """Wait until something is so; fails after the deadline."""
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.02)


@dataclass
class Peer:
    """A started network, the id it goes by, and what it does with the streams that others open.

    Without `serve` they are handed to the test, and end once it sets `dismissed`.
    """

    network: Network
    peer_id: str
    accepted: asyncio.Queue[Stream] = field(default_factory=asyncio.Queue)
    serve: Serve | None = None
    dismissed: asyncio.Event = field(default_factory=asyncio.Event)

    async def attend(self, stream: Stream) -> None:
        """Serve a stream as the test wants it, or hold it open for the test."""
        if self.serve is not None:
            await self.serve(stream)
            return
        await self.accepted.put(stream)
        await self.dismissed.wait()

    def record(self, run_id: str, life_s: float = 300.0, round: int = 0) -> Member:
        """Return what this peer could publish."""
        return Member(run_id, self.peer_id, self.network.addresses, round, 0, time.time() + life_s)

    async def has(self, run_id: str, *members: Member) -> bool:
        """Tell whether exactly these are in the run, as far as this peer sees."""
        found = await self.network.members(run_id)
        return sorted(found, key=lambda each: each.peer_id) == sorted(members, key=lambda each: each.peer_id)

    async def dial(self, other: Peer) -> Stream:
        """Open a stream to another peer."""
        return await self.network.dial(other.network.addresses[0], DEADLINE_S)


class World(ABC):
    """Where peers come up one after another, and all know one another."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    async def join(self) -> Peer:
        """Start one more peer."""
        peer = self._make()
        self.peers.append(peer)
        await peer.network.start(peer.attend)
        assert not peer.network.lonely
        return peer

    @abstractmethod
    def _make(self) -> Peer: ...

    @abstractmethod
    async def kill(self, peer: Peer) -> None:
        """Let a peer vanish."""

    async def end(self) -> None:
        """Close all networks."""
        for peer in self.peers:
            await peer.network.close()


class MemoryWorld(World):
    def __init__(self, _: Path) -> None:
        super().__init__()
        self.hub = Hub()

    def _make(self) -> Peer:
        name = f"peer{len(self.peers)}"
        return Peer(MemoryNetwork(self.hub, name), name)

    async def kill(self, peer: Peer) -> None:
        self.hub.kill(peer.peer_id)


class InternetWorld(World):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _make(self) -> Peer:
        home = self.folder / str(len(self.peers))
        identity = Identity.load(home)
        bootstraps = [text for peer in self.peers[:1] for text in peer.network.bootstraps if "127.0.0.1" in text]
        return Peer(Internet(identity, home, bootstraps), identity.peer_id)

    async def kill(self, peer: Peer) -> None:
        await peer.network.close()
