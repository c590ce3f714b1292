"""Who a peer is: an Ed25519 key on disk, and the peer id that follows from it.

HOME/identity.key has two lines of text: a fixed header, and the key's 32-byte seed in hexadecimal. Only its owner may
read it. Whoever has the file is the peer; whoever loses it becomes another one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from peer.errors import ConfigError

FILE_NAME = "identity.key"
HEADER = "peerloom identity v1"
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
_SEED = re.compile("[0-9a-f]{64}")
_LONGEST_FILE_BYTES = 4096


class Identity:
    """A peer's key; sign with it."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id_of(self.public_key)

    @classmethod
    def load(cls, home: Path) -> Identity:
        """Read HOME/identity.key, or make it if there is none.

        Raises `ConfigError` when it cannot be read or written, or isn't such a file: nothing is ever overwritten.
        """
        path = home / FILE_NAME
        try:
            return cls(_read(path))
        except FileNotFoundError:
            return cls(_make(path))

    def sign(self, payload: bytes) -> bytes:
        """Return the 64-byte signature over the payload."""
        return self._key.sign(payload)


def verify(public_key: bytes, payload: bytes, signature: bytes) -> bool:
    """Tell whether the signature over the payload was made with the public key's other half; never raises."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except InvalidSignature:
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """Return the first 20 bytes of the key's SHA-256 as 32 letters of lower-case base32."""
    return base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, all of it or none, with its folder; raises `ConfigError`."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ConfigError(f"Cannot write {path}: {error.strerror}. Choose another folder with --home.") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_FILE_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}. Give it back to its owner, or move it away."
        ) from error
    lines = data.decode("ascii", errors="replace").split("\n")
    if [line.rstrip("\r") for line in lines[2:]] not in ([], [""]) or lines[0].rstrip("\r") != HEADER:
        raise _unfit(path)
    if len(lines) < 2 or not _SEED.fullmatch(lines[1].rstrip("\r")):
        raise _unfit(path)
    return bytes.fromhex(lines[1])


def _unfit(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is empty, cut short or not an identity of peerloom: restore it from a copy, or move it away to start "
        "with a new identity."
    )


def _make(path: Path) -> bytes:
    seed = secrets.token_bytes(32)
    write_secret(path, f"{HEADER}\n{seed.hex()}\n".encode())
    return seed
