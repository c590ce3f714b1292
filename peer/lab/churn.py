"""Who is there when: virtual peers that leave and come back, by chance or as a file says.

All peers are present at the start unless a change at 0 s says otherwise, and at any time at least one is present. A
peer is its index in the code, from 0; for people, in files and in errors, the first peer is 1.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.errors import ConfigError

AWAY_ROUNDS = 5.0
"""The mean time that a peer is away, in rounds."""

_WORDS = {"leave": False, "join": True}


@dataclass(frozen=True)
class Change:
    """From at_s on the peer is present, or it is not."""

    at_s: float
    peer: int
    present: bool


def parse(spec: str, peers: int, round_s: float, rounds: int, seed: int) -> tuple[Change, ...]:
    """Return the changes that a user asked for: a number is `by_rate`'s, anything else is the path of a trace."""
    try:
        rate = float(spec)
    except ValueError:
        return by_trace(Path(spec), peers)
    return by_rate(rate, peers, round_s, rounds, seed)


def by_rate(rate: float, peers: int, round_s: float, rounds: int, seed: int) -> tuple[Change, ...]:
    """Return changes at random, sorted by time, up to round_s × rounds; the same seed gives the same ones.

    A present peer leaves within any one round with probability rate: its stay is exponential with a mean of
    round_s / −ln(1 − rate). It is away for an exponential time with a mean of AWAY_ROUNDS rounds. The last one present
    stays. In the long run each of many peers is away for a share 5 l / (1 + 5 l) of the time, with l = −ln(1 − rate).
    Raises `ConfigError` for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"churn is {rate:g} a round; give a number from 0 to below 1, or the path of a trace")
    if rate == 0:
        return ()
    random = np.random.Generator(np.random.PCG64(seed))
    mean_s = {True: round_s / -math.log1p(-rate), False: AWAY_ROUNDS * round_s}
    present = set(range(peers))
    due = [(random.exponential(mean_s[True]), peer) for peer in range(peers)]
    heapq.heapify(due)
    changes = []
    while due[0][0] <= round_s * rounds:
        at_s, peer = due[0]
        # The last one draws another stay; an exponential one has no memory, so this bends no distribution.
        if present != {peer}:
            present ^= {peer}
            changes.append(Change(at_s, peer, peer in present))
        heapq.heapreplace(due, (at_s + random.exponential(mean_s[peer in present]), peer))
    return tuple(changes)


def by_trace(path: Path, peers: int) -> tuple[Change, ...]:
    """Read changes from a text file, one a line: `seconds peer leave`, or `join`; # begins a comment.

    Peers count from 1; times don't go back. A peer whose first line is a join is absent before it. Raises
    `ConfigError` with the number of the line.
    """
    lines = list(_lines(path, peers))
    first = {change.peer: change for _, change in reversed(lines)}
    late = {peer for peer, change in first.items() if change.present}
    changes = [Change(0.0, peer, False) for peer in sorted(late)]
    present = set(range(peers)) - late
    now_s = 0.0
    for number, change in lines:
        place = f"churn trace '{path}', line {number}"
        if change.at_s < now_s:
            raise ConfigError(f"{place}: {change.at_s:g} s comes after {now_s:g} s; sort the lines by time")
        # Changes of one time count as one: a swarm may hand over from one peer to another.
        if change.at_s > now_s and not present:
            raise ConfigError(f"{place}: nobody is present before {change.at_s:g} s; keep one peer there at any time")
        if change.present == (change.peer in present):
            state = "present already" if change.present else "away already"
            raise ConfigError(f"{place}: peer {change.peer + 1} is {state}; remove the line")
        now_s = change.at_s
        present ^= {change.peer}
        changes.append(change)
    if not present:
        raise ConfigError(f"churn trace '{path}': after the last line nobody is present; keep one peer there")
    return tuple(changes)


class Presence:
    """The changes of some peers, to be asked about a time."""

    def __init__(self, changes: Sequence[Change], peers: int) -> None:
        self._changes = changes
        self._times = [change.at_s for change in changes]
        self._of: list[list[Change]] = [[] for _ in range(peers)]
        for change in changes:
            self._of[change.peer].append(change)

    def at(self, time_s: float) -> frozenset[int]:
        """Return the peers that are present; a change at this very time has happened."""
        return frozenset(peer for peer, changes in enumerate(self._of) if _present(changes, time_s))

    def between(self, start_s: float, end_s: float) -> tuple[Change, ...]:
        """Return the changes after start_s up to and with end_s: what turns `at(start_s)` into `at(end_s)`."""
        return tuple(self._changes[bisect_right(self._times, start_s) : bisect_right(self._times, end_s)])


def _present(changes: Sequence[Change], time_s: float) -> bool:
    done = bisect_right(changes, time_s, key=lambda change: change.at_s)
    return changes[done - 1].present if done else True


def _lines(path: Path, peers: int) -> Iterator[tuple[int, Change]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"cannot read the churn trace '{path}': {why}; "
            "give a rate such as 0.05, or a file with lines such as: 60 2 leave"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                yield number, _change(words, peers)
            except ConfigError as error:
                raise ConfigError(f"churn trace '{path}', line {number}: {error}") from error


def _change(words: list[str], peers: int) -> Change:
    if len(words) != 3:
        raise ConfigError(f"'{' '.join(words)}' is no change; write seconds, peer, and leave or join: 60 2 leave")
    seconds, peer, word = words
    try:
        at_s = float(seconds)
    except ValueError:
        at_s = math.nan
    if not 0 <= at_s < math.inf:
        raise ConfigError(f"'{seconds}' is no time; give seconds from 0 on")
    if not (peer.isascii() and peer.isdecimal() and len(peer) < 10 and 1 <= int(peer) <= peers):
        raise ConfigError(f"'{peer}' is no peer; give a whole number from 1 to {peers}")
    if word not in _WORDS:
        raise ConfigError(f"'{word}' is no change; write leave or join")
    return Change(at_s, int(peer) - 1, _WORDS[word])
