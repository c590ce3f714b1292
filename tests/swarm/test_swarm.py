"""`peer swarm` itself: real processes, a real DHT, real streams."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer import checkpoint, tail
from peer.home import Home

pytestmark = pytest.mark.slow

PEER = Path(sys.executable).with_name("peer")
DEADLINE_S = 300.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {DEADLINE_S:.0f} s"
        time.sleep(0.1)


def living(folder: Path) -> list[str]:
    """Return the command lines of all processes that have to do with a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if str(folder) in line:
            lines.append(line)
    return lines


class Running:
    """`peer swarm` as a process, in a folder that is its home, with what it printed so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.home = folder / "home"
        self._out, self._errors = folder / "out", folder / "errors"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            command = [str(PEER), "swarm", *arguments, "--home", str(self.home)]
            self.process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)

    def out(self) -> str:
        return self._out.read_text()

    def errors(self) -> str:
        return self._errors.read_text()

    def ended(self) -> int:
        """Wait for the end and return the exit status."""
        return self.process.wait(DEADLINE_S)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Running]:
    swarm = Running(folder, *arguments)
    try:
        yield swarm
    finally:
        swarm.process.kill()
        swarm.process.wait()
        until(lambda: not living(swarm.home), "the end of all processes")


def test_a_swarm_trains_one_model_and_ends_with_one_json_object(tmp_path: Path) -> None:
    arguments = ["--peers", "3", "--rounds", "3", "--seed", "1", "--json"]
    done = subprocess.run(
        [str(PEER), "swarm", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    found = json.loads(done.stdout)
    assert list(found) == [
        "peers",
        "rounds",
        "heldout_start",
        "heldout_end",
        "heldout_average_end",
        "meetings",
        "skipped",
        "bytes_sent_per_round",
        "disagreement",
        "wall_s",
    ]
    assert (found["peers"], found["rounds"], len(found["heldout_end"])) == (3, 3, 3)
    assert 5.3 < found["heldout_start"] < 5.8  # ln 257 = 5.55: it knows nothing
    assert max(*found["heldout_end"], found["heldout_average_end"]) < 3.5
    assert found["meetings"] > 0
    # on this machine's own lines all of the model travels sooner or later: 4.2 MB each way
    most = 2 * found["meetings"] * 4.3e6 / (3 * 3)
    assert 1e4 < found["bytes_sent_per_round"] < most
    assert 0 < found["disagreement"] < 0.5
    for number in (1, 2, 3):
        assert re.search(rf"^peer {number} done: round 3/3, loss \d", done.stderr, re.MULTILINE), done.stderr
    assert not list(tmp_path.glob("peer-swarm-*"))
    assert not living(tmp_path)


def test_a_killed_peer_is_named_and_an_interrupt_still_gets_a_report(tmp_path: Path) -> None:
    with running(tmp_path, "--peers", "2", "--rounds", "50", "--json") as swarm:
        homes = [Home(swarm.home / f"peer-{number}") for number in (1, 2)]
        until(lambda: all(checkpoint.newest(home.path) for home in homes), "a checkpoint of both")
        holder = homes[0].holder()
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)
        until(lambda: "peer 1 failed" in swarm.errors(), "word of the killed peer")
        swarm.process.send_signal(signal.SIGINT)
        assert swarm.ended() == 1
        assert not living(swarm.home)
        assert "peer 2 stopped: round" in swarm.errors()
        assert re.search(
            r"^peer 1 failed at round \d+: it was killed by SIGKILL; its log '", swarm.errors(), re.MULTILINE
        )
        assert "peer 2 failed" not in swarm.errors()
        assert "bootstrap node" not in swarm.errors()
        assert str(swarm.home) in swarm.errors().splitlines()[-1]
        found = json.loads(swarm.out())
        assert (found["peers"], found["rounds"]) == (2, 50)
        assert max(found["heldout_end"]) < 5 < found["heldout_start"]
        happened = [event for home in homes for event in tail.read(home.events)]
        called = [event for event in happened if event["event"] == "meeting" and event["role"] == "caller"]
        skipped = [event for event in happened if event["event"] == "skip" and event["partner"] is not None]
        assert found["meetings"] == len(called)
        assert sum(found["skipped"].values()) == len(skipped)
        assert all(checkpoint.newest(home.path) for home in homes)


def test_a_swarm_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path, "--peers", "2", "--rounds", "50") as swarm:
        homes = [Home(swarm.home / f"peer-{number}") for number in (1, 2)]
        until(lambda: all(home.holder() for home in homes), "two daemons")
        assert len(living(swarm.home)) >= 4
        swarm.process.kill()
        until(lambda: not living(swarm.home), "the end of all processes")


def test_a_home_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    done = subprocess.run(
        [str(PEER), "swarm", "--home", str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert done.stderr.endswith(f"peer: folder '{tmp_path}' is not empty; give --home a new one for this swarm\n")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
