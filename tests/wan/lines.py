"""The access lines of all hosts, as a TOML file describes them, in the words of `peer.lab.links` and a few more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from peer import tables
from peer.errors import ConfigError

MAX_HOSTS = 250
_TOP = {"mtu": int, "seed": int, "peers": list}
_LINE = {
    "up_mbit": float,
    "down_mbit": float,
    "latency_ms": float,
    "jitter_ms": float,
    "loss": float,
    "queue_ms": float,
    "blackouts": list,
}
_BOUNDS: dict[str, tuple[float, float]] = {
    "mtu": (576, 65_535),
    "seed": (0, 2**63),
    "count": (1, MAX_HOSTS),
    "up_mbit": (1e-3, 1e6),
    "down_mbit": (1e-3, 1e6),
    "latency_ms": (0, 60_000),
    "jitter_ms": (0, 60_000),
    "loss": (0, 1),
    "queue_ms": (0, 60_000),
}


@dataclass(frozen=True)
class Line:
    """One host's access line; what is said once holds for each of its directions.

    up_mbit, down_mbit: 10⁶ bit/s. latency_ms: one way; both ends' add. jitter_ms: what chance adds to it at most.
    loss: share of the packets. queue_ms: how long a packet may have to wait for the bandwidth before it is dropped.
    blackouts: from and to, in seconds since the start, when nothing gets through.
    """

    up_mbit: float = math.inf
    down_mbit: float = math.inf
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float = 100.0
    blackouts: tuple[tuple[float, float], ...] = ()

    def changed(self, values: Mapping[str, Any]) -> Line:
        """Return the line with other values under its names; raises `ConfigError`."""
        return replace(self, **_checked(values, _LINE))


@dataclass(frozen=True)
class Lines:
    """All hosts' lines, in their order. mtu: bytes of the largest IP packet. seed: of losses and jitter."""

    hosts: tuple[Line, ...]
    mtu: int = 1500
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> Lines:
        """Read a TOML file; raises `ConfigError`, which names it.

        The file: mtu, seed, and [[peers]] groups with the names of `Line` and count (1), how many hosts have such a
        line. What is left out is as in `Line`: unlimited, immediate, without loss.
        """
        text = tables.read(path)
        try:
            return cls.of(tables.parse(text))
        except ConfigError as error:
            raise ConfigError(f"lines '{path}': {error}") from error

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Lines:
        """Return the lines that the table of such a file describes; raises `ConfigError`."""
        values = _checked(table, _TOP)
        groups = values.pop("peers", [])
        if not groups or not all(isinstance(group, Mapping) for group in groups):
            raise ConfigError("no hosts are described; write [[peers]] and below it such as: up_mbit = 20")
        hosts = tuple(chain.from_iterable(_group(group, number) for number, group in enumerate(groups, 1)))
        if len(hosts) > MAX_HOSTS:
            raise ConfigError(f"{len(hosts)} hosts are described; one machine takes {MAX_HOSTS} at most")
        return cls(hosts, **values)

    def table(self) -> dict[str, Any]:
        """Return what `of` makes the same lines of."""
        return {"mtu": self.mtu, "seed": self.seed, "peers": [asdict(line) for line in self.hosts]}


def _group(group: Mapping[str, Any], number: int) -> repeat[Line]:
    where = f"[[peers]] number {number}"
    values = _checked(group, {"count": int, **_LINE}, where)
    count = values.pop("count", 1)
    return repeat(Line(**values), count)


def _checked(table: Mapping[str, Any], kinds: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    place = f" in {where}" if where else ""
    lists = {key: value for key, value in table.items() if kinds.get(key) is list}
    unlimited = {key: value for key, value in table.items() if key in ("up_mbit", "down_mbit") and value == math.inf}
    rest = {key: value for key, value in table.items() if key not in lists and key not in unlimited}
    values = tables.typed(rest, kinds, where)
    for key, value in values.items():
        low, high = _BOUNDS[key]
        if not low <= value <= high:
            raise ConfigError(f"'{key}'{place} is {value}; give a number from {low:g} to {high:g}")
    for key, value in lists.items():
        if not isinstance(value, list | tuple):
            raise ConfigError(f"'{key}'{place} is {value!r}; give a list")
    if "blackouts" in lists:
        lists["blackouts"] = tuple(_blackout(span, place) for span in lists["blackouts"])
    return {**values, **unlimited, **lists}


def _blackout(span: Any, place: str) -> tuple[float, float]:
    match span:
        case [int() | float() as from_s, int() | float() as to_s] if 0 <= from_s <= to_s:
            return float(from_s), float(to_s)
    raise ConfigError(f"a blackout{place} is {span!r}; give [from, to] in seconds since the start, such as [10, 12.5]")
