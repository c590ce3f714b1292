"""The seam between a peer and the outside world.

The daemon is given a `Network` and knows nothing else of sockets: `peer.net.internet` is the real one (hivemind's DHT
and gRPC), `peer.net.memory` a whole network inside one process. Both pass the same contract suite.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from peer.core.frame import Said as Said
from peer.core.members import Member as Member


class Stream(Protocol):
    """One bidirectional stream of messages with one other peer, in order.

    Every call has a deadline and raises `Unreachable` when the other side is lost or silent past it. What a call waits
    for limits of this peer's own (`peer.net.throttle`) does not count.
    """

    @property
    def sent_bytes(self) -> int:
        """Bytes of the messages sent so far."""

    @property
    def received_bytes(self) -> int:
        """Bytes of the messages received so far."""

    async def send(self, said: Said, timeout_s: float) -> None:
        """Hand one message over; returns once the transport took it (which is how back-pressure is felt)."""

    async def receive(self, timeout_s: float) -> Said | None:
        """Return the next message, or None when the other side ended the stream in order."""

    async def close(self) -> None:
        """End the stream; idempotent, never raises. On the side that dialled, an orderly end once all was sent."""


Serve = Callable[[Stream], Awaitable[None]]
"""What a peer does with a stream that another one opened; the stream ends when it returns."""


class Network(Protocol):
    """Finding peers, and streams between them."""

    async def start(self, serve: Serve) -> None:
        """Come up and accept streams; raises `ConfigError` when a port is taken."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The "host:port" under which others reach this peer, best first."""

    @property
    def bootstraps(self) -> tuple[str, ...]:
        """What others give to --bootstrap to find the swarm through this peer."""

    @property
    def lonely(self) -> bool:
        """Whether none of the bootstraps that were asked for could be reached (they are tried again on the way)."""

    async def publish(self, member: Member) -> bool:
        """Say who we are, until member.expires_s; False when the DHT could not take it. Never raises."""

    async def withdraw(self, member: Member) -> None:
        """Take our record back, as far as the DHT can be reached. Never raises."""

    async def members(self, run_id: str) -> list[Member]:
        """Return a bounded sample of a run's unexpired, correctly signed records, ours included. Never raises."""

    async def dial(self, address: str, timeout_s: float) -> Stream:
        """Open a stream to a peer; raises `Unreachable`."""

    async def close(self) -> None:
        """Go down and leave no child process and no open stream; idempotent."""
