"""A frame's bytes, against protobuf's own reading and writing of the same message."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from peer.core.frame import Frame, Said, packed, unpacked
from peer.wire.peer_pb2 import Commit, Message, Offer, Progress
from peer.wire.peer_pb2 import Frame as Wire

frames = st.builds(
    Frame,
    leg=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    payload=st.one_of(st.binary(max_size=300), st.sampled_from([bytes(127), bytes(128), bytes(2**14), bytes(2**21)])),
    checksum=st.integers(0, 2**64 - 1),
)


def wire(frame: Frame) -> Message:
    """Return the message of proto/peer.proto that a frame is."""
    return Message(
        frame=Wire(leg=frame.leg, offset=frame.offset, payload=bytes(frame.payload), checksum=frame.checksum)
    )


def as_protobuf_reads(data: bytes) -> Said:
    message = Message.FromString(data)
    if not message.HasField("frame"):
        return message
    frame = message.frame
    return Frame(frame.leg, frame.offset, frame.payload, frame.checksum)


@given(frames)
def test_protobuf_reads_what_is_packed(frame: Frame) -> None:
    assert Message.FromString(packed(frame)) == wire(frame)


@given(frames)
def test_what_protobuf_writes_is_read(frame: Frame) -> None:
    assert unpacked(wire(frame).SerializeToString()) == frame


@given(frames)
def test_what_is_packed_is_read(frame: Frame) -> None:
    assert unpacked(packed(frame)) == frame


@pytest.mark.parametrize(
    "said", [Message(), Message(offer=Offer(round=7)), Message(commit=Commit()), Message(progress=Progress(bytes=9))]
)
def test_other_messages_are_protobufs_own(said: Message) -> None:
    assert packed(said) == said.SerializeToString()
    assert unpacked(packed(said)) == said


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_payload_may_come_in_any_buffer(kind: type) -> None:
    assert packed(Frame(1, 2, kind(b"payload"), 3)) == packed(Frame(1, 2, b"payload", 3))


def test_a_payload_that_is_read_is_a_view_of_what_came() -> None:
    data = packed(Frame(2, 10**6, bytes(10**6), 5))
    read = unpacked(data)
    assert isinstance(read, Frame)
    assert isinstance(read.payload, memoryview)
    assert read.payload.obj is data
    assert len(read.payload) == 10**6


damaged = st.one_of(
    st.tuples(frames, st.integers(0, 60), st.binary(min_size=1, max_size=12)).map(
        lambda drawn: packed(drawn[0])[: drawn[1]] + drawn[2] + packed(drawn[0])[drawn[1] + len(drawn[2]) :]
    ),
    st.tuples(frames, st.integers(0, 400)).map(lambda drawn: packed(drawn[0])[: drawn[1]]),
    st.tuples(frames, st.binary(max_size=40)).map(lambda drawn: packed(drawn[0]) + drawn[1]),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda rest: b"\x1a" + bytes([len(rest)]) + rest),
)


@given(damaged)
@example(b"\x1a\x13\x08\x81\x80\x80\x80\x10\x10\x00\x21" + bytes(8) + b"\x1a\x00")  # leg 2^32 + 1, which is cut to 1
@example(b"\x1a\x00")
@example(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x1a\x02\x08\x01")
def test_whatever_comes_is_read_as_protobuf_reads_it_or_refused_as_protobuf_refuses_it(data: bytes) -> None:
    try:
        expected = as_protobuf_reads(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            unpacked(data)
    else:
        assert unpacked(data) == expected


@pytest.mark.parametrize("at", range(40))
@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_no_single_wrong_byte_does_anything_else(at: int, value: int) -> None:
    data = bytearray(packed(Frame(3, 123456789, bytes(range(20)), 2**63 + 5)))
    data[at] = value
    try:
        expected = as_protobuf_reads(bytes(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            unpacked(bytes(data))
    else:
        assert unpacked(bytes(data)) == expected


def test_numbers_that_no_frame_has_are_not_packed() -> None:
    for offset in (-1, -(2**40)):
        with pytest.raises(ValueError, match="byte"):
            packed(Frame(1, offset, b"x", 0))
