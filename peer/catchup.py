"""Fetch State from another peer.

A newcomer, or a peer that was away for too long, gets a donor's anchor, outer memory and round; it goes on with
weights = anchor. Of the inner optimizer it gets the low-rank part; AdamW's moments, which are as large as the model
again, begin anew. Every chunk is hashed, and nothing is used before all of it is there and fits.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from math import prod

import torch

from peer.core.members import Member, donors
from peer.core.state import Cursor, State
from peer.donor import CHUNK_BYTES, PROTOCOL, SILENCE_S, SNAPSHOT_S, layout, place
from peer.errors import ProtocolError, Unreachable
from peer.events import CatchUp, EventLog, Skip
from peer.lordo import flaw_of
from peer.manifest import Manifest
from peer.net.base import Network, Stream
from peer.wire.peer_pb2 import Message, StateChunk, StateHeader, StateRequest

DIAL_S = 5.0
DONORS = 8
"""So many are asked at most; when the most advanced of them are no further than we are, the others hardly will be."""
TRIES_PER_DONOR = 3
TELL_S = 2.0


class Newcomer:
    """A peer that looks for somebody to take State from."""

    def __init__(
        self,
        network: Network,
        run: Manifest,
        shapes: dict[str, tuple[int, ...]],
        me: str,
        events: EventLog,
        say: Callable[[str], None],
    ) -> None:
        self._network, self._run, self._shapes, self._me = network, run, shapes, me
        self._events, self._say = events, say
        self._told_s = 0.0

    async def fetch(self, members: Sequence[Member], round: int, origin: str | None) -> tuple[State, str] | None:
        """Return the State of the most advanced peer that is further than `round` and gives it, and that peer's id.

        None if there is none.

        origin: this peer's; a State with another one is refused. A peer that has none yet (None) takes the donor's.
        """
        # a record's round is some seconds old, so a newcomer asks even those that seem to be no further
        for donor in donors(members, self._me, -1 if origin is None else round)[:DONORS]:
            state = await self._fetch_from(donor, Download(self._run, self._shapes, origin, round, self._me))
            if state is not None:
                return state, donor.peer_id
        return None

    async def _fetch_from(self, donor: Member, download: Download) -> State | None:
        began = time.monotonic()
        for attempt in range(TRIES_PER_DONOR):
            try:
                state = await download.run(self._network, donor, self._tell)
            except Unreachable as error:
                self._give_up(donor, str(error))
                await asyncio.sleep(0.5 * (attempt + 1))
            except ProtocolError as error:
                if error.reason != "level":
                    self._give_up(donor, str(error))
                return None
            else:
                seconds = time.monotonic() - began
                self._events.write(CatchUp(donor.peer_id, state.round, download.size_bytes, seconds))
                return state
        return None

    def _tell(self, donor: Member, done_bytes: int, size_bytes: int) -> None:
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            self._say(f"catching up from {donor.peer_id[:8]}: {done_bytes / 1e6:.0f} of {size_bytes / 1e6:.0f} MB")

    def _give_up(self, donor: Member, why: str) -> None:
        self._events.write(Skip(donor.peer_id, "failed", "catch-up", why))


Progress = Callable[[Member, int, int], None]
"""Hears the donor, bytes so far, bytes in all."""


class Download:
    """A State on its way from one donor; a cut stream goes on where it stopped, while the donor keeps the snapshot."""

    def __init__(
        self, run: Manifest, shapes: dict[str, tuple[int, ...]], origin: str | None, round: int, me: str
    ) -> None:
        self._run, self._origin, self._round, self._me = run, origin, round, me
        self._expected = layout(run, shapes)
        self.size_bytes = sum(4 * prod(shape) for shape in self._expected.values())
        self._header = StateHeader()
        self._buffer = bytearray()
        self._chunk = bytearray()
        self._next = 0

    async def run(self, network: Network, donor: Member, progress: Progress) -> State:
        """Fetch what is missing; raises `Unreachable` (try again) or `ProtocolError` (don't)."""
        stream = await network.dial(donor.addresses[0], DIAL_S)
        try:
            request = StateRequest(
                protocol=PROTOCOL,
                run_id=self._run.run_id,
                peer_id=self._me,
                round=self._round,
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
        if not isinstance(message, Message):
            raise ProtocolError("malformed", "the donor sent a frame, which belongs to meetings")
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
        if header.round <= self._round:
            raise ProtocolError("malformed", f"the donor's State is of round {header.round}, no further than ours")
        if header.snapshot_id != self._header.snapshot_id:
            self._buffer, self._next = bytearray(), 0
        self._header, self._chunk = header, bytearray()

    def _take(self, chunk: StateChunk) -> None:
        if chunk.index != self._next:
            raise ProtocolError("out-of-order", f"chunk {chunk.index} where {self._next} was due")
        expected = min(CHUNK_BYTES, self.size_bytes - self._next * CHUNK_BYTES)
        self._chunk += chunk.payload
        if not chunk.payload or len(self._chunk) > expected:
            raise ProtocolError("oversized", f"a piece of {len(chunk.payload)} bytes does not fit chunk {chunk.index}")
        if len(self._chunk) < expected:
            return
        if hashlib.sha256(self._chunk).digest() != self._header.hashes[self._next]:
            raise ProtocolError("checksum", f"chunk {chunk.index} does not match its hash")
        self._buffer += self._chunk
        self._chunk = bytearray()
        self._next += 1

    def _state(self) -> State:
        state, offset = State({}, {}, {}, {}, self._header.round, 0, Cursor(), self._header.origin), 0
        for name, shape in self._expected.items():
            count = prod(shape)
            tensor = torch.frombuffer(self._buffer, dtype=torch.float32, count=count, offset=offset).view(shape)
            if not bool(torch.isfinite(tensor).all()):
                raise ProtocolError("non-finite", f"the donor's {name} is not finite")
            tensors, key = place(state, name)
            tensors[key] = tensor
            offset += 4 * count
        if flaw := flaw_of(state.inner):
            raise ProtocolError("malformed", f"the donor's inner optimizer is none: {flaw}")
        state.weights = state.anchor
        return state
