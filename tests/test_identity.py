"""The key on disk, the peer id that follows from it, and signatures."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.identity import HEADER, Identity, peer_id_of, verify

# RFC 8032, section 7.1, test 2
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_keys_and_signatures_are_those_of_rfc_8032() -> None:
    identity = Identity(SEED)
    assert identity.public_key == PUBLIC
    assert identity.sign(b"\x72") == SIGNATURE
    assert verify(PUBLIC, b"\x72", SIGNATURE)


def test_the_peer_id_is_the_start_of_the_keys_hash_in_base32() -> None:
    peer_id = peer_id_of(PUBLIC)
    assert len(peer_id) == 32
    assert peer_id == peer_id.lower()
    assert base64.b32decode(peer_id.upper()) == hashlib.sha256(PUBLIC).digest()[:20]
    assert Identity(SEED).peer_id == peer_id


def test_an_identity_is_made_once_and_then_stays(tmp_path: Path) -> None:
    home = tmp_path / "not" / "there"
    first = Identity.load(home)
    second = Identity.load(home)
    assert first.peer_id == second.peer_id
    assert verify(second.public_key, b"payload", first.sign(b"payload"))
    assert Identity.load(tmp_path).peer_id != first.peer_id
    assert os.listdir(home) == ["identity.key"]


def test_only_its_owner_may_read_the_key(tmp_path: Path) -> None:
    Identity.load(tmp_path)
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600


def test_the_key_file_is_a_header_and_a_seed(tmp_path: Path) -> None:
    (tmp_path / "identity.key").write_text(f"{HEADER}\r\n{SEED.hex()}\r\n")  # an editor on Windows passed over it
    assert Identity.load(tmp_path).public_key == PUBLIC


GOOD = f"{HEADER}\n{SEED.hex()}\n".encode()
PEM = Ed25519PrivateKey.from_private_bytes(SEED).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        GOOD[:-2],
        GOOD[: len(HEADER) + 1],
        GOOD[: len(HEADER)],
        PEM,
        SEED,
        b"\xff" * 9000,
        GOOD + b"more",
        b"\n" + GOOD,
    ],
    ids=["empty", "cut", "header", "headless", "pem", "raw", "binary", "longer", "shifted"],
)
def test_a_file_that_is_no_identity_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Identity.load(tmp_path)
    assert str(path) in str(caught.value)
    assert "move it away" in str(caught.value)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "identity.key").mkdir()
    with pytest.raises(ConfigError, match=r"Cannot read .*identity\.key"):
        Identity.load(tmp_path)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"identity\.key"):
        Identity.load(tmp_path / "file" / "home")


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_verifying_anything_else_is_false_and_never_raises(key: bytes, payload: bytes, signature: bytes) -> None:
    assert not verify(key, payload, signature)
    assert not verify(PUBLIC, payload, signature)
    assert not verify(key, b"\x72", SIGNATURE)
    assert verify(PUBLIC, payload, SIGNATURE) == (payload == b"\x72")
