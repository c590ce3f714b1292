from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import events
from peer.cli.status import command
from peer.errors import ConfigError
from peer.events import Event, EventLog, Record
from peer.home import Home
from peer.status import Failure, Paused, Status, Stopped, fold, status

PID = os.getpid()
START = events.Start(
    "12D3",
    "9f3a",
    "nano",
    "gpt-nano",
    1_100_000,
    "cpu",
    "float32",
    3,
    200,
    "fresh",
    ("h:1",),
    ("/ip4/1.2.3.4/tcp/1/p2p/Q",),
    PID,
    "0.1.0",
)
ROUND = events.Round(
    4, 16, 2.25, 1e-3, 4096, 8.0, 0.5, 3, 10, 5, 2, 9_000_000, 8_000_000, "ab", 0.25, 8, 8_800_000, None
)
MEETING = events.Meeting("cd", "caller", 4, 4, "rank4-int8", 5000, 0.5, 1000, 2000, 0.5, 0.1, 2e7, 0.01)
WAITING = events.Pause(4, "hours", "it goes on at 22:00")
CHOICE = events.Choice(3, 8.0, "none", 9_000, 2e7, 0.1, "half of 20 Mbit/s")
BUSY = events.Skip("ef", "declined", "busy", "it is in another meeting; no action is needed")
SILENT = events.Skip("ab", "failed", "silent", "it said nothing for 10 s; check the link")
SAVED = events.Checkpoint(4, "somewhere", 100, 0.1)
CAUGHT = events.CatchUp("gh", 9, 100, 1.0)
STOP = events.Stop(4, "signal", "at round 4 of 200")


def stamp(number: int) -> str:
    return f"2026-01-31T12:00:{number:02}.000Z"


def log_of(*several: Event) -> list[Record]:
    """Stamp events with one second after another."""
    return [{**events.record(event, 0.0), "time": stamp(number)} for number, event in enumerate(several)]


def lived(home: Home, *several: Event) -> None:
    """Have a daemon that wrote these events, and stopped."""
    with home.lock("9f3a", "12D3"):
        log = EventLog(home.events, now=iter(1_769_860_800.0 + n for n in range(99)).__next__)
        for event in several:
            log.write(event)
        log.close()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have moments shown in UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


# ---------------------------------------------------------------- fold


def test_nothing_folds_to_nothing() -> None:
    assert fold([]) == Status()


def test_a_start_says_who_and_what() -> None:
    found = fold(log_of(START))
    shared = {field.name for field in fields(START)} & {field.name for field in fields(Status)}
    assert shared == {field.name for field in fields(START)}
    for name in shared:
        expected = getattr(START, name)
        assert getattr(found, name) == (list(expected) if isinstance(expected, tuple) else expected)
    assert (found.started, found.heard, found.loss, found.partner) == (stamp(0), stamp(0), None, None)


def test_meetings_and_skips_add_up_and_a_round_sets_the_counts_right() -> None:
    found = fold(log_of(START, MEETING, MEETING, BUSY, BUSY, SILENT))
    assert (found.meetings, found.declined, found.failed) == (2, 2, 1)
    assert (found.bytes_sent, found.bytes_received, found.partner) == (2000, 4000, "cd")
    found = fold(log_of(START, MEETING, BUSY, SILENT, ROUND, MEETING, BUSY))
    assert (found.meetings, found.declined, found.failed) == (11, 6, 2)
    assert (found.bytes_sent, found.bytes_received, found.partner) == (9_001_000, 8_002_000, "cd")
    assert (found.round, found.loss, found.lr, found.peers, found.optimizer_bytes) == (4, 2.25, 1e-3, 3, 8_800_000)
    assert found.skipped == {"busy": 2, "silent": 1}


def test_the_last_failure_is_remembered_and_a_decline_is_none() -> None:
    first = events.Skip("xy", "failed", "lost", "the connection broke")
    found = fold(log_of(START, first, SILENT, BUSY))
    assert found.last_failure == Failure("ab", "silent", SILENT.detail, stamp(2))


def test_a_catch_up_moves_the_round() -> None:
    assert fold(log_of(START, CAUGHT)).round == 9


