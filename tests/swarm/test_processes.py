"""Real daemons as processes of their own: hivemind's DHT, gRPC, kill -9, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peer import checkpoint, tail
from peer.home import Home
from peer.manifest import Manifest
from peer.status import status

pytestmark = pytest.mark.slow

PEER = Path(sys.executable).with_name("peer")
DEADLINE_S = 180.0
LEAVING_S = 10.0


class Folk:
    """A bootstrap node and daemons, each with a home in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        config = folder / "tiny.json"
        tiny = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64}
        config.write_text(json.dumps(Manifest.preset("gpt-nano").config | tiny))
        run = Manifest.preset(str(config))
        data = replace(run.data, sequence_length=64, batch=4)
        # Rounds of some tenths of a second: in shorter ones peers come too far apart whenever one gets less of a core.
        self.manifest = replace(
            run, name="folk", tokenizer="bytes", rounds=100_000, local_steps=64, round_seconds=None, data=data
        )
        self.run = self.write("run.toml", self.manifest)
        self.start("bootstrap", "bootstrap", "--port", "0")
        self.until(lambda: "--bootstrap" in self.log("bootstrap"))
        self.bootstrap = re.findall(r"--bootstrap (\S+)", self.log("bootstrap"))[0]

    def write(self, name: str, run: Manifest) -> Path:
        """Write a manifest."""
        path = self.folder / name
        path.write_text(run.to_toml())
        return path

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Run `peer ARGUMENTS`, in a home of this name, which may exist."""
        with self._log(name).open("ab") as log:
            command = [str(PEER), *arguments, "--home", str(self.folder / name)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self.processes[name]

    def join(self, name: str, *arguments: str, run: Path | None = None) -> subprocess.Popen[bytes]:
        """Start or restart a daemon."""
        return self.start(
            name, "join", "--run", str(run or self.run), "--bootstrap", self.bootstrap, "--device", "cpu", *arguments
        )

    def events(self, name: str, kind: str) -> list[tail.Record]:
        """Return what a daemon has logged of one kind."""
        path = self.folder / name / "events.jsonl"
        return [event for event in tail.read(path) if event["event"] == kind] if path.exists() else []

    def log(self, name: str) -> str:
        """Return what a process printed."""
        return self._log(name).read_text() if self._log(name).exists() else ""

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Wait until something is so."""
        end = time.monotonic() + deadline_s
        while not condition():
            failed = [name for name, process in self.processes.items() if process.poll() not in (None, 0, -9)]
            words = "\n".join(f"{name}: {self.log(name)[-500:]}" for name in failed or self.processes)
            assert not failed, words
            assert time.monotonic() < end, words
            time.sleep(0.1)

    def together(self, *names: str) -> None:
        """Wait until each has met somebody."""
        self.until(lambda: all(self.events(name, "meeting") for name in names))

    def leave(self, name: str, number: int = signal.SIGTERM) -> float:
        """Send a signal; return after how many seconds the process ended, and see to it that it ended well."""
        began = time.monotonic()
        self.processes[name].send_signal(number)
        assert self.processes[name].wait(DEADLINE_S) == 0, self.log(name)[-1000:]
        return time.monotonic() - began

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@pytest.fixture
def folk(tmp_path: Path) -> Iterator[Folk]:
    folk = Folk(tmp_path)
    try:
        yield folk
    finally:
        folk.end()


