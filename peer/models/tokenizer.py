"""Text ⇄ token ids. Two tokenizers come along (bytes, GPT-2's BPE); any other is read from its tokenizer.json."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from peer.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
Ids = NDArray[np.unsignedinteger[Any]]

_ASSETS = Path(__file__).with_name("assets")
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""What ends a text in tokenizers that don't say."""

_PIECE = 1 << 16
"""Characters that go through the tokenizer at a time; what it holds in memory is some hundred bytes for each."""

_PIECES = 64
"""Pieces in one batch, over which the tokenizer's threads spread."""

_GAP = re.compile(r"\w(?=[ \n])")
_LAST_GAP = re.compile(r".*\w(?=[ \n])", re.DOTALL)


class Tokenizer:
    """One tokenizer. Text that reads like its end-of-text token becomes that token.

    end_of_text: that token's id. vocabulary_size: the highest id and one. fingerprint: SHA-256, in hex, of what decides
    how text is cut. dtype: what ids are returned in, uint16 if they fit, else uint32.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: str, origin: bytes) -> None:
        # origin: what it was made of. Not what the library writes of it, which may change from version to version.
        self._backend = backend
        self._end = end_of_text
        self.fingerprint = hashlib.sha256(end_of_text.encode() + b"\0" + origin).hexdigest()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.end_of_text: int = vocabulary[end_of_text]
        self.vocabulary_size: int = 1 + max(vocabulary.values())
        self.dtype: type[np.unsignedinteger[Any]] = np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32

    def encode(self, text: str) -> Ids:
        """Return a text's token ids, with nothing added at its ends, as uint16 if they fit, else as uint32."""
        parts = [np.empty(0, self.dtype)]
        pieces = _pieces(text)
        while batch := list(itertools.islice(pieces, _PIECES)):
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            parts += [np.asarray(each.ids, self.dtype) for each in encodings]
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special ones spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode([int(each) for each in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write the files that transformers.AutoTokenizer.from_pretrained(folder) loads without a network."""
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._end,
            "eos_token": self._end,
            "clean_up_tokenization_spaces": False,  # in transformers 4 it joins "a ." to "a."
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load(name: str) -> Tokenizer:
    """Return the tokenizer "bytes" or "gpt2", or the one in a tokenizer.json (or in a folder that holds one).

    Raises ConfigError when there is no such tokenizer, or when it can't be read.
    """
    if name == "bytes":
        return Tokenizer(_byte_level(_bytes(), use_regex=False), END_OF_TEXT, name.encode())
    if name == "gpt2":
        # By hand, since transformers' GPT2TokenizerFast silently makes an empty tokenizer of these two files.
        model = models.BPE.from_file(str(_ASSETS / "encoder.json"), str(_ASSETS / "vocab.bpe"))
        return Tokenizer(_byte_level(model, use_regex=True), END_OF_TEXT, name.encode())
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"unknown tokenizer '{name}'; give bytes, gpt2, or the path of a tokenizer.json")
    return _from_file(path)


def last_gap(text: str) -> int:
    """Return where a text can be cut latest without changing its tokens; its length when there is no such place near.

    That is between a word and the white space after it: none of GPT-2's rules takes, or looks at, both.
    """
    found = _LAST_GAP.match(text, max(0, len(text) - _PIECE))
    return found.end() if found else len(text)


def _bytes() -> models.BPE:
    # ByteLevel writes each byte as one printable character; a byte's id is its value.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return models.BPE(vocab={character: byte for byte, character in characters.items()}, merges=[])


def _byte_level(model: models.BPE, use_regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _from_file(path: Path) -> Tokenizer:
    try:
        raw = path.read_bytes()
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except OSError as error:
        raise ConfigError(f"cannot read tokenizer '{path}': {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower, whatever it does not like
        raise ConfigError(f"'{path}' is no tokenizer ({error}); give a tokenizer.json") from error
    backend.no_truncation()
    backend.no_padding()
    end = _declared_end(path.with_name("tokenizer_config.json"))
    known = [each for each in (end, *_ENDS) if each is not None and backend.token_to_id(each) is not None]
    if not known:
        raise ConfigError(
            f"tokenizer '{path}' has no end-of-text token; name it as eos_token in tokenizer_config.json beside it"
        )
    return Tokenizer(backend, known[0], raw)


def _declared_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        end = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _pieces(text: str) -> Iterator[str]:
    # Cut as last_gap says.
    start = 0
    while len(text) - start > _PIECE:
        gap = _GAP.search(text, start + _PIECE - 1)
        if gap is None:
            break
        yield text[start : gap.end()]
        start = gap.end()
    if start < len(text):
        yield text[start:]
