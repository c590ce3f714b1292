"""`peer simulate` for tests: called in this process or started as one, with a text and a model that take no time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from peer.cli.main import group

PEER = Path(sys.executable).with_name("peer")
DEADLINE_S = 180.0

WORDS = ("the", "whale", "sea", "ship", "a", "of", "and", "captain", "white", "boat", "rope", "night")
TEXT = " ".join(WORDS[number * number % 101 % len(WORDS)] for number in range(2000))
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


def peer(folder: Path, *arguments: str) -> Result:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(group, ["simulate", *arguments], catch_exceptions=False)
    finally:
        os.chdir(before)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the command as a process, its standard output and error in files."""
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([PEER, "simulate", *arguments], cwd=folder, env=environment, stdout=out, stderr=err)


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something is so, while a process runs."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end
        time.sleep(0.05)


def has(path: Path, words: str) -> bool:
    return path.exists() and words in path.read_text()


def files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return what the simulations left: content and time of every file."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