def children(pid: int) -> set[int]:
    """Return the processes below one, of all generations."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
    found, size = {pid}, 0
    while size < len(found):
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def gone(pids: set[int]) -> bool:
    """Tell whether processes have ended; one that waits for nobody to read its status has."""
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
        except OSError:
            continue
    return all(state == "Z" for state in states)


def test_four_peers_train_one_dies_one_comes_late_one_returns_and_another_run_stays_apart(folk: Folk) -> None:
    names = ["ann", "ben", "cat", "dan"]
    for name in names:
        folk.join(name)
    folk.together(*names)

    # one is killed: the others notice, and go on among themselves
    folk.until(lambda: bool(folk.events("dan", "checkpoint")))
    victims = children(folk.processes["dan"].pid)
    assert victims, "the daemon had no p2pd"
    folk.processes["dan"].kill()
    folk.processes["dan"].wait()
    folk.until(lambda: gone(victims), LEAVING_S)
    met = {name: len(folk.events(name, "meeting")) for name in names}
    folk.until(lambda: all(len(folk.events(name, "meeting")) >= met[name] + 3 for name in names[:3]))
    assert {event["partner"] for event in folk.events("ann", "meeting")[met["ann"] + 1 :]} <= {
        folk.events(name, "start")[0]["peer_id"] for name in names[1:3]
    }

    # one comes late: it starts where the others are
    folk.join("eve")
    folk.until(lambda: bool(folk.events("eve", "catch-up")) and bool(folk.events("eve", "meeting")))
    caught = folk.events("eve", "catch-up")[0]
    assert caught["round"] > 0
    assert folk.events("eve", "start")[0]["how"] == "caught-up"
    assert folk.events("eve", "start")[0]["round"] == caught["round"]

    # the one that was killed returns: from its own checkpoint, or, if the others are too far ahead, from one of them
    last = folk.events("dan", "checkpoint")[-1]["round"]
    folk.join("dan")
    folk.until(lambda: len(folk.events("dan", "start")) == 2)
    start = folk.events("dan", "start")[-1]
    assert start["how"] in ("resumed", "caught-up")
    assert start["round"] >= last
    assert "resuming at round" in folk.log("dan")

    # two of another run find each other on the same DHT, and nobody else
    other = folk.write("other.toml", replace(folk.manifest, name="others", seed=1))
    folk.join("fay", run=other)
    folk.join("gus", run=other)
    folk.together("fay", "gus")
    ids = {name: folk.events(name, "start")[0]["peer_id"] for name in folk.processes if name != "bootstrap"}
    for name in ("fay", "gus"):
        assert {event["partner"] for event in folk.events(name, "meeting")} <= {ids["fay"], ids["gus"]}
    for name in ("ann", "ben", "cat", "dan", "eve"):
        assert {event["partner"] for event in folk.events(name, "meeting")}.isdisjoint({ids["fay"], ids["gus"]})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_daemon_in_ten_seconds_with_everything_saved_and_no_child_left(
    folk: Folk, number: signal.Signals
) -> None:
    for name in ("ann", "ben"):
        folk.join(name)
    folk.together("ann", "ben")
    below = children(folk.processes["ann"].pid)
    assert folk.leave("ann", number) < LEAVING_S
    assert gone(below)
    (stop,) = folk.events("ann", "stop")
    assert stop["reason"] == "signal"
    loaded = checkpoint.load(folk.folder / "ann", folk.manifest.run_id)
    assert loaded is not None
    assert loaded.state.round == stop["round"]
    assert status(Home(folk.folder / "ann")).running is False

    # its record is withdrawn: the other one soon knows of nobody
    folk.until(lambda: folk.events("ben", "round")[-1]["peers"] == 0, 30)

    # and it goes on exactly where it was
    folk.join("ann", "--rounds", "1")
    assert folk.processes["ann"].wait(DEADLINE_S) == 0, folk.log("ann")
    start, stop = folk.events("ann", "start")[-1], folk.events("ann", "stop")[-1]
    if start["how"] == "resumed":
        assert start["round"] == loaded.state.round
    assert (stop["reason"], stop["round"]) == ("finished", start["round"] + 1)


def test_a_second_signal_forces_and_the_previous_checkpoint_stands(folk: Folk) -> None:
    folk.join("ann")
    folk.until(lambda: len(folk.events("ann", "checkpoint")) >= 2)
    below = children(folk.processes["ann"].pid)
    folk.processes["ann"].send_signal(signal.SIGINT)
    folk.processes["ann"].send_signal(signal.SIGINT)
    assert folk.processes["ann"].wait(LEAVING_S) in (0, 130)
    folk.until(lambda: gone(below), LEAVING_S)
    loaded = checkpoint.load(folk.folder / "ann", folk.manifest.run_id)
    assert loaded is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.state.weights.values())


def test_a_daemon_without_a_reachable_bootstrap_starts_a_swarm_that_others_join_with_the_printed_command(
    folk: Folk,
) -> None:
    folk.leave("bootstrap")
    folk.join("ann")
    folk.until(lambda: "peer join" in folk.log("ann"))
    printed = re.search(r"peer join --run \S+ --bootstrap (\S+)", folk.log("ann"))
    assert printed
    assert "No bootstrap could be reached" in folk.log("ann")
    folk.bootstrap = printed[1]
    folk.join("ben")
    folk.together("ann", "ben")
    assert "No bootstrap" not in folk.log("ben")


def test_a_home_that_a_live_daemon_uses_is_refused_and_the_daemon_is_not_disturbed(folk: Folk) -> None:
    folk.join("ann")
    folk.until(lambda: bool(folk.events("ann", "round")))
    pid = folk.processes["ann"].pid
    command = [str(PEER), "join", "--run", str(folk.run), "--home", str(folk.folder / "ann")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == 1
    assert str(pid) in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    rounds = len(folk.events("ann", "round"))
    folk.until(lambda: len(folk.events("ann", "round")) > rounds)
    shown = status(Home(folk.folder / "ann"))
    assert shown.running
    assert shown.pid == pid


def test_what_a_daemon_trained_is_exported_while_it_runs(folk: Folk) -> None:
    folk.join("ann")
    folk.until(lambda: bool(folk.events("ann", "checkpoint")))
    out = folk.folder / "model"
    command = [str(PEER), "export", str(out), "--home", str(folk.folder / "ann")]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "i = t('Call me Ishmael.', return_tensors='pt'); print(m(**i).logits.shape, t.decode(i['input_ids'][0]))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert "16, 257" in loaded.stdout
    assert "Call me Ishmael." in loaded.stdout
