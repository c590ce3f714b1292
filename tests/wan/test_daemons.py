"""Real daemons behind emulated lines: a saturated uplink, a line that is cut for a while, a peer ten times slower."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from peer import tail
from peer.manifest import Manifest

from .lines import Line, Lines
from .wan import Wan

pytestmark = [pytest.mark.usefixtures("emulation"), pytest.mark.slow]

PEER = (sys.executable, "-c", "from peer.cli.main import main; main()")
FLOOD = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9)) as line:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        line.sendall(bytes(65536))
"""
DRAIN = """
import socket
with socket.create_server(("0.0.0.0", 9)) as listener:
    print("listening", flush=True)
    while True:
        line, _ = listener.accept()
        while line.recv(1 << 20):
            pass
"""
DEADLINE_S = 240.0
ROUND_S = 3.0


class Folk:
    """Daemons on hosts of their own; host 0 has the bootstrap node."""

    def __init__(self, wan: Wan, folder: Path, layers: int) -> None:
        self.wan, self.folder, self.processes = wan, folder, dict[int, subprocess.Popen[bytes]]()
        config = folder / "config.json"
        config.write_text(json.dumps(Manifest.preset("gpt-nano").config | {"n_layer": layers, "n_embd": 32 * layers}))
        run = Manifest.preset(str(config))
        data = replace(run.data, sequence_length=64, batch=2)
        run = replace(run, name="wan", tokenizer="bytes", local_steps=None, round_seconds=ROUND_S, data=data)
        run = replace(run, rounds=100_000)
        self.run = folder / "run.toml"
        self.run.write_text(run.to_toml())
        self.start(0, "bootstrap", "--port", "7700", "--announce", wan.address(0))
        self.until(lambda: "--bootstrap /ip4" in self.log(0))
        found = re.search(r"--bootstrap (/\S+)", self.log(0))
        assert found
        self.bootstrap = found[1]

    def start(self, host: int, *arguments: str) -> None:
        with self._log(host).open("ab") as log:
            command = [*PEER, *arguments, "--home", str(self.folder / str(host))]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[host] = self.wan.popen(host, command, stdout=log, stderr=log, env=environment)

    def join(self, host: int, *more: str) -> None:
        where = ("--bootstrap", self.bootstrap, "--device", "cpu", "--announce", self.wan.address(host))
        self.start(host, "join", "--run", str(self.run), *where, *more)

    def events(self, host: int, kind: str) -> list[tail.Record]:
        path = self.folder / str(host) / "events.jsonl"
        return [event for event in tail.read(path) if event["event"] == kind] if path.exists() else []

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            words = "\n".join(f"{host}: {self.log(host)[-800:]}" for host in self.processes)
            assert all(process.poll() is None for process in self.processes.values()), words
            assert time.monotonic() < end, words
            time.sleep(0.2)

    def log(self, host: int) -> str:
        return self._log(host).read_text() if self._log(host).exists() else ""

    def met(self, host: int) -> int:
        return len(self.events(host, "meeting"))

    def _log(self, host: int) -> Path:
        return self.folder / f"{host}.log"


@contextmanager
def folk(folder: Path, *lines: Line, layers: int = 1) -> Iterator[Folk]:
    with Wan(Lines((Line(), *lines))) as wan:
        yield Folk(wan, folder, layers)


def since(events: list[tail.Record], stamp: str) -> list[tail.Record]:
    return [event for event in events if event["time"] > stamp]


def test_a_saturated_uplink_loses_no_heartbeats_and_no_meeting(tmp_path: Path) -> None:
    home_line = Line(up_mbit=2, down_mbit=20, latency_ms=20, queue_ms=500)
    with folk(tmp_path, home_line, Line(up_mbit=20, down_mbit=20, latency_ms=20)) as those:
        those.join(1)
        those.until(lambda: bool(those.events(1, "round")))
        those.join(2)
        those.until(lambda: those.met(1) >= 3 and those.met(2) >= 3)
        drain = those.wan.popen(0, [sys.executable, "-c", DRAIN], stdout=subprocess.PIPE)
        assert drain.stdout is not None and drain.stdout.readline()
        drain.stdout.close()
        before, began = those.wan.traffic(1), those.events(2, "round")[-1]["time"]
        flood = those.wan.popen(1, [sys.executable, "-c", FLOOD, those.wan.address(0), "40"])
        flood.wait()
        carried = those.wan.traffic(1).sent_bytes - before.sent_bytes
        assert 8 * carried / 40 > 0.8 * 2e6, "the uplink was not saturated"
        rounds = since(those.events(2, "round"), began)
        assert len(rounds) > 5 and {event["peers"] for event in rounds} == {1}
        assert since(those.events(1, "meeting"), began)
        broken = [
            event
            for host in (1, 2)
            for event in since(those.events(host, "skip"), began)
            if event["outcome"] == "failed"
        ]
        assert not broken, json.dumps(broken)


def test_a_line_that_is_cut_for_a_while_costs_a_meeting_and_nothing_else(tmp_path: Path) -> None:
    with folk(tmp_path, *[Line(up_mbit=20, down_mbit=20, latency_ms=20)] * 2) as those:
        those.join(1)
        those.until(lambda: bool(those.events(1, "round")))
        those.join(2)
        those.until(lambda: those.met(1) >= 3 and those.met(2) >= 3)
        began = those.events(1, "round")[-1]["time"]
        those.wan.blackout(1, seconds=20)
        those.until(lambda: len(since(those.events(1, "round"), began)) >= 8)
        stalls = [event["stall_s"] / event["seconds"] for event in since(those.events(1, "round"), began)]
        assert max(stalls) < 0.5  # it trained through
        met = those.met(1), those.met(2)
        those.until(lambda: those.met(1) >= met[0] + 3 and those.met(2) >= met[1] + 3)
        reasons = {event["reason"] for host in (1, 2) for event in since(those.events(host, "skip"), began)}
        assert reasons <= {
            "silent",
            "lost",
            "unreachable",
            "in-doubt",
            "lag",  # by records as old as the cut
            "resting",
            "alone",
            "busy",
            "crossing",
            "stopping",
        }


def test_on_a_slow_line_meetings_are_as_rich_as_it_affords_and_both_agree_on_it(tmp_path: Path) -> None:
    slow, fast = Line(up_mbit=0.25, down_mbit=2, latency_ms=30), Line(up_mbit=50, down_mbit=50, latency_ms=5)
    with folk(tmp_path, slow, fast, fast, layers=4) as those:
        for host in (2, 3, 1):  # a newcomer's donor is a fast one
            those.join(host)
            those.until(lambda host=host: bool(those.events(host, "round")))  # type: ignore[misc]
        those.until(lambda: those.met(1) >= 12 and those.met(2) >= 24)
        me = those.events(1, "start")[0]["peer_id"]
        slow_ones = [event for event in those.events(2, "meeting") if event["partner"] == me][4:]  # once they know
        fast_ones = [event for event in those.events(2, "meeting") if event["partner"] != me][8:]
        assert slow_ones and fast_ones
        assert max(event["budget_bytes"] for event in slow_ones) < min(event["budget_bytes"] for event in fast_ones)
        chosen = those.events(1, "choice")[-1]
        assert chosen["up_bits_per_s"] < 0.4e6, chosen["why"]
        # a share of a half, over many rounds; the first meetings did not know the line yet
        last = since(those.events(1, "round"), those.events(1, "meeting")[6]["time"])
        sent = last[-1]["bytes_sent"] - last[0]["bytes_sent"]
        seconds = sum(event["seconds"] for event in last[1:])
        assert 8 * sent / seconds < 0.75 * 0.25e6
