"""Text to tokens and back."""

from __future__ import annotations

import functools
import gzip
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from peer.errors import ConfigError
from peer.models import tokenizer
from peer.models.tokenizer import Tokenizer, last_gap

load = functools.cache(tokenizer.load)

AWKWARD = [
    "",
    " ",
    "\n\n",
    " Hello , world ! don 't",
    "naïve 日本語 🎉🏽",
    "a\u00a0\u3000b\x00\x1c",
    "one<|endoftext|>two",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode; lone surrogates are no text
TRICKY = st.text(alphabet=" \n\t\r'aé1!\u00a0\u3000\x1c日<|>endoftx")


def book() -> str:
    path = Path(tokenizer.__file__).parents[1] / "data" / "assets" / "moby-dick.txt.gz"
    return gzip.decompress(path.read_bytes()).decode()


def word_level(path: Path, words: list[str], special: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    backend.save(str(path))
    return backend


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("The quick brown fox", [464, 2068, 7586, 21831]),
        ("\n\n", [628]),
        ("\n\nx", [198, 198, 87]),
        ("<|endoftext|>", [50256]),
        ("", []),
    ],
)
def test_gpt2s_tokens_are_gpt2s(text: str, ids: list[int]) -> None:
    gpt2 = load("gpt2")
    assert gpt2.encode(text).tolist() == ids
    assert gpt2.decode(ids) == text
    assert (gpt2.vocabulary_size, gpt2.end_of_text) == (50257, 50256)


@given(TEXTS)
@settings(max_examples=50)
def test_the_byte_tokenizers_ids_are_the_bytes_and_256_for_the_end_of_text(text: str) -> None:
    first, *others = [list(part.encode()) for part in text.split("<|endoftext|>")]
    assert load("bytes").encode(text).tolist() == sum(([256, *part] for part in others), first)


def test_the_byte_tokenizer_has_one_more_token_that_ends_a_text() -> None:
    assert (load("bytes").vocabulary_size, load("bytes").end_of_text) == (257, 256)
    assert load("bytes").encode("a<|endoftext|>b").tolist() == [97, 256, 98]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@given(TEXTS | st.sampled_from(AWKWARD))
@settings(max_examples=50)
def test_decoding_gives_the_text_back(name: str, text: str) -> None:
    assert load(name).decode(load(name).encode(text)) == text


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert load("bytes").decode([0xE2, 0x82]) == "\ufffd"


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_long_text_is_encoded_in_pieces_as_it_would_be_in_one(name: str, tmp_path: Path) -> None:
    load(name).save(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = book()[:200_000]
    np.testing.assert_array_equal(load(name).encode(text), whole.encode(text).ids)


def test_a_long_text_without_white_space_is_encoded_too() -> None:
    assert load("bytes").encode("x" * 150_000).tolist() == [ord("x")] * 150_000


@given(TRICKY)
@settings(max_examples=300)
def test_a_text_can_be_cut_at_the_last_gap_without_changing_its_tokens(text: str) -> None:
    gpt2, cut = load("gpt2"), last_gap(text)
    parts = [*gpt2.encode(text[:cut]), *gpt2.encode(text[cut:])]
    assert parts == gpt2.encode(text).tolist()


def test_the_last_gap_is_before_the_white_space_after_the_last_word() -> None:
    assert last_gap("one two\n\nthree") == len("one two")
    assert last_gap("one two! three") == len("one")
    assert last_gap("one") == len("one")


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_saved_tokenizer_loads_in_transformers_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(name).save(tmp_path / "new" / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    assert (len(theirs), theirs.eos_token_id) == (load(name).vocabulary_size, load(name).end_of_text)
    for text in AWKWARD:
        assert theirs(text).input_ids == load(name).encode(text).tolist()
        assert theirs.decode(theirs(text).input_ids) == text


@pytest.mark.parametrize("inside", ["", "tokenizer.json"])
def test_a_saved_tokenizer_is_loaded_from_its_folder_or_file(tmp_path: Path, inside: str) -> None:
    load("gpt2").save(tmp_path)
    again = tokenizer.load(str(tmp_path / inside))
    assert again.end_of_text == 50256
    assert [again.encode(text).tolist() for text in AWKWARD] == [load("gpt2").encode(text).tolist() for text in AWKWARD]


def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(70_000)]
    for count, dtype in [(65_535, np.uint16), (65_536, np.uint32), (70_000, np.uint32)]:
        word_level(tmp_path / "tokenizer.json", words[:count], ["</s>"])
        wide = tokenizer.load(str(tmp_path))
        assert wide.vocabulary_size == count + 1
        assert wide.encode(f"w1 w{count - 1}").dtype == dtype
        assert wide.encode(f"w1 w{count - 1}</s>").tolist() == [1, count - 1, count]


@pytest.mark.parametrize("declared", ["[STOP]", {"content": "[STOP]", "lstrip": False}])
def test_the_end_of_text_is_what_the_config_beside_the_tokenizer_says(tmp_path: Path, declared: Any) -> None:
    word_level(tmp_path / "tokenizer.json", ["a", "b"], ["</s>", "[STOP]"])
    assert tokenizer.load(str(tmp_path)).end_of_text == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}), encoding="utf-8")
    assert tokenizer.load(str(tmp_path)).end_of_text == 3


def test_a_tokenizers_own_truncation_and_additions_are_left_out(tmp_path: Path) -> None:
    backend = word_level(tmp_path / "tokenizer.json", ["a", "b"], ["</s>"])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.load(str(tmp_path)).encode("a b a b a").tolist() == [0, 1, 0, 1, 0]


def test_fingerprints_tell_tokenizers_apart_and_stay(tmp_path: Path) -> None:
    def saved(words: list[str]) -> Tokenizer:
        word_level(tmp_path / "tokenizer.json", words, ["</s>", "[STOP]"])
        return tokenizer.load(str(tmp_path))

    first, other, same = saved(["a", "b"]), saved(["b", "a"]), saved(["a", "b"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[STOP]"}', encoding="utf-8")
    ended = saved(["a", "b"])
    assert first.fingerprint == same.fingerprint
    assert len({each.fingerprint for each in (load("bytes"), load("gpt2"), first, other, ended)}) == 5


@pytest.mark.parametrize("name", ["gpt3", "byte", "nowhere/tokenizer.json", ""])
def test_an_unknown_tokenizer_is_answered_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown tokenizer '{name}'; give bytes, gpt2, or the path"):
        tokenizer.load(name)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/tokenizer.json' is no tokenizer"):
        tokenizer.load(str(tmp_path))


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    word_level(tmp_path / "tokenizer.json", ["a", "b"], [])
    with pytest.raises(ConfigError, match="has no end-of-text token; name it as eos_token"):
        tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_broken_config_beside_the_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    word_level(tmp_path / "tokenizer.json", ["a", "b"], ["</s>"])
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot read '.*tokenizer_config\.json'"):
        tokenizer.load(str(tmp_path))
