"""Text files on disk: which there are, what is in them, and their fingerprint."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from peer.errors import ConfigError
from peer.models.tokenizer import last_gap

ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
"""What counts as text in a folder; a file that is named itself may have any name."""

_CHUNK = 1 << 22
"""Bytes, or characters, read at a time."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def find(source: str) -> list[Path]:
    """Return the files that a path or a glob means, sorted; of a folder, all with one of ENDINGS, at any depth.

    Raises ConfigError when there are none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.name.lower().endswith(ENDINGS) and each.is_file())
        if not inside:
            raise ConfigError(f"data folder '{source}' holds no text; put files there that end in {', '.join(ENDINGS)}")
        return inside
    if path.exists():
        return [path]
    matches = sorted(each for each in map(Path, glob.glob(str(path), recursive=True)) if each.is_file())
    if not matches:
        raise ConfigError(f"there is no data at '{source}'; give a text file, a folder of them, a glob, or moby-dick")
    return matches


def fingerprint(files: list[Path], pulse: Callable[[str], None]) -> str:
    """Return the SHA-256, in hex, of the files' bytes and of how each is to be read; their names don't matter.

    pulse is called with a sentence at every chunk. Raises ConfigError when one can't be read.
    """
    digest = hashlib.sha256()
    for path in files:
        own = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    own.update(chunk)
                    pulse(f"looking through data '{path}': {file.tell() / 1e6:.0f} MB so far")
        except OSError as error:
            raise ConfigError(f"cannot read data '{path}': {error.strerror}") from error
        digest.update(own.digest() + bytes([_is_gzip(path), _is_jsonl(path)]))
    return digest.hexdigest()


def read(path: Path, note: Callable[[str], None]) -> Iterator[str | None]:
    """Yield a file's text in pieces, None after each document: a file is one, a line of .jsonl with a "text" is one.

    What is no UTF-8 becomes U+FFFD, and note is called with a sentence about it.
    Raises ConfigError when the file can't be read or isn't what its name says.
    """
    replaced = 0
    try:
        with _open(path) as file:
            for piece in _lines(file, path) if _is_jsonl(path) else _plain(file):
                clean, count = _SURROGATE.subn("\ufffd", piece or "")
                replaced += count
                yield clean if piece is not None else None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"data '{path}' is no whole gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise ConfigError(f"cannot read data '{path}': {error.strerror}") from error
    if replaced:
        note(f"data '{path}' is not all UTF-8: {replaced} characters were read as U+FFFD; save it as UTF-8")


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _is_jsonl(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".jsonl")


def _open(path: Path) -> TextIO:
    # surrogateescape marks every undecodable byte, so that they can be counted and told from a U+FFFD in the text.
    if _is_gzip(path):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="surrogateescape")
    return path.open(encoding="utf-8-sig", errors="surrogateescape")


def _plain(file: TextIO) -> Iterator[str | None]:
    rest, empty = "", True
    while chunk := file.read(_CHUNK):
        empty = False
        rest += chunk
        cut = last_gap(rest)
        yield rest[:cut]
        rest = rest[cut:]
    yield rest
    if not empty:
        yield None


def _lines(file: TextIO, path: Path) -> Iterator[str | None]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"data '{path}', line {number}, is not JSON: {error}") from error
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"data '{path}', line {number}, has no \"text\"; every line must be an object with one")
        if text:
            yield text
            yield None
