"""A leg of an exchange: one long string of bytes, the parts of all tensors, cut into frames anywhere."""

from __future__ import annotations

from collections import deque

import numpy as np

from peer.core.frame import Buffer, Frame
from peer.errors import ProtocolError

FRAME_BYTES = 1024 * 1024
"""No frame is larger."""


def checksum(payload: Buffer) -> int:
    """Return the sum of the payload's little-endian 64-bit words modulo 2^64, the last one filled up with zeros."""
    view = memoryview(payload)
    whole = len(view) & ~7
    total = int(np.frombuffer(view[:whole], "<u8").sum(dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(view[whole:], "little")) % 2**64


def framed(leg: int, offset: int, payload: Buffer) -> Frame:
    """Return a frame with its checksum."""
    return Frame(leg, offset, payload, checksum(payload))


class Inbox:
    """One incoming leg: frames in, whole parts out, in order.

    ready: parts that have arrived, with their numbers; a part that came as one frame is that frame's own memory. One
    thread may `take` while another one asks for the `next`.
    """

    def __init__(self, leg: int, sizes: list[int]) -> None:
        self.leg = leg
        self.ready: deque[tuple[int, Buffer]] = deque()
        self._sizes = sizes
        self._ready_bytes, self._read_bytes = 0, 0
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

    @property
    def ready_bytes(self) -> int:
        """Bytes of the parts that are ready."""
        return self._ready_bytes - self._read_bytes

    def next(self) -> tuple[int, Buffer]:
        """Return the next part that is ready, and its number."""
        index, part = self.ready.popleft()
        self._read_bytes += len(part)
        return index, part

    def take(self, frame: Frame) -> None:
        """Accept the leg's next frame; raises `ProtocolError` on any other one."""
        view = memoryview(frame.payload)
        if frame.leg != self.leg:
            raise ProtocolError("malformed", f"a frame of leg {frame.leg} where leg {self.leg} was due")
        if frame.offset != self._offset:
            raise ProtocolError("out-of-order", f"a frame at byte {frame.offset} where byte {self._offset} was due")
        if not 0 < len(view) <= FRAME_BYTES or self._offset + len(view) > self._end:
            raise ProtocolError("oversized", f"a frame of {len(view)} bytes, {self._end - self._offset} were left")
        if checksum(view) != frame.checksum:
            raise ProtocolError("checksum", f"the frame at byte {frame.offset} arrived damaged")
        self._offset += len(view)
        while view:
            size = self._sizes[self._index]
            if not self._filled and len(view) >= size:
                self._finish(view[:size])
                view = view[size:]
                continue
            if not self._filled:
                self._part = bytearray(size)
            piece = view[: size - self._filled]
            self._part[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == size:
                self._finish(self._part)
                self._part = bytearray()

    def _finish(self, part: Buffer) -> None:
        self._ready_bytes += len(part)
        self.ready.append((self._index, part))
        self._filled = 0
        self._index += 1
        self._skip_empty()

    def _skip_empty(self) -> None:
        while self._index < len(self._sizes) and self._sizes[self._index] == 0:
            self._index += 1


class Outbox:
    """One outgoing leg: parts in, frames out. One thread may `put` while another one takes."""

    def __init__(self, leg: int) -> None:
        self.leg = leg
        self._put_bytes = 0
        self._offset = 0
        self._waiting: deque[memoryview] = deque()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._put_bytes - self._offset

    def put(self, part: Buffer) -> None:
        """Add a part, which nobody may change any more."""
        if len(part):
            self._put_bytes += len(part)
            self._waiting.append(memoryview(part))

    def take(self, most_bytes: int) -> Frame | None:
        """Return the next frame, of at most so many bytes: part of a large part, or several small ones together."""
        if not self._waiting:
            return None
        first = self._waiting.popleft()
        if len(first) > most_bytes:
            self._waiting.appendleft(first[most_bytes:])
            return self._cut(first[:most_bytes])
        together, size = [first], len(first)
        while self._waiting and size + len(self._waiting[0]) <= most_bytes:
            together.append(self._waiting.popleft())
            size += len(together[-1])
        return self._cut(first if len(together) == 1 else memoryview(b"".join(together)))

    def _cut(self, payload: memoryview) -> Frame:
        frame = framed(self.leg, self._offset, payload)
        self._offset += len(payload)
        return frame
