"""What peers did over some rounds, as their own records say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce
from operator import add
from typing import Any

import torch

from benchmarks import diloco, foreground
from benchmarks.fleet import Kind, Place
from benchmarks.worker import Failed
from peer.home import Home
from peer.tail import Record

LEFT = 0.05
"""What averaging in fp16 may leave of the distance to the true mean; it leaves less than a tenth of this."""


@dataclass(frozen=True)
class Course:
    """One peer's rounds, or those of several added up.

    seconds: wall time. waited_s: of it, training waited. search_s: of that, for a group to be found. sent_bytes,
    received_bytes: of meetings, or where there are none of all packets. codecs: meetings held with each.
    """

    rounds: int
    steps: int
    seconds: float
    waited_s: float
    search_s: float = 0.0
    meetings: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    codecs: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Course) -> Course:
        """Return both together."""
        names = ("rounds", "steps", "seconds", "waited_s", "search_s", "meetings", "sent_bytes", "received_bytes")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Course(**sums, codecs=dict(Counter(self.codecs) + Counter(other.codecs)))

    @property
    def steps_per_s(self) -> float:
        """Inner steps a second of one peer, the mean where there are several."""
        return self.steps / self.seconds

    @property
    def waited(self) -> float:
        """The share of wall time in which training waited."""
        return self.waited_s / self.seconds


def course(kind: Kind, places: Sequence[Place], skip: int) -> Course:
    """Return what these peers did after their first rounds, of which so many are left out."""
    return reduce(add, (_course(kind, place, skip) for place in places))


def _course(kind: Kind, place: Place, skip: int) -> Course:
    rounds = [record for record in place.records if record["event"] == "round"]
    counted, before = rounds[skip:], rounds[skip - 1]
    since, until = before["time"], counted[-1]["time"]
    met = [record for record in _between(place.records, since, until) if record["event"] == "meeting"]
    found = Course(
        rounds=len(counted),
        steps=sum(record["steps"] for record in counted),
        seconds=sum(record["seconds"] for record in counted),
        waited_s=sum(record["stall_s"] for record in counted),
        meetings=len(met),
        sent_bytes=counted[-1]["bytes_sent"] - before["bytes_sent"],
        received_bytes=counted[-1]["bytes_received"] - before["bytes_received"],
        codecs=dict(Counter(record["codec"] for record in met)),
    )
    if kind == "foreground":
        waits = _lines(place.home, foreground.FILE)
        between = (wait["seconds"] for wait in waits if unix_s(since) < wait["time"] <= unix_s(until))
        return replace(found, waited_s=found.waited_s + sum(between))
    if kind == "diloco":
        searches = (each["found_s"] - each["began_s"] for each in _lines(place.home, diloco.FILE)[skip : len(rounds)])
        return replace(found, search_s=sum(searches))
    return found


def check(places: Sequence[Place]) -> None:
    """Raise `Failed` unless every averaging, where there were any, gave every peer the mean of what all of them had."""
    for averagings in zip(*(_lines(place.home, diloco.FILE) for place in places), strict=False):
        own = torch.tensor([each["own"] for each in averagings])
        mean = torch.tensor([each["mean"] for each in averagings])
        left = float((mean - own.mean(0)).norm() / (own - own.mean(0)).norm())
        if not left <= LEFT:
            raise Failed(f"hivemind left {left:.1%} of the distance to the mean in round {averagings[0]['round']}")


def unix_s(stamp: str) -> float:
    """Return the Unix time of an event's stamp."""
    return datetime.fromisoformat(stamp).timestamp()


def began_s(place: Place) -> float:
    """Return the Unix time at which a peer began to train."""
    return next(unix_s(record["time"]) for record in place.records if record["event"] == "start")


def _between(records: Iterable[Record], since: str, until: str) -> Iterable[Record]:
    return (record for record in records if since < record["time"] <= until)


def _lines(home: Home, name: str) -> list[dict[str, Any]]:
    path = home.path / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
