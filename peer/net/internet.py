"""The real network: peers find one another in a DHT, and open gRPC streams to one another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from peer.errors import ConfigError, ProtocolError
from peer.identity import Identity
from peer.net.addresses import (
    MAX_PORT,
    Multiaddr,
    format_address,
    format_transport,
    is_loopback,
    parse_announce,
    parse_multiaddr,
)
from peer.net.base import Member, Serve, Stream
from peer.net.dht import Dht
from peer.net.record import sign
from peer.net.rpc import Rpc
from peer.net.throttle import Throttle

LOOPBACK = "127.0.0.1"
WITHDRAW_TIMEOUT_S = 3.0
LOOK_UP_TIMEOUT_S = 2.0
_ELSEWHERE = ("198.51.100.1", 9)  # an address kept for documentation, so outside every local network


class Internet:
    """A `peer.net.base.Network` for the outside world.

    home: folder of the DHT's files. bootstraps: multiaddrs. port: of the gRPC server, the DHT's is the next one; 0
    takes any two free ones. announce: HOST or HOST:PORT to tell others, for a machine behind a router that forwards
    that port and the next; without a port the same two. throttle: of the streams, not of the DHT.
    """

    def __init__(
        self,
        identity: Identity,
        home: Path,
        bootstraps: Sequence[str] = (),
        port: int = 0,
        announce: str | None = None,
        dht_port: int | None = None,
        nat_port_map: bool = False,
        throttle: Throttle | None = None,
    ) -> None:
        self._identity = identity
        self._bootstraps = [parse_multiaddr(text) for text in bootstraps]
        self._port = port
        self._announce = parse_announce(announce) if announce else None
        self._host = self._announce[0] if self._announce else LOOPBACK
        outside = (self._announce[0], _next(self._announce[1])) if self._announce else None
        self._rpc = Rpc(throttle=throttle)
        if dht_port is None:
            dht_port = _next(port) or 0
        self._dht = Dht(home, bootstraps, dht_port, outside, nat_port_map)
        self._last_s = 0.0

    async def start(self, serve: Serve) -> None:
        """Come up; raises `ConfigError` when a port is taken, `Unreachable` when p2pd does not start."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._rpc.start(serve, self._port)
            if self._announce is None:
                self._host = await _own_host(self._bootstraps)
            await self._dht.start()
            undo.pop_all()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The one address under which others are told to call this peer."""
        port = self._announce[1] if self._announce else None
        return (format_address(self._host, port or self._rpc.port),)

    @property
    def bootstraps(self) -> tuple[str, ...]:
        """The multiaddrs of our DHT node, the announced one first."""
        first = format_transport(self._host, self._dht.port)
        return tuple(sorted(self._dht.multiaddrs, key=lambda text: not text.startswith(f"{first}/")))

    @property
    def lonely(self) -> bool:
        """Whether bootstraps were asked for, and neither they nor anybody else is in reach."""
        return self._dht.lonely

    @property
    def routable(self) -> bool:
        """Whether others can be expected to reach us: False when we announce loopback to a swarm that isn't here."""
        return not is_loopback(self._host) or all(is_loopback(address.host) for address in self._bootstraps)

    async def publish(self, member: Member) -> bool:
        """Sign our record and store it."""
        try:
            signed = sign(member, self._identity)
        except ProtocolError:
            return False
        self._last_s = max(self._last_s, member.expires_s)
        return await self._dht.publish(signed)

    async def withdraw(self, member: Member) -> None:
        """Store a record without addresses, which ends later than all others and so takes their place."""
        end_s = max(self._last_s, member.expires_s) + 0.001
        gone = Member(member.run_id, member.peer_id, (), member.round, member.shard, end_s)
        with contextlib.suppress(ProtocolError, TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._dht.withdraw(sign(gone, self._identity))

    async def members(self, run_id: str) -> list[Member]:
        """Return a sample of the run's live records."""
        return await self._dht.members(run_id)

    async def dial(self, address: str, timeout_s: float) -> Stream:
        """Open a stream to a peer."""
        return await self._rpc.dial(address, timeout_s)

    async def close(self) -> None:
        """Go down, streams and DHT at once."""
        await asyncio.gather(self._rpc.close(), self._dht.close())


def _next(port: int | None) -> int | None:
    if not port:
        return None
    if port >= MAX_PORT:
        raise ConfigError(f"--port {port} leaves no room for the DHT on the next port: choose one below {MAX_PORT}.")
    return port + 1


async def _own_host(bootstraps: Sequence[Multiaddr]) -> str:
    """Return this machine's address on the way to the first bootstrap that can be looked up.

    Without one that on the default route, without a network loopback. Nothing is sent.
    """
    loop = asyncio.get_running_loop()
    for host, port in [*((address.host, address.port) for address in bootstraps), _ELSEWHERE]:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            family, *_, target = found[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return LOOPBACK
