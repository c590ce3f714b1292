"""Text files to tokens, kept for the next start."""

from __future__ import annotations

import functools
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from peer.core.state import Cursor
from peer.data import corpus
from peer.data.corpus import HELDOUT_LEAST, Corpus, Tokens
from peer.data.stream import Sequences
from peer.errors import ConfigError
from peer.models import tokenizer
from peer.models.tokenizer import Tokenizer

END = 256


@functools.cache
def tokens_of(name: str) -> Tokenizer:
    return tokenizer.load(name)


def load(
    source: str | Path | None, cache: Path | None = None, notes: list[str] | None = None, name: str = "bytes"
) -> Corpus:
    progress = None if notes is None else notes.append
    return corpus.load(None if source is None else str(source), tokens_of(name), cache, progress)


def everything(read: Corpus) -> Tokens:
    return np.concatenate([read.train, read.heldout])


def content(read: Corpus) -> bytes:
    """All text of a corpus; its ends of text as NUL."""
    tokens = everything(read)
    return np.where(tokens == END, 0, tokens).astype(np.uint8).tobytes()


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def prose(letter: str, count: int = 4000) -> str:
    return (letter * 9 + " ") * (count // 10)


@pytest.mark.parametrize("source", [None, "moby-dick"])
def test_moby_dick_comes_along(source: str | None) -> None:
    text = content(load(source)).decode()
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert text.endswith("as it rolled five thousand years ago.\n\0")
    assert len(text.encode()) == 1_204_997 + 1


@pytest.mark.parametrize(("count", "heldout"), [(2050, 1025), (20_000, 1025), (100_000, 5000)])
def test_the_last_twentieth_but_at_least_a_sequence_is_held_out(tmp_path: Path, count: int, heldout: int) -> None:
    text = np.random.default_rng(0).integers(97, 122, count - 1, np.uint8).tobytes()
    read = load(write(tmp_path / "a.txt", text))
    assert (len(read.train), len(read.heldout)) == (count - heldout, heldout)
    assert content(read) == text + b"\0"


def test_training_never_reads_what_is_held_out(tmp_path: Path) -> None:
    read = load(write(tmp_path / "a.txt", "a " * 10_000 + "b" * 1000), cache=tmp_path / "cache")
    sequences = Sequences(read.train, 64, 3, 0)
    assert ord("b") in read.heldout
    for shard in range(3):
        rows, _ = sequences.read(Cursor(shard), 3 * sequences.windows)
        assert not np.isin(rows, [ord("b"), END]).any()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", prose("a")),
        ("a.txt.gz", prose("a")),
        ("anything", prose("a")),
        ("a.jsonl", json.dumps({"text": prose("a"), "id": 1}) + "\n\n"),
        ("a.JSONL.gz", json.dumps({"text": prose("a")})),
        ("bom.txt", "\ufeff" + prose("a")),
        ("bom.txt.gz", "\ufeff" + prose("a")),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_is_read_by_its_ending(tmp_path: Path, name: str, text: str, cached: bool) -> None:
    path = write(tmp_path / "in" / name, text)
    assert content(load(path, cache=tmp_path / "cache" if cached else None)).decode() == prose("a") + "\0"


def test_every_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = [{"text": prose("a")}, {"text": ""}, {"text": "b\nb\u00e9"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert content(load(path)).decode() == prose("a") + "\0b\nbé\0"


def test_a_folder_is_all_its_text_files_in_order(tmp_path: Path) -> None:
    for name, letter in [("b.txt", "b"), ("a/z.txt.gz", "z"), ("a.txt", "a"), ("c.TXT", "c"), ("empty.txt", "")]:
        write(tmp_path / name, prose(letter) if letter else "")
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "README.md", "no data")
    expected = "\0".join(map(prose, "zabc")) + "\0"
    assert content(load(tmp_path)).decode() == expected


@pytest.mark.parametrize("pattern", ["*.txt", "**/?.txt"])
def test_a_glob_is_the_files_it_matches_in_order(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "b.txt", prose("b"))
    write(tmp_path / "a.txt", prose("a"))
    write(tmp_path / "c.text", prose("c"))
    (tmp_path / "d.txt").mkdir()
    assert content(load(tmp_path / pattern)).decode() == prose("a") + "\0" + prose("b") + "\0"


def test_a_long_file_is_read_in_chunks_as_it_would_be_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = gzip.decompress((Path(corpus.__file__).parent / "assets" / "moby-dick.txt.gz").read_bytes()).decode()[
        :60_000
    ]
    monkeypatch.setattr("peer.data.texts._CHUNK", 1000)
    read = everything(load(write(tmp_path / "a.txt", text), name="gpt2"))
    np.testing.assert_array_equal(read[:-1], tokens_of("gpt2").encode(text))


# --------------------------------------------------------------------- cache


def kept(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_kept_tokens_are_mapped_and_equal(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.txt", prose("a")), tmp_path / "new" / "cache"
    first = load(path, cache)
    stamp = kept(cache)[0].stat()
    second = load(path, cache)
    for read in (first, second):
        assert isinstance(read.train, np.memmap)
        np.testing.assert_array_equal(everything(read), everything(load(path)))
    assert kept(cache)[0].stat().st_ino == stamp.st_ino  # not written again


def test_kept_tokens_are_an_ordinary_npy_file(tmp_path: Path) -> None:
    read = load(write(tmp_path / "a.txt", prose("a")), tmp_path / "cache")
    np.testing.assert_array_equal(np.load(kept(tmp_path / "cache")[0]), everything(read))


def test_tokens_are_kept_by_content_and_tokenizer(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.txt", prose("a", 8000)), tmp_path / "cache"
    load(path, cache)
    load(write(tmp_path / "copy.txt", prose("a", 8000)), cache)
    assert len(kept(cache)) == 1
    load(path, cache, name="gpt2")
    assert len(kept(cache)) == 2
    write(path, prose("b", 8000))
    assert content(load(path, cache)).decode() == prose("b", 8000) + "\0"
    assert len(kept(cache)) == 3


def test_the_same_bytes_under_another_ending_are_another_corpus(tmp_path: Path) -> None:
    line = json.dumps({"text": prose("a")})
    load(write(tmp_path / "a.txt", line), tmp_path / "cache")
    assert content(load(write(tmp_path / "a.jsonl", line), tmp_path / "cache")).decode() == prose("a") + "\0"


def test_how_text_is_divided_into_files_counts(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.txt", prose("a") + prose("b"))
    write(tmp_path / "two" / "a.txt", prose("a"))
    write(tmp_path / "two" / "b.txt", prose("b"))
    load(tmp_path / "one", tmp_path / "cache")
    assert content(load(tmp_path / "two", tmp_path / "cache")).decode() == prose("a") + "\0" + prose("b") + "\0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:5],
        lambda raw: raw[:100],
        lambda raw: raw[:-1],
        lambda raw: raw[:-2],
        lambda raw: raw + b"ab",
        lambda raw: b"\0" * len(raw),
        lambda raw: b"PK\x03\x04" + raw[4:],
        lambda raw: raw[:20] + b"{" * 60 + raw[80:],
        lambda raw: raw.replace(b"'<u2'", b"'<f2'"),
        lambda raw: raw.replace(b"'<u2'", b"'|O8'"),
    ],
)
def test_broken_kept_tokens_are_made_anew(tmp_path: Path, damage: object) -> None:
    path, cache = write(tmp_path / "a.txt", prose("a")), tmp_path / "cache"
    load(path, cache)
    file = kept(cache)[0]
    whole = file.read_bytes()
    assert callable(damage)
    broken = damage(whole)
    assert broken != whole
    file.write_bytes(broken)
    assert content(load(path, cache)).decode() == prose("a") + "\0"
    assert file.read_bytes() == whole
    assert kept(cache) == [file]


def test_a_failure_midway_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": prose("a")}) + "\n{broken")
    with pytest.raises(ConfigError, match="line 2"):
        load(path, tmp_path / "cache")
    assert kept(tmp_path / "cache") == []


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    write(tmp_path / "cache", "a file, not a folder")
    with pytest.raises(ConfigError, match=rf"cannot keep tokens in '{tmp_path}/cache': "):
        load(write(tmp_path / "a.txt", prose("a")), tmp_path / "cache")


# ------------------------------------------------------------------ bad data


def test_bytes_that_are_no_utf8_are_replaced_and_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write(tmp_path / "latin.txt", b"caf\xe9 \xff\xfe and \xef\xbf\xbd itself, " + prose("a").encode())
    read = load(path, notes=notes)
    assert content(read).decode() == "caf\ufffd \ufffd\ufffd and \ufffd itself, " + prose("a") + "\0"
    assert notes == [f"data '{path}' is not all UTF-8: 3 characters were read as U+FFFD; save it as UTF-8"]


def test_half_a_surrogate_pair_in_jsonl_is_replaced(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00 \\ud83d"}\n' + json.dumps({"text": prose("a")}))
    assert content(load(path, notes=notes)).decode() == "😀 \ufffd\0" + prose("a") + "\0"
    assert len(notes) == 1


def test_clean_text_is_read_without_a_word(tmp_path: Path) -> None:
    notes: list[str] = []
    load(write(tmp_path / "a.txt", prose("a")), notes=notes)
    assert notes == []


def test_progress_is_told_when_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_NEWS_EVERY_S", 0.0)
    notes: list[str] = []
    path = write(tmp_path / "a.txt", prose("a"))
    load(path, tmp_path / "cache", notes)
    assert f"looking through data '{path}': 0 MB so far" in notes
    assert f"reading data '{path}': 0.0 million tokens so far" in notes


@pytest.mark.parametrize("source", ["nowhere.txt", "no/*.txt", "mobydick"])
@pytest.mark.parametrize("cached", [False, True])
def test_data_that_is_not_there_is_quoted(tmp_path: Path, source: str, cached: bool) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path / source, tmp_path / "cache" if cached else None)
    assert f"there is no data at '{tmp_path / source}'; give a text file" in str(refusal.value)


def test_a_folder_without_text_is_quoted(tmp_path: Path) -> None:
    write(tmp_path / "picture.png", b"\x89PNG")
    with pytest.raises(
        ConfigError, match=rf"data folder '{tmp_path}' holds no text; put files there that end in \.txt"
    ):
        load(tmp_path)


@pytest.mark.parametrize(("count", "counted"), [(0, 0), (1, 2), (2 * HELDOUT_LEAST - 2, 2 * HELDOUT_LEAST - 1)])
@pytest.mark.parametrize("cached", [False, True])
def test_too_small_a_file_is_quoted_with_what_is_needed(tmp_path: Path, count: int, counted: int, cached: bool) -> None:
    path = write(tmp_path / "a.txt", "x" * count)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"data '{path}' is too small: it has {counted} tokens and 2050 are needed"
        ):
            load(path, tmp_path / "cache" if cached else None)


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2, is not JSON"),
        ("a.jsonl", b'{"content": "a"}', 'line 1, has no "text"'),
        ("a.jsonl", b'"a"', 'line 1, has no "text"'),
        ("a.jsonl", b'{"text": 1}', 'line 1, has no "text"'),
        ("a.txt.gz", b"plain text", "is no whole gzip file"),
        ("a.txt.gz", gzip.compress(b"a" * 100_000)[:-20], "is no whole gzip file"),
        ("a.txt.gz", gzip.compress(os.urandom(5000))[:2000] + b"\xff" * 50, "is no whole gzip file"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_is_not_what_its_name_says_is_quoted(
    tmp_path: Path, name: str, raw: bytes, reason: str, cached: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as refusal:
        load(path, tmp_path / "cache" if cached else None)
    assert f"data '{path}'" in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
@pytest.mark.parametrize("cached", [False, True])
def test_what_can_not_be_read_is_quoted(tmp_path: Path, cached: bool) -> None:
    # A file that opens and then fails, whoever asks: this process's own memory at address 0.
    with pytest.raises(ConfigError, match="cannot read data '/proc/self/mem': Input/output error"):
        load("/proc/self/mem", tmp_path / "cache" if cached else None)
