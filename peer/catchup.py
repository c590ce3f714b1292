"""Fetch State from another peer, and hand it out.

A newcomer gets the donor's anchor, outer memory and round; it begins with weights = anchor and an inner optimizer of
its own. The donor copies them once, at a step boundary, and serves the copy beside training to as many newcomers as
come; everything is hashed, and a newcomer uses nothing before all of it is there and fits.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from peer.boundary import Boundary
from peer.core.gossip import slots
from peer.core.members import Member
from peer.core.state import Cursor, State, Tensors
from peer.errors import ProtocolError, Unreachable
from peer.manifest import Manifest
from peer.net.base import Network, Stream
from peer.wire.peer_pb2 import Abort, Message, StateChunk, StateHeader, StateRequest, TensorEntry

PROTOCOL = 1
CHUNK_BYTES = 1024 * 1024
DIAL_S = 5.0
SILENCE_S = 20.0
SNAPSHOT_S = 120.0
"""Training gets this long to reach a step boundary; a snapshot nobody has read from for this long is dropped."""
TRIES_PER_DONOR = 3


@dataclass
class Snapshot:
    """A donor's anchor and outer memory as they stood at one step boundary."""

    header: StateHeader
    tensors: list[Tensor]
    read_at_s: float
    readers: int = 0

    def chunk(self, index: int) -> bytes:
        """Return one chunk of the tensors, laid one after another."""
        first, last = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.header.size_bytes)
        out, offset = bytearray(), 0
        for tensor in self.tensors:
            size = 4 * tensor.numel()
            if offset < last and offset + size > first:
                raw = tensor.view(-1).view(torch.uint8)
                out += raw[max(0, first - offset) : last - offset].numpy().tobytes()
            offset += size
        return bytes(out)


