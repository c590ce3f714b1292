"""Processes of ours on this machine: `peer` commands, each with a log, none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 15.0
"""A daemon that is asked to end does so in ten seconds; past these it is killed."""

LAST_LINES = 6
LAST_BYTES = 4096

_COMMAND = ("-P", "-c", "from peer import leash; leash.hold(); from peer.cli.main import main; main()")


@dataclass(frozen=True)
class Child:
    """A process that we started; what it prints goes into its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def last_words(self) -> str:
        """Return the end of its log, to be put behind a sentence."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        if not lines:
            return f"; its log '{self.log}' is empty"
        return f"; its log '{self.log}' ends with:\n" + "\n".join(f"  {line}" for line in lines)


class Crew:
    """Starts processes, each on a leash and with so many torch threads; whoever is left at the end is ended."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        # More torch threads than cores in all make every step 10 to 100 times slower.
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._children: list[Child] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._children)

    def start(self, name: str, *arguments: str) -> Child:
        """Run `peer ARGUMENTS` with a new home of this name in the folder, and log.txt in it."""
        home = self._folder / name
        home.mkdir(mode=0o700)
        return self.launch(home / "log.txt", *arguments, "--home", str(home))

    def launch(self, log: Path, *arguments: str) -> Child:
        """Run `peer ARGUMENTS`; what it prints goes into a log that begins anew."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *_COMMAND, *arguments],
                env=self._environment,
                stdin=subprocess.PIPE,  # the leash; nothing is ever written
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # or Ctrl-C would reach it twice, once through us
            )
        child = Child(process, log)
        self._children.append(child)
        return child

    def end(self, children: list[Child]) -> None:
        """Ask children to end, and kill those that have not after some seconds."""
        for child in children:
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()


class Interrupts:
    """Counts signals (SIGINT and SIGTERM if not told others) instead of ending this process, until it is left.

    note: called at each with the count, between two instructions of the main thread; what it raises is raised there.
    """

    def __init__(
        self,
        note: Callable[[int], None] | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.count = 0
        self._note = note
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._another)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _another(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._note is not None:
            self._note(self.count)


def cores() -> int:
    """Return how many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
