"""One node of hivemind's DHT in our own event loop, on a p2pd (go-libp2p) of its own, from start to stop.

hivemind's DHTNode is used rather than its DHT, which keeps the node in a child process: that process outlives a killed
parent and blocks its callers when it dies. p2pd itself ends within a second once we are gone.

p2pd always starts alone, and is then led to others with `connect`: given addresses to start with it would fail when
none answers, take its time over a dead one, and could not be led to another one later.

This and `peer.net.dht` are all that deals with hivemind, which it gets from `peer.net.lean`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peer.errors import ConfigError, Unreachable
from peer.net import lean
from peer.net.addresses import Multiaddr, format_transport, parse_multiaddr

STARTUP_TIMEOUT_S = 60.0
RPC_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 3.0
IDLE_TIMEOUT_S = 15.0
MAX_NEIGHBOURS = 16


Place = Callable[[bytes], tuple[str, str, float] | None]
"""Under which key and sub-key, and until when (Unix time), a value belongs; None for one that belongs nowhere."""


class Node:
    """A running DHT node; made by `start`, and of no use after `stop` or once p2pd died."""

    def __init__(self, p2p: Any, dht: Any, port: int) -> None:
        hivemind, control = lean.load()
        self.port = port
        self.key: str = p2p.peer_id.to_base58()
        self.pid: int = p2p._child.pid
        self.multiaddrs: tuple[str, ...] = tuple(f"{address}/p2p/{self.key}" for address in p2p._visible_maddrs)
        self._p2p = p2p
        self._dht = dht
        self._hivemind = hivemind
        self._control = control
        self._died = asyncio.ensure_future(p2p._child.wait())
        self._failures = (OSError, EOFError, control.P2PDaemonError, control.P2PHandlerError)

    @classmethod
    async def start(
        cls, key: Path, port: int, announce: tuple[str, int] | None, nat_port_map: bool, place: Place
    ) -> Node:
        """Start p2pd with the key and listen on the TCP port (0: any free one).

        announce: host and port to tell others instead of this machine's addresses. Raises `ConfigError` when the port
        is taken, `Unreachable` when p2pd does not come up. Only values where `place` puts them are stored or believed.
        """
        hivemind, control = lean.load()
        # On Python 3.11 and 3.12 hivemind calls a function that was deprecated there and no longer is.
        warnings.filterwarnings("ignore", "path is deprecated", DeprecationWarning, r"hivemind\.")
        with _reserved(port) as free:
            hosts = [f"/ip4/0.0.0.0/tcp/{free}"] + [f"/ip6/::/tcp/{free}"] * bool(announce and ":" in announce[0])
            creating = asyncio.ensure_future(
                hivemind.P2P.create(
                    identity_path=str(key),
                    check_if_identity_free=False,  # HOME has one daemon at a time; the check starts a second p2pd
                    host_maddrs=hosts,
                    announce_maddrs=[format_transport(announce[0], announce[1] or free)] if announce else None,
                    nat_port_map=nat_port_map,
                    use_relay=False,  # else p2pd would carry strangers' traffic, up to gigabytes of it
                    startup_timeout=STARTUP_TIMEOUT_S,
                    idle_timeout=IDLE_TIMEOUT_S,
                )
            )
            try:
                p2p = await asyncio.shield(creating)
            except control.P2PDaemonError as error:
                raise Unreachable(f"p2pd did not start: {error}") from error
            except asyncio.CancelledError:
                await asyncio.wait({creating}, timeout=STOP_TIMEOUT_S)
                if creating.done() and not creating.cancelled() and creating.exception() is None:
                    await _end(creating.result())
                raise
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(_end, p2p)
            dht = await hivemind.DHTNode.create(
                p2p=p2p,
                node_id=hivemind.DHTID.generate(source=p2p.peer_id.to_bytes()),  # a restart is the same node again
                wait_timeout=RPC_TIMEOUT_S,
                cache_locally=False,  # we always want the latest
                cache_nearest=0,
                reuse_get_requests=False,
                record_validator=_Validator(place),
            )
            undo.pop_all()
        return cls(p2p, dht, free)

    async def died(self, within_s: float) -> bool:
        """Wait until p2pd has ended, or for as long as given; tell whether it has."""
        done, _ = await asyncio.wait({self._died}, timeout=within_s)
        return bool(done)

    async def answers(self, timeout_s: float) -> bool:
        """Tell whether p2pd still answers."""
        pb = self._control.p2pd_pb
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(pb.Request(type=pb.Request.IDENTIFY))
        except self._failures:
            return False
        return True

    @property
    def neighbours(self) -> frozenset[str]:
        """The keys of the nodes that this one knows."""
        return frozenset(peer.to_base58() for peer in self._dht.protocol.routing_table.peer_id_to_uid)

    async def connect(self, address: Multiaddr, timeout_s: float) -> bool:
        """Get to know the node at an address and its neighbours; tell whether it answered. Never raises."""
        try:
            async with asyncio.timeout(timeout_s):
                # Look first whether anybody is there: after a failure libp2p itself refuses to try again for minutes.
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.close()
                peer = self._hivemind.PeerID.from_base58(address.key)
                await self._p2p._client.connect(peer, [self._hivemind.Multiaddr(address.transport)])
                node_id = await self._dht.protocol.call_ping(peer)
                if node_id is None:
                    return False
                await self._dht.protocol.update_routing_table(node_id, peer)
                await self._dht.find_nearest_nodes([self._dht.node_id])
        except (*self._failures, ValueError):
            return False
        return True

    async def neighbour_addresses(self, timeout_s: float) -> list[Multiaddr]:
        """Return the addresses of some neighbours, as far as p2pd knows them. Never raises."""
        found: list[Multiaddr] = []
        try:
            async with asyncio.timeout(timeout_s):
                for peer in list(self._dht.protocol.routing_table.peer_id_to_uid)[:MAX_NEIGHBOURS]:
                    found += await self._addresses_of(peer)
        except self._failures:
            pass
        return found

    async def _addresses_of(self, peer: Any) -> list[Multiaddr]:
        pb = self._control.p2pd_pb
        wanted = pb.DHTRequest(type=pb.DHTRequest.FIND_PEER, peer=peer.to_bytes())
        answer = await self._ask(pb.Request(type=pb.Request.DHT, dht=wanted))
        packed = list(answer.dht.peer.addrs)
        if not packed:  # then at least from where we are connected to it
            answer = await self._ask(pb.Request(type=pb.Request.LIST_PEERS))
            packed = [address for each in answer.peers if each.id == peer.to_bytes() for address in each.addrs]
        found = []
        for address in packed:
            with contextlib.suppress(ConfigError, ValueError):  # of a kind that we don't use
                found.append(parse_multiaddr(f"{self._hivemind.Multiaddr(address)}/p2p/{peer.to_base58()}"))
        return found

    async def _ask(self, request: Any) -> Any:
        """Put one request to p2pd on a connection of its own."""
        reader, writer = await self._p2p._client.control.daemon_connector.open_connection()
        try:
            await self._control.write_pbmsg(writer, request)
            answer = self._control.p2pd_pb.Response()
            await self._control.read_pbmsg_safe(reader, answer)
            return answer
        finally:
            writer.close()

    async def store(self, key: str, subkey: str, value: bytes, expires_s: float) -> bool:
        """Store a value on the nodes nearest to its key; False also when they hold it already. Raises `Unreachable`."""
        try:
            return bool(await self._dht.store(key, value, expires_s, subkey=subkey))
        except self._failures as error:
            raise Unreachable(f"the DHT did not take a record: {error}") from error

    async def get(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        """Return key → subkey → value of what is found in time. Never raises."""
        searches = await self._dht.get_many(keys, sufficient_expiration_time=float("inf"), return_futures=True)
        done, late = await asyncio.wait(searches.values(), timeout=timeout_s)
        for search in late:
            search.cancel()
        found = {key: search.result() for key, search in searches.items() if search in done}
        return {
            key: {subkey: item.value for subkey, item in entry.value.items()}
            for key, entry in found.items()
            if entry is not None and isinstance(entry.value, dict)
        }

    async def stop(self) -> None:
        """End p2pd, if need be by force, and leave nothing of it behind. Takes seconds at most, never raises."""
        self._dht.is_alive = False
        await _end(self._p2p)


class _Validator:
    """hivemind's RecordValidatorBase: what decides over every value that is stored here or was found elsewhere."""

    def __init__(self, place: Place) -> None:
        hivemind, _ = lean.load()
        self._place = place
        self._hash = hivemind.DHTID.generate
        self._pack = hivemind.MSGPackSerializer.dumps

    def validate(self, record: Any) -> bool:
        """Tell whether a record (key, subkey, value, expiration_time; packed) is where it belongs."""
        # Unpacked by hand, because hivemind's unpacking makes any object that a stranger asks for.
        value = record.value[2:] if record.value[:1] == b"\xc4" else record.value[3:]
        if self._pack(value) != record.value:
            return False
        place = self._place(value)
        if place is None:
            return False
        key, subkey, expires_s = place
        found = (record.key, record.subkey, record.expiration_time)
        return bool(found == (self._hash(source=key).to_bytes(), self._pack(subkey), expires_s))

    def sign_value(self, record: Any) -> Any:
        """Return the value as it is: values come signed, where that matters."""
        return record.value

    def strip_value(self, record: Any) -> Any:
        """Return the value as it is."""
        return record.value


async def _end(p2p: Any) -> None:
    """End a p2pd and our side of it: first what waits for it, then the process, then its sockets."""
    control, child = p2p._client.control, p2p._child
    tasks = {task for task in (control._read_task, control._write_task, *control._handler_tasks.values()) if task}
    await asyncio.sleep(0)  # one that never ran would leave its connection open
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # of no interest any more
    ended = asyncio.ensure_future(child.wait())
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is None:
            # not child.terminate(), which may reap a child that has just ended under asyncio's eyes, and it complains
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
            await asyncio.wait({ended}, timeout=STOP_TIMEOUT_S)
    p2p._terminate()
    for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr):
        Path(address["unix"]).unlink(missing_ok=True)


@contextlib.contextmanager
def _reserved(port: int) -> Iterator[int]:
    """Hold a TCP port (0: any free one) until p2pd, which shares ports with whoever allows it, has taken it."""
    with socket.socket() as holder:
        if port:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of ours don't count
        try:
            holder.bind(("0.0.0.0", port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} for the DHT cannot be used: {error.strerror}. Choose another one with --port."
            ) from error
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield holder.getsockname()[1]