class Donor:
    """Serves this peer's State to newcomers: one snapshot at a time, shared by all who ask meanwhile."""

    def __init__(self, run: Manifest, boundary: Boundary) -> None:
        self._run = run
        self._boundary = boundary
        self._snapshot: Snapshot | None = None
        self._making = asyncio.Lock()

    async def serve(self, stream: Stream, request: StateRequest) -> None:
        """Send the header and the chunks that are asked for; raises `Unreachable` when the newcomer is lost."""
        refused = self._refuse(request)
        if refused:
            await stream.send(Message(abort=refused), SILENCE_S)
            return
        async with self._making:
            snapshot = self._snapshot
            if snapshot is None or (request.snapshot_id != snapshot.header.snapshot_id and await self._stale(snapshot)):
                snapshot = self._snapshot = await self._take()
        first = request.first_chunk if request.snapshot_id == snapshot.header.snapshot_id else 0
        snapshot.readers += 1
        try:
            await stream.send(Message(state_header=snapshot.header), SILENCE_S)
            for index in range(first, len(snapshot.header.hashes)):
                payload = await asyncio.to_thread(snapshot.chunk, index)
                await stream.send(Message(state_chunk=StateChunk(index=index, payload=payload)), SILENCE_S)
                snapshot.read_at_s = time.monotonic()
        finally:
            snapshot.readers -= 1

    def drop_unused(self) -> None:
        """Free a snapshot that nobody has read from lately."""
        if self._snapshot is not None and time.monotonic() - self._snapshot.read_at_s > SNAPSHOT_S:
            self._snapshot = None

    def _refuse(self, request: StateRequest) -> Abort | None:
        if request.protocol != PROTOCOL:
            return Abort(reason="protocol", detail=f"we speak protocol {PROTOCOL}; the older side must upgrade")
        if request.run_id != self._run.run_id:
            return Abort(reason="run", detail=f"this is run {self._run.run_id}; join with the same manifest")
        return None

    async def _stale(self, snapshot: Snapshot) -> bool:
        """Tell whether a snapshot is too old to begin with; one that is being read may lag a little, to save memory."""
        round = await self._boundary.visit(lambda state: state.round, SNAPSHOT_S)
        return round - snapshot.header.round > (self._run.exchange.max_lag // 2 if snapshot.readers else 0)

    async def _take(self) -> Snapshot:
        def copy(state: State) -> tuple[int, str, dict[str, Tensor]]:
            stored = {f"anchor/{name}": tensor for name, tensor in state.anchor.items()}
            for slot in slots(self._run.outer.form):
                stored |= {f"outer/{slot}/{name}": tensor for name, tensor in state.outer[slot].items()}
            # of tensors on a GPU .cpu() is the copy
            return (
                state.round,
                state.origin,
                {
                    name: tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
                    for name, tensor in stored.items()
                },
            )

        round, origin, tensors = await self._boundary.visit(copy, SNAPSHOT_S)
        entries = [TensorEntry(name=name, shape=tensor.shape) for name, tensor in tensors.items()]
        header = StateHeader(
            snapshot_id=secrets.token_hex(16),
            round=round,
            origin=origin,
            tensors=entries,
            size_bytes=sum(4 * tensor.numel() for tensor in tensors.values()),
            chunk_bytes=CHUNK_BYTES,
        )
        snapshot = Snapshot(header, [tensor.contiguous() for tensor in tensors.values()], time.monotonic())
        chunks = -(-header.size_bytes // CHUNK_BYTES)
        hashes = await asyncio.to_thread(
            lambda: [hashlib.sha256(snapshot.chunk(index)).digest() for index in range(chunks)]
        )
        header.hashes.extend(hashes)
        return snapshot


@dataclass(frozen=True)
class Caught:
    """A State that was fetched, from whom, and what it cost."""

    state: State
    donor: str
    size_bytes: int
    seconds: float


Progress = Callable[[Member, int, int], None]
"""Donor, bytes so far, bytes in all."""


async def catch_up(
    network: Network,
    donors: list[Member],
    run: Manifest,
    shapes: dict[str, tuple[int, ...]],
    origin: str | None,
    me: str,
    progress: Progress,
    refused: Callable[[Member, str], None],
) -> Caught | None:
    """Fetch State from the first donor that can give it; None when none can.

    shapes and origin are this peer's own: a State that does not fit them is refused. A peer that has no State yet
    (origin None) takes over the donor's. `refused` hears why a donor was given up.
    """
    for donor in donors:
        began = time.monotonic()
        download = Download(run, shapes, origin, me)
        for attempt in range(TRIES_PER_DONOR):
            try:
                state = await download.run(network, donor, progress)
                return Caught(state, donor.peer_id, download.size_bytes, time.monotonic() - began)
            except Unreachable as error:
                refused(donor, str(error))
                await asyncio.sleep(0.5 * attempt)
            except ProtocolError as error:
                refused(donor, str(error))
                break
    return None


class Download:
    """A State on its way from one donor; a cut stream goes on where it stopped, while the donor keeps the snapshot."""

    def __init__(self, run: Manifest, shapes: dict[str, tuple[int, ...]], origin: str | None, me: str) -> None:
        self._run, self._origin, self._me = run, origin, me
        names = [f"anchor/{name}" for name in shapes]
        names += [f"outer/{slot}/{name}" for slot in slots(run.outer.form) for name in shapes]
        self._expected = {name: shapes[name.removeprefix("anchor/")] for name in names if name.startswith("anchor/")}
        self._expected |= {name: shapes[name.split("/", 2)[2]] for name in names if name.startswith("outer/")}
        self.size_bytes = sum(4 * prod(shape) for shape in self._expected.values())
        self._header = StateHeader()
        self._buffer = bytearray()
        self._next = 0

    async def run(self, network: Network, donor: Member, progress: Progress) -> State:
        """Fetch what is missing; raises `Unreachable` (try again) or `ProtocolError` (don't)."""
        stream = await network.dial(donor.addresses[0], DIAL_S)
        try:
            request = StateRequest(
                protocol=PROTOCOL,
                run_id=self._run.run_id,
                peer_id=self._me,
                snapshot_id=self._header.snapshot_id,
                first_chunk=self._next,
            )
            await stream.send(Message(state_request=request), SILENCE_S)
            message = await self._receive(stream, SNAPSHOT_S)
            self._begin(message.state_header)
            while self._next < len(self._header.hashes):
                message = await self._receive(stream, SILENCE_S)
                self._take(message.state_chunk)
                progress(donor, len(self._buffer), self.size_bytes)
        finally:
            await stream.close()
        return self._state()

    async def _receive(self, stream: Stream, timeout_s: float) -> Message:
        message = await stream.receive(timeout_s)
        if message is None:
            raise Unreachable("the donor ended the stream early")
        if message.HasField("abort"):
            raise ProtocolError(message.abort.reason[:64], message.abort.detail[:256])
        return message

    def _begin(self, header: StateHeader) -> None:
        if self._origin is not None and header.origin != self._origin:
            raise ProtocolError("origin", f"the donor started from weights {header.origin[:12]}, we from others")
        entries = {entry.name: tuple(entry.shape) for entry in header.tensors}
        chunks = -(-self.size_bytes // CHUNK_BYTES)
        if list(entries.items()) != list(self._expected.items()) or header.size_bytes != self.size_bytes:
            raise ProtocolError("malformed", "the donor's State is not of this run's shape")
        if header.chunk_bytes != CHUNK_BYTES or len(header.hashes) != chunks:
            raise ProtocolError("malformed", "the donor's list of chunks does not fit its size")
        if header.snapshot_id != self._header.snapshot_id:
            self._buffer, self._next = bytearray(), 0
        self._header = header

    def _take(self, chunk: StateChunk) -> None:
        if chunk.index != self._next:
            raise ProtocolError("out-of-order", f"chunk {chunk.index} where {self._next} was due")
        if hashlib.sha256(chunk.payload).digest() != self._header.hashes[self._next]:
            raise ProtocolError("checksum", f"chunk {chunk.index} does not match its hash")
        expected = min(CHUNK_BYTES, self.size_bytes - self._next * CHUNK_BYTES)
        if len(chunk.payload) != expected:
            raise ProtocolError("oversized", f"chunk {chunk.index} has {len(chunk.payload)} bytes, not {expected}")
        self._buffer += chunk.payload
        self._next += 1

    def _state(self) -> State:
        tensors, offset = Tensors(), 0
        for name, shape in self._expected.items():
            count = prod(shape)
            tensor = torch.frombuffer(self._buffer, dtype=torch.float32, count=count, offset=offset).view(shape)
            if not bool(torch.isfinite(tensor).all()):
                raise ProtocolError("non-finite", f"the donor's {name} is not finite")
            tensors[name] = tensor
            offset += 4 * count
        anchor = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
        outer: dict[str, Tensors] = {slot: {} for slot in slots(self._run.outer.form)}
        for name, tensor in tensors.items():
            if name.startswith("outer/"):
                _, slot, parameter = name.split("/", 2)
                outer[slot][parameter] = tensor
        return State(anchor, anchor, outer, {}, self._header.round, 0, Cursor(), self._header.origin)
