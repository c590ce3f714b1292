"""Peers on an emulated internet, each a process on a host of its own, and the node by which they find one another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from benchmarks.bystanders import Bystanders
from benchmarks.worker import Failed
from peer.crew import Child
from peer.home import Home
from peer.manifest import Manifest
from peer.tail import Record, Tail
from tests.wan import Line, Lines, Wan

Kind = Literal["peerloom", "foreground", "alone", "diloco"]
"""What a peer runs: `peer join`; the same but with training that waits for meetings; the same without a bootstrap, so
that it meets nobody; DiLoCo over hivemind's averager."""

ROOT = Path(__file__).resolve().parents[1]
NODE = 0
"""The host of the node; peers are on those after it."""

TICK_S = 0.2
COMING_UP_S = 90.0

_PEER = (sys.executable, "-c", "from peer.cli.main import main; main()")
_FOREGROUND = (sys.executable, "-m", "benchmarks.foreground")
_DILOCO = (sys.executable, "-m", "benchmarks.diloco")
_ADDRESS = re.compile(r"--bootstrap (/\S+)")


@dataclass
class Place:
    """One peer: its home, its process, and what its events said so far."""

    home: Home
    child: Child
    tail: Tail
    records: list[Record] = field(default_factory=list)

    @property
    def round(self) -> int:
        """Outer steps done."""
        return max((record["round"] for record in self.records if record["event"] == "round"), default=0)

    @property
    def began(self) -> bool:
        """Whether it trains, or did."""
        return any(record["event"] == "start" for record in self.records)


class Fleet:
    """For a `with` statement: as many peers of one kind as there are lines; all are killed at its end.

    folder: not there yet. lines: of the peers; the node has one of its own without a limit. mtu: bytes of a packet.
    latency_ms: of the node's line, one way. others: the share of the processor that other programs of this machine had
    while the peers trained.
    """

    def __init__(
        self, kind: Kind, run: Manifest, folder: Path, lines: Sequence[Line], mtu: int = 1500, latency_ms: float = 0.0
    ) -> None:
        self._kind, self._run, self._folder = kind, run, folder
        self._wan = Wan(Lines((Line(latency_ms=latency_ms), *lines), mtu=mtu))
        self._count = len(lines)
        self.places: list[Place] = []
        self.others = 0.0

    def __enter__(self) -> Fleet:
        """Bring all up; raises `ConfigError` where lines cannot be emulated, and `Failed`."""
        self._wan.__enter__()
        try:
            Home(self._folder).create()
            self._run_file.write_text(self._run.to_toml(), encoding="utf-8")
            bootstrap = None if self._kind == "alone" else self._node()
            self.places = [self._place(number, bootstrap) for number in range(1, self._count + 1)]
        except BaseException:
            self._wan.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for place in self.places:
            place.tail.close()
        self._wan.close()

    def watch(self, rounds: int, within_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Return once all have done so many rounds; raises `Failed` when one ends early, or it takes too long.

        look: called again and again.
        """
        end_s, bystanders = time.monotonic() + within_s, Bystanders()
        while True:
            ended = [place for place in self.places if place.child.process.poll() is not None]  # first: logs are whole
            for place in self.places:
                place.records += place.tail.new()
            look()
            if all(place.round >= rounds for place in self.places):
                self.others = bystanders.share()
                return
            for place in ended:
                if place.round < rounds:
                    raise Failed(f"a peer ended after {place.round} rounds{place.child.last_words()}")
            if time.monotonic() > end_s:
                slowest = min(self.places, key=lambda place: place.round)
                raise Failed(
                    f"{slowest.round} of {rounds} rounds were done in {within_s:.0f} s{slowest.child.last_words()}"
                )
            time.sleep(TICK_S)

    @property
    def _run_file(self) -> Path:
        return self._folder / "run.toml"

    def _node(self) -> str:
        """Start the node by which peers find one another and return its address."""
        address, home = self._wan.address(NODE), Home(self._folder / "node")
        if self._kind == "diloco":
            child = self._launch(NODE, home, *_DILOCO, "node", address)
        else:
            where = ("--port", "7700", "--announce", address, "--home", str(home.path))
            child = self._launch(NODE, home, *_PEER, "bootstrap", *where)
        end_s = time.monotonic() + COMING_UP_S
        while not (found := _ADDRESS.search(child.log.read_text(errors="replace"))):
            if child.process.poll() is not None or time.monotonic() > end_s:
                raise Failed(f"the bootstrap node did not come up{child.last_words()}")
            time.sleep(TICK_S)
        return found[1]

    def _place(self, number: int, bootstrap: str | None) -> Place:
        home, address = Home(self._folder / f"peer-{number}"), self._wan.address(number)
        if self._kind == "diloco":
            which = (address, str(number), str(self._count), str(bootstrap))
            words = [*_DILOCO, "join", str(self._run_file), str(home.path), *which]
        else:
            program = _FOREGROUND if self._kind == "foreground" else _PEER
            words = [*program, "join", "--run", str(self._run_file), "--home", str(home.path), "--announce", address]
            words += ["--bootstrap", bootstrap] if bootstrap else []
        return Place(home, self._launch(number, home, *words), Tail(home.events))

    def _launch(self, host: int, home: Home, *words: str) -> Child:
        home.create()
        log = home.path / "log.txt"
        with log.open("wb") as output:
            process = self._wan.popen(
                host,
                words,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Child(process, log)
