"""A text corpus as one long row of tokens, of which the last twentieth is held out."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from peer.data import texts
from peer.errors import ConfigError
from peer.models.tokenizer import Tokenizer

Tokens = NDArray[np.unsignedinteger[Any]]
Progress = Callable[[str], None]

BUILT_IN = "moby-dick"
HELDOUT_SHARE = 0.05
HELDOUT_LEAST = 1025
"""Tokens: one sequence of GPT-2's length and the token after it."""

_FORMAT = "1"
"""Part of the names of kept tokens; change it when the same text gives other tokens."""

_NEWS_EVERY_S = 3.0


@dataclass(frozen=True)
class Corpus:
    """train and heldout: token ids, (n,) uint16 or uint32, memory-mapped when a cache was given; they don't overlap."""

    train: Tokens
    heldout: Tokens


def load(source: str | None, tokenizer: Tokenizer, cache: Path | None, progress: Progress | None = None) -> Corpus:
    """Return a corpus's tokens; every document is followed by the tokenizer's end-of-text.

    source: "moby-dick" (which comes along; None is the same), or a text file, a folder of them or a glob, as
    `peer.data.texts` reads them. cache: a folder that keeps the tokens, by content and tokenizer, for the next start.
    progress: called with a sentence every few seconds, and when bytes had to be replaced.
    Raises ConfigError when the source is missing, unreadable or too small, or the cache can't be written.
    """
    name = source or BUILT_IN
    files = [Path(__file__).with_name("assets") / "moby-dick.txt.gz"] if name == BUILT_IN else texts.find(name)
    note = progress or _silent
    pieces = _tokenize(files, tokenizer, note)
    if cache is None:
        return _split(np.concatenate([np.empty(0, tokenizer.dtype), *pieces]), name)
    content = texts.fingerprint(files, _Pulse(note))
    path = cache / f"tokens-{_FORMAT}-{content[:32]}-{tokenizer.fingerprint[:16]}.npy"
    kept = _kept(path, tokenizer)
    return _split(_keep(pieces, path, tokenizer) if kept is None else kept, name)


class _Pulse:
    """Passes on a sentence every few seconds at most, and none before that."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last_s = time.monotonic()

    def __call__(self, sentence: str) -> None:
        if time.monotonic() - self._last_s >= _NEWS_EVERY_S:
            self._last_s = time.monotonic()
            self._progress(sentence)


def _silent(_: str) -> None:
    pass


def _tokenize(files: list[Path], tokenizer: Tokenizer, note: Progress) -> Iterator[Tokens]:
    end = np.array([tokenizer.end_of_text], tokenizer.dtype)
    pulse = _Pulse(note)
    count = 0
    for path in files:
        for piece in texts.read(path, note):
            tokens = end if piece is None else tokenizer.encode(piece)
            count += len(tokens)
            pulse(f"reading data '{path}': {count / 1e6:.1f} million tokens so far")
            yield tokens


def _split(tokens: Tokens, name: str) -> Corpus:
    least = 2 * HELDOUT_LEAST
    if len(tokens) < least:
        raise ConfigError(
            f"data '{name}' is too small: it has {len(tokens)} tokens and {least} are needed; give more text"
        )
    cut = len(tokens) - max(HELDOUT_LEAST, int(len(tokens) * HELDOUT_SHARE))
    return Corpus(tokens[:cut], tokens[cut:])


def _kept(path: Path, tokenizer: Tokenizer) -> Tokens | None:
    """Map a kept row of tokens; None when there is none, or it is not as it was written."""
    offset = len(_header(tokenizer, 0))
    try:
        count = (path.stat().st_size - offset) // np.dtype(tokenizer.dtype).itemsize
        with path.open("rb") as file:
            whole = count > 0 and file.read(offset) == _header(tokenizer, count)
    except OSError:
        return None
    return np.memmap(path, tokenizer.dtype, "r", offset, (count,)) if whole else None


def _keep(pieces: Iterator[Tokens], path: Path, tokenizer: Tokenizer) -> Tokens:
    """Write tokens as they come, under another name until they are whole, and map them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
            try:
                _write(pieces, file, tokenizer)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot keep tokens in '{path.parent}': {error.strerror}; free space there or allow writing"
        ) from error
    kept = _kept(path, tokenizer)
    return np.empty(0, tokenizer.dtype) if kept is None else kept


def _write(pieces: Iterator[Tokens], file: IO[bytes], tokenizer: Tokenizer) -> None:
    file.write(_header(tokenizer, 0))
    count = 0
    for piece in pieces:
        file.write(piece.tobytes())
        count += len(piece)
    # The count is known only now.
    file.seek(0)
    file.write(_header(tokenizer, count))
    file.flush()
    os.fsync(file.fileno())


def _header(tokenizer: Tokenizer, count: int) -> bytes:
    # As of a .npy file; numpy leaves room for the count to grow, so the length is always the same.
    header = io.BytesIO()
    form = {"descr": np.dtype(tokenizer.dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, form)
    return header.getvalue()
