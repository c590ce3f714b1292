"""The link model: how long virtual peers take to send and to compute. Nothing is sent; these are formulas over sizes.

Assumed: every peer hangs on the internet by an access line of its own, which alone limits it; a line carries both
directions at full speed at the same time; the core of the internet is infinitely fast, and its latency counts as part
of the access lines'. Left out: lost packets, TCP's slow start and its fairness, headers, jitter, a bottleneck that
several peers share, and that two transfers at once halve a peer's line. Real transfers take longer, never shorter.

A peer is its index here, from 0. A Mbit is 10⁶ bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any

from peer import tables
from peer.errors import ConfigError

_TOP = {"step_s": float, "peers": list}

_GROUP = {"count": int, "up_mbit": float, "down_mbit": float, "latency_ms": float, "speed": float}

_BOUNDS: dict[str, tuple[float, float]] = {
    "step_s": (1e-6, 1e6),
    "count": (1, 10**6),
    "up_mbit": (1e-3, 1e6),
    "down_mbit": (1e-3, 1e6),
    "latency_ms": (0, 60_000),
    "speed": (1e-3, 1e3),
}


@dataclass(frozen=True)
class Link:
    """One peer's access line and pace.

    up_mbit, down_mbit: Mbit/s. latency_s: one way, of this line alone; both ends' add. step_s: seconds that one inner
    step takes this peer.
    """

    up_mbit: float = math.inf
    down_mbit: float = math.inf
    latency_s: float = 0.0
    step_s: float = 1.0


@dataclass(frozen=True)
class Links:
    """The lines of all virtual peers, in their order."""

    peers: tuple[Link, ...]

    @classmethod
    def ideal(cls, peers: int) -> Links:
        """Return lines without a limit and without latency; an inner step takes a second."""
        return cls((Link(),) * peers)

    @classmethod
    def load(cls, path: Path, peers: int) -> Links:
        """Read so many peers' lines from a TOML file; raises `ConfigError`, which names the file.

        The file: step_s, what an inner step takes at speed 1 (left out: 1.0), and [[peers]] groups with the keys
        count (1), up_mbit and down_mbit (left out: unlimited), latency_ms (0) and speed (1.0; twice as fast is 2.0).
        Where the groups count fewer peers than asked for, they repeat from the first on; where they count more, the
        first ones are taken.
        """
        text = tables.read(path)
        try:
            table = tables.parse(text)
            groups = table.pop("peers", [])
            step_s = _bounded(tables.typed(table, _TOP)).get("step_s", 1.0)
            if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
                raise ConfigError("'peers' is a list of groups; write [[peers]] above the keys of each")
            if not groups:
                raise ConfigError("no peers are described; write [[peers]] and below it such as: up_mbit = 20")
            entries = chain.from_iterable(_group(group, n, step_s) for n, group in enumerate(groups, 1))
            return cls(tuple(islice(cycle(entries), peers)))
        except ConfigError as error:
            raise ConfigError(f"links '{path}': {error}") from error

    def transfer_s(self, source: int, target: int, size_bytes: float) -> float:
        """Return how long a message takes from its first byte sent to its last byte received.

        Latency plus size over the slower of the source's up and the target's down. Assumes that neither line carries
        anything else in that direction.
        """
        return self._latency_s(source, target) + self._sending_s(source, target, size_bytes)

    def bits_per_s(self, source: int, target: int) -> float:
        """Return how fast one peer's bytes reach another one."""
        return 1e6 * min(self.peers[source].up_mbit, self.peers[target].down_mbit)

    def exchange_s(self, a: int, b: int, a_to_b_bytes: float, b_to_a_bytes: float, turns: int) -> float:
        """Return how long two peers talk.

        turns: one-way latencies that the conversation waits for, one each time its direction changes. Both directions
        flow at the same time, each limited by its own path, so the longer one counts; an exchange whose second leg
        can't begin before the first has arrived takes up to the sum of both instead.
        """
        sending_s = max(self._sending_s(a, b, a_to_b_bytes), self._sending_s(b, a, b_to_a_bytes))
        return turns * self._latency_s(a, b) + sending_s

    def allreduce_s(self, members: Sequence[int], size_bytes: float) -> float:
        """Return how long a ring all-reduce takes among these peers, in this order; one alone takes none.

        2 (n − 1) steps, in each of which every member sends size / n to the next one; all wait for the slowest before
        the next step, so the slowest line sets the pace. Assumes that all begin at the same time; leaves out the sums.
        """
        n = len(members)
        if n < 2:
            return 0.0
        ring = zip(members, [*members[1:], members[0]], strict=True)
        return 2 * (n - 1) * max(self.transfer_s(source, target, size_bytes / n) for source, target in ring)

    def _latency_s(self, a: int, b: int) -> float:
        return self.peers[a].latency_s + self.peers[b].latency_s

    def _sending_s(self, source: int, target: int, size_bytes: float) -> float:
        return 8 * size_bytes / self.bits_per_s(source, target)


def allreduce_bytes(n: int, size_bytes: float) -> float:
    """Return what each of n peers sends in a ring all-reduce of size_bytes: 2 (n − 1) / n of it."""
    return 2 * (n - 1) / n * size_bytes


def _group(table: dict[str, Any], number: int, step_s: float) -> repeat[Link]:
    values = _bounded(tables.typed(table, _GROUP, f"[[peers]] number {number}"), f" in [[peers]] number {number}")
    link = Link(
        up_mbit=values.get("up_mbit", math.inf),
        down_mbit=values.get("down_mbit", math.inf),
        latency_s=values.get("latency_ms", 0.0) / 1000,
        step_s=step_s / values.get("speed", 1.0),
    )
    return repeat(link, values.get("count", 1))


def _bounded(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    for key, value in values.items():
        low, high = _BOUNDS[key]
        if not low <= value <= high:
            raise ConfigError(f"'{key}'{place} is {value}; give a number from {low:g} to {high:g}")
    return values
