"""A frame: one piece of a leg, and its bytes on the wire.

On the wire it is the protobuf message `Message { frame }` of proto/peer.proto, like any other. Frames carry nearly all
bytes of a meeting, and protobuf copies a payload twice on its way out and twice on its way in; here it is copied once
on its way out and not at all on its way in.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from peer.wire.peer_pb2 import Message

_MESSAGE_FRAME = 0x1A  # Message.frame: field 3, bytes
_LEG, _OFFSET, _CHECKSUM, _PAYLOAD = 0x08, 0x10, 0x21, 0x1A


Buffer = bytes | bytearray | memoryview
"""What bytes come in."""


@dataclass(frozen=True)
class Frame:
    """A piece of a leg. offset: of its first byte in the leg. checksum: see `peer.core.legs.checksum`."""

    leg: int
    offset: int
    payload: Buffer
    checksum: int


Said = Message | Frame
"""What goes over a stream."""


def packed(said: Said) -> bytes:
    """Return what goes over the wire."""
    if not isinstance(said, Frame):
        return said.SerializeToString()
    payload = memoryview(said.payload)
    inner = b"".join(
        (
            bytes((_LEG,)),
            _varint(said.leg),
            bytes((_OFFSET,)),
            _varint(said.offset),
            bytes((_CHECKSUM,)),
            struct.pack("<Q", said.checksum),
            bytes((_PAYLOAD,)),
            _varint(len(payload)),
        )
    )
    return b"".join((bytes((_MESSAGE_FRAME,)), _varint(len(inner) + len(payload)), inner, payload))


def unpacked(data: bytes) -> Said:
    """Read what came over the wire; raises protobuf's `DecodeError`. A frame's payload is a view of data."""
    if data[:1] == bytes((_MESSAGE_FRAME,)):
        found = _frame(data)
        if found is not None:
            return found
    message = Message.FromString(data)
    if message.WhichOneof("body") != "frame":
        return message
    frame = message.frame
    return Frame(frame.leg, frame.offset, frame.payload, frame.checksum)


def _frame(data: bytes) -> Frame | None:
    """Read a frame in the order in which `packed` writes it; None for anything else, which is protobuf's to read."""
    try:
        size, at = _read(data, 1)
        if at + size != len(data) or data[at] != _LEG:
            return None
        leg, at = _read(data, at + 1)
        if data[at] != _OFFSET:
            return None
        offset, at = _read(data, at + 1)
        if data[at] != _CHECKSUM or data[at + 9] != _PAYLOAD:
            return None
        (total,) = struct.unpack_from("<Q", data, at + 1)
        size, at = _read(data, at + 10)
    except (IndexError, struct.error):
        return None
    if leg >= 2**32 or at + size != len(data):
        return None
    return Frame(leg, offset, memoryview(data)[at:], total)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and where it ends; raises IndexError where it doesn't."""
    value = 0
    for shift in range(0, 63, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise IndexError("the number is too long")
