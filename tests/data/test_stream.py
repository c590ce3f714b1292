"""Who reads which part of the corpus, and in which order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.core.state import Cursor
from peer.data.stream import Ints, Sequences, choose_shard, heldout_batches
from peer.errors import ConfigError

LENGTH = 4


def stream(windows: int, shards: int, seed: int = 0, spare: int = 0) -> Sequences:
    """A stream over the tokens 0, 1, 2, …, so that a window's first token tells which one it is."""
    return Sequences(np.arange(windows * LENGTH + 1 + spare, dtype=np.uint16), LENGTH, shards, seed)


def lap(sequences: Sequences, shard: int, number: int) -> list[int]:
    """All windows that a shard's peer reads in one lap, in order."""
    read: list[int] = []
    cursor = Cursor(shard, number)
    while cursor.lap == number:
        rows, cursor = sequences.read(cursor, 1)
        read.append(int(rows[0, 0]) // LENGTH)
    return read


@pytest.fixture(
    params=[(1, 1), (7, 1), (7, 7), (24, 4), (23, 5), (100, 9)], ids=lambda sizes: f"{sizes[0]}-in-{sizes[1]}"
)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    windows, shards = request.param
    return windows, shards


def test_a_window_is_a_sequence_and_the_token_after_it() -> None:
    tokens = np.array([7, 8, 9, 10, 11, 12, 13], np.uint16)
    sequences = Sequences(tokens, 3, 1, 0)
    rows, _ = sequences.read(Cursor(), 2)
    assert sorted(rows.tolist()) == [[7, 8, 9, 10], [10, 11, 12, 13]]
    assert rows.dtype == np.int64


def test_tokens_that_fill_no_window_are_left_out() -> None:
    assert [stream(5, 1, spare=spare).windows for spare in range(LENGTH + 1)] == [5, 5, 5, 5, 6]


def test_in_every_lap_the_shards_share_all_windows_without_overlap(sizes: tuple[int, int]) -> None:
    windows, shards = sizes
    sequences = stream(windows, shards)
    for number in range(2 * shards + 1):
        laps = [lap(sequences, shard, number) for shard in range(shards)]
        assert sorted(window for each in laps for window in each) == list(range(windows))
        assert {len(each) for each in laps} <= {windows // shards, -(-windows // shards)}


def test_over_as_many_laps_as_there_are_shards_everybody_reads_everything_once(sizes: tuple[int, int]) -> None:
    windows, shards = sizes
    sequences = stream(windows, shards)
    for shard in range(shards):
        for first in (0, shards, 5 * shards):
            read = [window for number in range(first, first + shards) for window in lap(sequences, shard, number)]
            assert sorted(read) == list(range(windows))


def test_the_same_group_comes_in_another_order_in_another_lap() -> None:
    orders = [tuple(lap(stream(64, 1), 0, number)) for number in range(8)]
    assert len(set(orders)) == 8


def test_the_order_mixes_the_corpus_and_depends_on_the_seed() -> None:
    one, other = lap(stream(1000, 4, seed=1), 2, 0), lap(stream(1000, 4, seed=2), 2, 0)
    assert one == lap(stream(1000, 4, seed=1), 2, 0)
    assert one != other
    # 250 of 1000 windows taken at random: expected mean 499.5, standard error about 16; steps up and down alike.
    assert 420 < np.mean(one) < 580
    assert 90 < int((np.diff(one) > 0).sum()) < 160


def test_peers_with_any_version_of_numpy_read_in_this_order() -> None:
    rows, cursor = stream(12, 3, seed=42).read(Cursor(shard=1), 6)
    assert (rows[:, 0] // LENGTH).tolist() == [6, 0, 3, 9, 2, 7]
    assert cursor == Cursor(shard=1, lap=1, sequence=2)


@given(
    shard=st.integers(0, 4),
    start=st.integers(0, 30),
    counts=st.lists(st.integers(0, 17), max_size=8),
    fresh=st.booleans(),
)
@settings(max_examples=100)
def test_reading_in_parts_and_resuming_gives_what_one_read_gives(
    shard: int, start: int, counts: list[int], fresh: bool
) -> None:
    sequences = stream(23, 5, seed=3)
    _, cursor = sequences.read(Cursor(shard), start)
    whole, end = sequences.read(cursor, sum(counts))
    parts: list[Ints] = [np.empty((0, LENGTH + 1), np.int64)]
    for count in counts:
        reader = stream(23, 5, seed=3) if fresh else sequences  # as after a restart, or going on
        rows, cursor = reader.read(cursor, count)
        parts.append(rows)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert cursor == end


def test_reading_does_not_depend_on_what_was_read_before() -> None:
    sequences = stream(23, 5)
    first, _ = sequences.read(Cursor(2, 1, 1), 9)
    for cursor in (Cursor(0), Cursor(4, 7, 2), Cursor(2, 3)):
        sequences.read(cursor, 11)
    again, _ = sequences.read(Cursor(2, 1, 1), 9)
    np.testing.assert_array_equal(first, again)


def test_a_cursor_counts_the_sequences_of_its_lap() -> None:
    sequences = stream(20, 4)  # five windows a lap
    assert sequences.read(Cursor(3), 0)[1] == Cursor(3, 0, 0)
    assert sequences.read(Cursor(3), 4)[1] == Cursor(3, 0, 4)
    assert sequences.read(Cursor(3), 5)[1] == Cursor(3, 1, 0)
    assert sequences.read(Cursor(3, 1, 3), 14)[1] == Cursor(3, 4, 2)


def test_a_cursor_past_the_end_of_its_lap_goes_on_with_the_next() -> None:
    sequences = stream(20, 4)
    rows, cursor = sequences.read(Cursor(3, 0, 99), 2)
    np.testing.assert_array_equal(rows, sequences.read(Cursor(3, 1), 2)[0])
    assert cursor == Cursor(3, 1, 2)


def test_tokens_may_be_mapped_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(41, dtype=np.uint16))
    mapped = np.load(path, mmap_mode="r")
    rows, _ = Sequences(mapped, LENGTH, 2, 0).read(Cursor(1), 7)
    np.testing.assert_array_equal(rows, stream(10, 2).read(Cursor(1), 7)[0])
    assert type(rows) is np.ndarray


@pytest.mark.parametrize(("tokens", "shards", "needed"), [(0, 1, 5), (4, 1, 5), (12, 3, 13)])
def test_fewer_tokens_than_one_window_for_each_shard_are_refused(tokens: int, shards: int, needed: int) -> None:
    with pytest.raises(ConfigError, match=rf"has {tokens} tokens, and {shards} shards .* need {needed};"):
        Sequences(np.zeros(tokens, np.uint16), LENGTH, shards, 0)
    Sequences(np.zeros(needed, np.uint16), LENGTH, shards, 0)


@pytest.mark.parametrize("shard", [-1, 4, 1000])
def test_a_shard_that_there_is_not_is_refused(shard: int) -> None:
    with pytest.raises(ConfigError, match=rf"there is no shard {shard}; this run has shards 0 to 3"):
        stream(20, 4).read(Cursor(shard), 1)


# ------------------------------------------------------------------ held out


@pytest.mark.parametrize(
    ("tokens", "batch", "limit", "starts"),
    [
        (41, 4, 100, [[0, 4, 8, 12], [16, 20, 24, 28], [32, 36]]),
        (44, 4, 100, [[0, 4, 8, 12], [16, 20, 24, 28], [32, 36]]),
        (41, 5, 10, [[0, 4, 8, 12, 16], [20, 24, 28, 32, 36]]),
        (41, 2, 3, [[0, 12], [24]]),  # windows 0, 3 and 6 of 10
        (41, 8, 1, [[0]]),
        (5, 8, 8, [[0]]),
        (41, 8, 0, []),
    ],
)
def test_held_out_windows_are_spread_evenly_up_to_the_limit(
    tokens: int, batch: int, limit: int, starts: list[list[int]]
) -> None:
    batches = list(heldout_batches(np.arange(tokens, dtype=np.uint16), LENGTH, batch, limit))
    assert [each[:, 0].tolist() for each in batches] == starts
    for each in batches:
        assert each.dtype == np.int64
        np.testing.assert_array_equal(each, each[:, :1] + np.arange(LENGTH + 1))


def test_too_little_held_out_text_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="4 tokens are held out, fewer than one sequence of 4"):
        heldout_batches(np.zeros(4, np.uint16), LENGTH, 1, 1)


# -------------------------------------------------------------------- shards


def test_a_peer_takes_the_first_free_shard_of_its_own_order() -> None:
    taken: list[int] = []
    for _ in range(8):
        taken.append(choose_shard("alice", 8, taken))
    assert sorted(taken) == list(range(8))
    assert choose_shard("alice", 8, taken[:3] + taken[4:]) == taken[3]


def test_when_all_shards_are_taken_a_peer_shares_the_first_of_its_order() -> None:
    assert choose_shard("alice", 8, range(8)) == choose_shard("alice", 8, ())


def test_shards_that_there_are_not_may_be_claimed_by_others() -> None:
    assert choose_shard("alice", 1, [5, -3]) == 0


def test_peers_spread_over_the_shards() -> None:
    first = Counter(choose_shard(f"peer-{i}", 8, ()) for i in range(800))
    # Binomial with mean 100 and deviation 9.4.
    assert set(first) == set(range(8))
    assert all(60 < count < 140 for count in first.values())