def test_a_stop_says_why_and_a_new_start_forgets_all_but_the_checkpoint() -> None:
    found = fold(log_of(START, MEETING, SILENT, ROUND, SAVED, STOP))
    assert found.stopped == Stopped("signal", "at round 4 of 200", stamp(5))
    assert (found.checkpoint_round, found.checkpoint_time, found.heard) == (4, stamp(4), stamp(5))
    again = fold(log_of(START, MEETING, SILENT, ROUND, SAVED, STOP, START))
    fresh = replace(fold(log_of(START)), started=stamp(6), heard=stamp(6))
    assert again == replace(fresh, checkpoint_round=4, checkpoint_time=stamp(4))


def test_an_error_before_training_leaves_the_round_as_it_was() -> None:
    found = fold(log_of(START, ROUND, STOP, events.Stop(0, "error", "port 7700 is in use; choose another")))
    assert found.round == 4
    assert found.stopped == Stopped("error", "port 7700 is in use; choose another", stamp(3))


def test_a_round_that_an_older_version_wrote_counts_too() -> None:
    start, ended = log_of(START, ROUND)
    del ended["optimizer_bytes"]
    found = fold([start, ended])
    assert (found.round, found.optimizer_bytes) == (4, None)


def test_a_diverged_loss_is_none() -> None:
    assert fold([{**log_of(START, ROUND)[1], "loss": None}]).loss is None


def test_unknown_kinds_are_passed_over() -> None:
    assert fold([*log_of(START), {"time": stamp(0), "event": "of-a-later-version"}]) == fold(log_of(START))


@settings(deadline=None)
@given(st.lists(st.sampled_from([START, ROUND, MEETING, BUSY, SILENT, SAVED, CAUGHT, STOP])))
def test_only_the_last_life_counts(several: list[Event]) -> None:
    found = fold(log_of(*several))
    last = max((number for number, event in enumerate(several) if event is START), default=0)
    life = several[last:]
    assert sum(found.skipped.values()) == sum(isinstance(event, events.Skip) for event in life)
    since_round = life[max((n for n, event in enumerate(life) if event is ROUND), default=-1) + 1 :]
    counted = 10 if ROUND in life else 0
    assert found.meetings == counted + since_round.count(MEETING)
    assert (found.stopped is not None) == (STOP in life)
    json.dumps(asdict(found))


# ---------------------------------------------------------------- a home


def test_a_home_without_a_daemon_is_an_error_with_the_next_step(home: Home) -> None:
    with pytest.raises(ConfigError, match=f"no daemon has run in home '{home.path}' yet; start one with: peer join"):
        status(home)
    assert not home.path.exists()


