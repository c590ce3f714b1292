"""A leg of an exchange: one long string of bytes, the parts of all tensors, cut into frames anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

from peer.errors import ProtocolError
from peer.wire.peer_pb2 import Frame, Message

FRAME_BYTES = 512 * 1024
MAX_FRAME_BYTES = 1024 * 1024


class Inbox:
    """One incoming leg: frames in, whole parts out, in order. Takes no more memory than the part it is in."""

    def __init__(self, leg: int, sizes: list[int]) -> None:
        self.leg = leg
        self.ready: list[tuple[int, bytearray]] = []
        self._sizes = sizes
        self._offset = 0
        self._end = sum(sizes)
        self._index = 0
        self._part = bytearray()
        self._filled = 0
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether the whole leg has arrived."""
        return self._offset == self._end

    def take(self, frame: Frame) -> None:
        """Accept the leg's next frame; raises `ProtocolError` on any other one."""
        payload = frame.payload
        if frame.leg != self.leg:
            raise ProtocolError("malformed", f"a frame of leg {frame.leg} where leg {self.leg} was due")
        if frame.offset != self._offset:
            raise ProtocolError("out-of-order", f"a frame at byte {frame.offset} where byte {self._offset} was due")
        if not 0 < len(payload) <= MAX_FRAME_BYTES or self._offset + len(payload) > self._end:
            raise ProtocolError("oversized", f"a frame of {len(payload)} bytes, {self._end - self._offset} were left")
        if crc32(payload) != frame.checksum:
            raise ProtocolError("checksum", f"the frame at byte {frame.offset} arrived damaged")
        self._offset += len(payload)
        view = memoryview(payload)
        while view:
            if not self._filled:
                self._part = bytearray(self._sizes[self._index])
            piece = view[: len(self._part) - self._filled]
            self._part[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == len(self._part):
                self.ready.append((self._index, self._part))
                self._filled = 0
                self._index += 1
                self._skip_empty()

    def _skip_empty(self) -> None:
        while self._index < len(self._sizes) and self._sizes[self._index] == 0:
            self._index += 1


class Outbox:
    """One outgoing leg: parts in, frames of even size out."""

    def __init__(self, leg: int) -> None:
        self.leg = leg
        self._offset = 0
        self._rest = bytearray()

    def put(self, part: bytes | bytearray) -> Iterator[Message]:
        """Add a part; yield the frames that are full."""
        view = memoryview(part)
        if self._rest:
            missing = FRAME_BYTES - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) == FRAME_BYTES:
                yield from self.flush()
        while len(view) >= FRAME_BYTES:
            yield self._frame(bytes(view[:FRAME_BYTES]))
            view = view[FRAME_BYTES:]
        self._rest += view

    def flush(self) -> Iterator[Message]:
        """Yield what is left as one frame."""
        if self._rest:
            rest, self._rest = bytes(self._rest), bytearray()
            yield self._frame(rest)

    def _frame(self, payload: bytes) -> Message:
        frame = Frame(leg=self.leg, offset=self._offset, payload=payload, checksum=crc32(payload))
        self._offset += len(payload)
        return Message(frame=frame)
