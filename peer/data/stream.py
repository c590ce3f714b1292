"""The order in which a peer reads the corpus: endless, the same at every run, disjoint from the other peers'."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.core.state import Cursor
from peer.errors import ConfigError

Ints = NDArray[np.int64]
Tokens = NDArray[np.unsignedinteger[Any]]

_GROUPS, _ASSIGNMENT, _OFFSETS, _ORDER = range(4)
"""What a permutation is for; keeps them independent under one seed."""


class Sequences:
    """A row of tokens cut into windows of sequence_length + 1 tokens, each sequence_length after the one before.

    The windows are divided by a seeded permutation into as many groups as there are shards, equal but for one window.
    In lap p a peer with shard s reads all of group sigma_p(s), in an order seeded by (seed, p, group). sigma_p is a
    permutation, so peers with different shards never read the same window in the same lap; and in laps k * shards to
    (k + 1) * shards - 1 each peer reads every group, hence every window, once.

    Raises ConfigError when there is not one window for each shard.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, shards: int, seed: int) -> None:
        needed = shards * sequence_length + 1
        if len(tokens) < needed:
            raise ConfigError(
                f"the training data has {len(tokens)} tokens, and {shards} shards of at least one sequence of "
                f"{sequence_length} need {needed}; give more text, or shorten the sequences"
            )
        self._tokens = tokens
        self._length = sequence_length
        self._shards = shards
        self._seed = seed
        self._windows = (len(tokens) - 1) // sequence_length
        self._held: tuple[tuple[int, int], Ints] | None = None

    @property
    def windows(self) -> int:
        """How many windows there are in all."""
        return self._windows

    def read(self, cursor: Cursor, count: int) -> tuple[Ints, Cursor]:
        """Return the next windows, (count, sequence_length + 1) int64, and where to go on.

        At a lap's end the next lap begins. Depends on nothing but the arguments.
        Raises ConfigError for a shard that there isn't.
        """
        if not 0 <= cursor.shard < self._shards:
            raise ConfigError(f"there is no shard {cursor.shard}; this run has shards 0 to {self._shards - 1}")
        lap, sequence = cursor.lap, cursor.sequence
        parts = [np.empty(0, np.int64)]
        missing = count
        while missing > 0:
            order = self._lap(cursor.shard, lap)
            part = order[sequence : sequence + missing]
            parts.append(part)
            missing -= len(part)
            sequence += len(part)
            if sequence >= len(order):
                lap, sequence = lap + 1, 0
        windows = np.concatenate(parts)
        return _cut(self._tokens, windows * self._length, self._length), Cursor(cursor.shard, lap, sequence)

    def group(self, shard: int, lap: int) -> int:
        """Return sigma_lap(shard), the group that a shard's peer reads in a lap."""
        # A Latin square for every `shards` laps: rows shifted against each other, then both sides shuffled.
        block, row = divmod(lap, self._shards)
        assignment = _permutation(self._shards, self._seed, _ASSIGNMENT, block)
        offsets = _permutation(self._shards, self._seed, _OFFSETS, block)
        return int(assignment[(shard + offsets[row]) % self._shards])

    def _lap(self, shard: int, lap: int) -> Ints:
        # Kept for the next call, for it takes a permutation of all windows; only one group's part stays in memory.
        if self._held is None or self._held[0] != (shard, lap):
            group = self.group(shard, lap)
            first, end = (self._windows * each // self._shards for each in (group, group + 1))
            members = _permutation(self._windows, self._seed, _GROUPS)[first:end]
            order = members[_permutation(len(members), self._seed, _ORDER, lap, group)]
            self._held = ((shard, lap), order)
        return self._held[1]


def heldout_batches(tokens: Tokens, sequence_length: int, batch: int, limit: int) -> Iterator[Ints]:
    """Yield at most `limit` windows of the held-out tokens, evenly spread, as (batch or fewer, sequence_length + 1).

    Raises ConfigError, at once, when not one window fits.
    """
    windows = (len(tokens) - 1) // sequence_length
    if windows < 1:
        raise ConfigError(
            f"{len(tokens)} tokens are held out, fewer than one sequence of {sequence_length} and the token after it; "
            "give more text, or shorten the sequences"
        )
    chosen = max(0, min(windows, limit))
    starts = np.arange(chosen, dtype=np.int64) * windows // max(1, chosen) * sequence_length
    return (_cut(tokens, starts[at : at + batch], sequence_length) for at in range(0, len(starts), batch))


def choose_shard(peer_id: str, shards: int, taken: Collection[int]) -> int:
    """Return the first shard that nobody took, in an order of this peer's own; if all are taken, the first of it."""
    own = int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "little")
    order = [int(shard) for shard in _permutation(shards, own)]
    claimed = set(taken)
    return next((shard for shard in order if shard not in claimed), order[0])


def _cut(tokens: Tokens, starts: Ints, length: int) -> Ints:
    index = starts[:, None] + np.arange(length + 1)  # (count, length + 1)
    return np.asarray(tokens[index], np.int64)


def _permutation(size: int, *seed: int) -> Ints:
    # From the generator's raw output, which numpy promises never to change, unlike that of Generator.permutation:
    # peers with different versions of numpy must agree.
    keys: NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(keys, kind="stable")
