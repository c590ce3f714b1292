"""Signed records: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.identity import Identity
from peer.net.base import Member
from peer.net.record import DOMAIN, MAX_RECORD_BYTES, open_record, sign
from peer.wire.peer_pb2 import Record, SignedRecord

ME = Identity(bytes(range(32)))
OTHER = Identity(bytes(32))
MEMBER = Member("run-1", ME.peer_id, ("203.0.113.5:7700", "[2001:db8::5]:7700"), 3, 4, 1.8e9)


def signed(identity: Identity = ME, domain: bytes = DOMAIN, **fields: object) -> bytes:
    """Return a record that is correctly signed, whatever it says."""
    record = Record(protocol=1, run_id="run-1", peer_id=ME.peer_id, addresses=MEMBER.addresses, expires_s=1.8e9)
    record.MergeFrom(Record(**fields))  # type: ignore[arg-type]
    data = record.SerializeToString()
    signature = identity.sign(domain + data)
    return SignedRecord(record=data, public_key=identity.public_key, signature=signature).SerializeToString()


HOSTS = st.sampled_from(["203.0.113.5:1", "peer.example.org:65535", "[2001:db8::5]:7700"])


@given(
    st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True),
    st.lists(HOSTS, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.floats(1e-300, 1e300),
)
def test_what_is_signed_is_read_back(run_id: str, hosts: list[str], round: int, shard: int, expires_s: float) -> None:
    member = Member(run_id, ME.peer_id, tuple(hosts), round, shard, expires_s)
    assert open_record(sign(member, ME)) == member


@given(st.binary(max_size=MAX_RECORD_BYTES + 10))
def test_any_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_record(data)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_can_be_changed_unnoticed(position: int, change: int) -> None:
    data = bytearray(sign(MEMBER, ME))
    data[position % len(data)] ^= change
    with contextlib.suppress(ProtocolError):
        assert open_record(bytes(data)) == MEMBER, "only bytes that mean nothing may change"


@given(st.integers(0, 10_000))
def test_no_part_of_a_record_is_one(length: int) -> None:
    data = sign(MEMBER, ME)
    with pytest.raises(ProtocolError):
        open_record(data[: length % len(data)])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (signed(OTHER), "peer id isn't its key's"),
        (signed(domain=b"another protocol\0"), "signature is wrong"),
        (signed(protocol=2), "version 2"),
        (signed(run_id="run/1"), "run id"),
        (signed(run_id="r" * 129), "run id"),
        (signed(addresses=["a:1"] * 7), "9 addresses"),
        (signed(addresses=["203.0.113.5"]), "not host:port"),
        (signed(addresses=["unix:/var/run/docker.sock"]), "not host:port"),
        (signed(addresses=["203.0.113.5:0"]), "not host:port"),
        (signed(expires_s=math.inf), "no end"),
        (signed(expires_s=math.nan), "no end"),
        (signed(expires_s=-1.0), "no end"),
        (signed(addresses=["x" * 250 + ":1"] * 6 + ["y" * 900]), "more than 2048"),
        (SignedRecord(record=b"\xff", public_key=bytes(32), signature=bytes(64)).SerializeToString(), "decoded"),
        (SignedRecord(record=b"", public_key=bytes(31), signature=bytes(64)).SerializeToString(), "wrong length"),
        (SignedRecord(record=b"", public_key=bytes(32), signature=b"").SerializeToString(), "wrong length"),
    ],
)
def test_a_record_that_is_not_in_order_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_record(data)
    assert caught.value.reason == "bad-record"
    assert why in str(caught.value)


def test_only_ones_own_record_can_be_signed() -> None:
    with pytest.raises(ProtocolError, match="peer id isn't its key's"):
        sign(replace(MEMBER, peer_id=OTHER.peer_id), ME)


def test_the_largest_record_that_is_allowed_fits() -> None:
    hosts = tuple(f"{'a' * 50}.{'b' * 50}.example{i}:65535" for i in range(8))
    member = Member("r" * 128, ME.peer_id, hosts, 2**64 - 1, 2**32 - 1, 1.8e9)
    assert open_record(sign(member, ME)) == member
