"""Hand State out: what a peer gives to newcomers, beside its own training.

The donor copies its anchor, outer memory, and the small part of its inner optimizer's, once, at a step boundary, and
serves the copy to as many newcomers as come.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.boundary import Boundary
from peer.core.gossip import slots
from peer.core.state import State
from peer.lordo import handed_over
from peer.manifest import Manifest
from peer.net.base import Stream
from peer.wire.peer_pb2 import Abort, Message, StateChunk, StateHeader, StateRequest, TensorEntry

PROTOCOL = 2
CHUNK_BYTES = 1024 * 1024
PIECE_BYTES = 16 * 1024
"""A chunk comes in pieces, so that a slow download that moves is not taken for one that stands still."""

SILENCE_S = 20.0
SNAPSHOT_S = 120.0
"""Training gets this long to reach a step boundary; a snapshot nobody has read from for this long is dropped."""

_STOPPING = Abort(reason="stopping", detail="this peer is leaving the swarm; ask someone else")


def layout(run: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return what a newcomer gets, in order: "anchor/P", "outer/SLOT/P" or "inner/SLOT/P" → shape; all of it float32.

    shapes: of the parameters P, in the model's order. AdamW's memory is twice the model, and stays where it is.
    """
    found = {f"anchor/{name}": shape for name, shape in shapes.items()}
    for slot in slots(run.outer.form):
        found |= {f"outer/{slot}/{name}": shape for name, shape in shapes.items()}
    if run.inner.optimizer == "lordo":
        for slot, kept in handed_over(shapes, run.inner.rule).items():
            found |= {f"inner/{slot}/{name}": shape for name, shape in kept.items()}
    return found


def place(state: State, name: str) -> tuple[dict[str, Tensor], str]:
    """Return where in a state a tensor of `layout` belongs: the dictionary, and its key there."""
    part, _, rest = name.partition("/")
    if part == "anchor":
        return state.anchor, rest
    slot, _, parameter = rest.partition("/")
    return (state.outer if part == "outer" else state.inner).setdefault(slot, {}), parameter


@dataclass
class Snapshot:
    """What a donor hands out, as it stood at one step boundary."""

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
        self._closed = False

    async def serve(self, stream: Stream, request: StateRequest) -> None:
        """Send the header and the chunks that are asked for; raises `Unreachable` when the newcomer is lost."""
        refused = self._refuse(request, await self._round())
        if refused:
            await stream.send(Message(abort=refused), SILENCE_S)
            return
        async with self._making:
            snapshot = self._snapshot
            if snapshot is None or (request.snapshot_id != snapshot.header.snapshot_id and await self._stale(snapshot)):
                snapshot = self._snapshot = await self._take()
        begin = request.first_chunk if request.snapshot_id == snapshot.header.snapshot_id else 0
        snapshot.readers += 1
        try:
            await stream.send(Message(state_header=snapshot.header), SILENCE_S)
            for index in range(begin, len(snapshot.header.hashes)):
                payload = await asyncio.to_thread(snapshot.chunk, index)
                for first in range(0, len(payload), PIECE_BYTES):
                    if self._closed:
                        await stream.send(Message(abort=_STOPPING), SILENCE_S)
                        return
                    piece = StateChunk(index=index, payload=payload[first : first + PIECE_BYTES])
                    await stream.send(Message(state_chunk=piece), SILENCE_S)
                    snapshot.read_at_s = time.monotonic()
        finally:
            snapshot.readers -= 1

    def close(self) -> None:
        """Break off what is being read: this peer leaves."""
        self._closed = True
        self._snapshot = None

    def drop_unused(self) -> None:
        """Free a snapshot that nobody has read from lately."""
        if self._snapshot is not None and time.monotonic() - self._snapshot.read_at_s > SNAPSHOT_S:
            self._snapshot = None

    async def _round(self) -> int:
        return await self._boundary.visit(lambda state: state.round, SNAPSHOT_S)

    def _refuse(self, request: StateRequest, round: int) -> Abort | None:
        if request.protocol != PROTOCOL:
            return Abort(reason="protocol", detail=f"we speak protocol {PROTOCOL}; the older side must upgrade")
        if request.run_id != self._run.run_id:
            return Abort(reason="run", detail=f"this is run {self._run.run_id}; join with the same manifest")
        if request.round >= round:
            return Abort(reason="level", detail=f"we are at round {round}, no further than you")
        return None

    async def _stale(self, snapshot: Snapshot) -> bool:
        """Tell whether a snapshot is too old to begin with; one that is being read may lag a little, to save memory."""
        return await self._round() - snapshot.header.round > (
            self._run.exchange.max_lag // 2 if snapshot.readers else 0
        )

    async def _take(self) -> Snapshot:
        def copy(state: State) -> tuple[int, str, dict[str, Tensor]]:
            found = {}
            for name in layout(self._run, {name: tuple(tensor.shape) for name, tensor in state.anchor.items()}):
                tensors, key = place(state, name)
                # of tensors on a GPU .cpu() is the copy
                found[name] = tensors[key].clone() if tensors[key].device.type == "cpu" else tensors[key].cpu()
            return state.round, state.origin, found

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
