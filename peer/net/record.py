"""A Member as signed bytes, which is how it travels through the DHT and lies on strangers' disks.

Layout: SignedRecord in proto/peer.proto. Nothing is believed before all of it was checked, and everything is bounded.
"""

from __future__ import annotations

import math
import re

from google.protobuf.message import DecodeError

from peer.errors import ProtocolError
from peer.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from peer.net.addresses import parse_address
from peer.net.base import Member
from peer.wire.peer_pb2 import Record, SignedRecord

PROTOCOL = 1
DOMAIN = b"peerloom record v1\0"
MAX_RECORD_BYTES = 2048
MAX_ADDRESSES = 8
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def sign(member: Member, identity: Identity) -> bytes:
    """Return the member's record, signed; raises `ProtocolError` for one that `open_record` would refuse."""
    record = Record(
        protocol=PROTOCOL,
        run_id=member.run_id,
        peer_id=member.peer_id,
        addresses=member.addresses,
        round=member.round,
        shard=member.shard,
        expires_s=member.expires_s,
    ).SerializeToString()
    signed = SignedRecord(
        record=record, public_key=identity.public_key, signature=identity.sign(DOMAIN + record)
    ).SerializeToString()
    open_record(signed)
    return signed


def open_record(data: bytes) -> Member:
    """Return what a signed record says, having checked all that can be checked without a clock.

    A record without addresses is a withdrawal. Raises `ProtocolError` on anything else that isn't in order.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError("bad-record", f"it has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        signed = SignedRecord.FromString(data)
        record = Record.FromString(signed.record)
    except DecodeError as error:
        raise ProtocolError("bad-record", "it cannot be decoded") from error
    if len(signed.public_key) != PUBLIC_KEY_BYTES or len(signed.signature) != SIGNATURE_BYTES:
        raise ProtocolError("bad-record", "its key or signature has the wrong length")
    if record.peer_id != peer_id_of(signed.public_key):
        raise ProtocolError("bad-record", "its peer id isn't its key's")
    if not verify(signed.public_key, DOMAIN + signed.record, signed.signature):
        raise ProtocolError("bad-record", "its signature is wrong")
    _check(record)
    return Member(record.run_id, record.peer_id, tuple(record.addresses), record.round, record.shard, record.expires_s)


def _check(record: Record) -> None:
    if record.protocol != PROTOCOL:
        raise ProtocolError("bad-record", f"it is of version {record.protocol}, not {PROTOCOL}")
    if not _RUN_ID.fullmatch(record.run_id):
        raise ProtocolError("bad-record", "its run id isn't one")
    if not (math.isfinite(record.expires_s) and record.expires_s > 0):
        raise ProtocolError("bad-record", "it has no end")
    if len(record.addresses) > MAX_ADDRESSES:
        raise ProtocolError("bad-record", f"it has {len(record.addresses)} addresses, more than {MAX_ADDRESSES}")
    for address in record.addresses:
        try:
            parse_address(address)
        except ValueError as error:
            raise ProtocolError("bad-record", str(error)) from error