def test_a_running_daemon_has_a_process_and_an_uptime(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        EventLog(home.events).write(START)
        holder = home.holder()
        assert holder is not None
        found = status(home, now_s=holder.started + 90.0)
        assert (found.running, found.pid) == (True, PID)
        assert found.uptime_s == pytest.approx(90.0)
        assert found.name == "nano"


@pytest.mark.usefixtures("utc")
def test_a_daemon_that_waits_says_why_and_since_when(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        log = EventLog(home.events, now=lambda: 1_769_860_800.0)
        log.write(START)
        log.write(WAITING)
        assert status(home).paused == Paused("hours", "it goes on at 22:00", stamp(0))
        assert run(home).output.splitlines()[0] == (
            f"peer 12D3 waits since 2026-01-31 12:00:00: it goes on at 22:00 (process {PID})"
        )
        log.write(events.Resume(4, 60.0))
        assert status(home).paused is None


def test_a_daemon_that_was_started_while_it_has_to_wait_says_so_before_it_trains(home: Home) -> None:
    lived(home, replace(START, pid=1), WAITING, STOP)
    with home.lock("9f3a", "12D3"):
        assert status(home).paused is None  # the one before
        EventLog(home.events).write(WAITING)
        found = status(home)
        assert (found.started, found.paused and found.paused.reason) == ("", "hours")


def test_a_stopped_daemon_has_none(home: Home) -> None:
    lived(home, START, ROUND, STOP)
    found = status(home)
    assert (found.running, found.pid, found.uptime_s) == (False, None, None)
    assert (found.round, found.stopped) == (4, Stopped("signal", "at round 4 of 200", stamp(2)))


def test_a_daemon_that_is_coming_up_is_not_taken_for_the_one_before(home: Home) -> None:
    lived(home, replace(START, pid=1), SAVED, STOP)
    with home.lock("77", "other"):
        found = status(home)
        assert (found.running, found.run_id, found.peer_id, found.name) == (True, "77", "other", "")
        assert (found.stopped, found.checkpoint_round) == (None, 4)


# ---------------------------------------------------------------- peer status


def run(home: Home, *flags: str) -> Result:
    return CliRunner().invoke(command, ["--home", str(home.path), *flags], catch_exceptions=False)


@pytest.mark.usefixtures("utc")
def test_the_command_shows_a_running_peer(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        log = EventLog(home.events, now=lambda: 1_769_860_800.0)
        for event in (START, CHOICE, ROUND, SILENT, BUSY, BUSY, SAVED):
            log.write(event)
        log.close()
        lines = run(home).output.splitlines()
    assert lines[0].startswith(f"peer 12D3 is running: process {PID}, for ")
    assert lines[1:] == [
        "  run           nano 9f3a",
        "  model         gpt-nano, 1,100,000 parameters, float32 on cpu",
        "  round         4 of 200, loss 2.2500",
        "  optimizer     8.8 MB of memory",
        "  stalled       3.12% of the last round, for meetings",
        "  peers         3 known, last partner ab",
        "  meetings      10 done, 7 declined, 3 failed",
        "  choice        half of 20 Mbit/s",
        "  bytes         9.0 MB sent, 8.0 MB received",
        "  why not       busy 2, silent 1",
        "  last failure  silent with ab, 2026-01-31 12:00:00: it said nothing for 10 s; check the link",
        "  checkpoint    round 4, 2026-01-31 12:00:00",
        "  address       h:1",
        "  bootstrap     /ip4/1.2.3.4/tcp/1/p2p/Q",
    ]


def test_the_command_shows_a_new_peer_without_a_round(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        assert run(home).output.startswith(f"peer 12D3 is starting: process {PID}, for ")
        log = EventLog(home.events)
        log.write(START)
        log.close()
        output = run(home).output
    assert "  round         3 of 200, loss unknown until a round is done\n" in output
    assert "last partner none yet" in output


def test_the_command_says_that_a_home_has_seen_no_training(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        pass  # as a bootstrap node does, or a daemon that is killed while it starts
    result = run(home)
    assert result.exit_code == 0
    assert "is stopped: it ended before it began to train" in result.output


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize(
    ("last", "words"),
    [
        (STOP, "is stopped since 2026-01-31 12:00:02: it was asked to stop (at round 4 of 200)"),
        (events.Stop(4, "finished", "all"), "is stopped since 2026-01-31 12:00:02: it finished (all)"),
        (events.Stop(4, "error", "no room"), "is stopped since 2026-01-31 12:00:02: an error (no room)"),
        (SAVED, "is stopped: it was killed, or its machine went down; last heard of 2026-01-31 12:00:02"),
    ],
)
def test_the_command_says_when_and_why_a_peer_stopped(home: Home, last: Event, words: str) -> None:
    lived(home, START, ROUND, last)
    result = run(home)
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == f"peer 12D3 {words}"
    assert "bootstrap" not in result.output


def test_the_command_tells_landing_from_training(home: Home) -> None:
    with home.lock("9f3a", "12D3"):
        log = EventLog(home.events)
        for event in (START, replace(ROUND, round=200)):
            log.write(event)
        log.close()
        assert "  round         200 of 200, all done and meeting a last few times, loss 2.25" in run(home).output
    assert "  round         200 of 200, loss 2.25" in run(home).output


def test_the_command_says_that_training_diverged(home: Home) -> None:
    lived(home, START, replace(ROUND, loss=math.nan))
    assert "  round         4 of 200, loss not a finite number: training has diverged\n" in run(home).output


def test_the_command_prints_one_json_object(home: Home) -> None:
    lived(home, START, ROUND, SILENT, STOP)
    output = run(home, "--json").output
    assert output.count("\n") == 1
    assert json.loads(output) == asdict(status(home))


def test_the_command_needs_no_torch(home: Home) -> None:
    lived(home, START, STOP)
    script = (
        "import sys\n"
        "from peer.cli.status import command\n"
        f"command(['--home', {str(home.path)!r}], standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'transformers', 'grpc', 'hivemind'} & sys.modules.keys()))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
