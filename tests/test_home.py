from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.home import Home

DAEMON = """
import sys, time
from peer.home import Home
with Home(sys.argv[1]).lock("run", "peer"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def daemon(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a home until its standard input ends."""
    command = [sys.executable, "-c", DAEMON, str(home.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "above" / "home")


def test_naming_a_home_touches_nothing(home: Home) -> None:
    assert home.holder() is None
    assert not home.path.parent.exists()


def test_everything_lies_in_the_home(home: Home) -> None:
    paths = {name: path for name, path in vars(home).items() if name != "path"}
    assert {path.name for path in paths.values()} == {
        *("identity.key", "dht.key", "checkpoints", "events.jsonl", "config.toml", "run.toml", "cache", "lock"),
        *("traffic.json", "paused"),
    }
    assert {path.parent for path in paths.values()} == {home.path}


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Home("~/x").path == tmp_path / "x"


def test_a_home_is_made_for_its_owners_eyes(home: Home) -> None:
    home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    home.path.chmod(0o755)
    home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o755  # as its owner wants it
    assert list(home.path.iterdir()) == []


@pytest.mark.parametrize("below", [".", "home", "home/deeper"])
def test_a_home_that_is_not_a_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    home = Home(tmp_path / "file" / below)
    with pytest.raises(ConfigError, match=f"home '{home.path}' cannot be used, .* not a folder; give another with"):
        home.create()
    with pytest.raises(ConfigError), home.lock("run", "peer"):
        pytest.fail("locked a file")
    assert home.holder() is None
    assert (tmp_path / "file").read_text() == "mine"


def test_a_home_that_cannot_be_written_is_refused() -> None:
    # /proc refuses files even from root.
    home = Home("/proc/self/fdinfo")
    with pytest.raises(ConfigError, match=r"home '/proc/self/fdinfo' cannot be used \(.+\); make it writable, or give"):
        home.create()


def test_the_lock_tells_who_holds_it(home: Home) -> None:
    before = time.time()
    with home.lock("run", "peer"):
        holder = home.holder()
        assert holder is not None
        assert (holder.pid, holder.run_id, holder.peer_id, holder.live) == (os.getpid(), "run", "peer", True)
        assert before <= holder.started <= time.time()
        words = json.loads(home.lock_file.read_text())
        assert words == {"pid": os.getpid(), "started": holder.started, "run_id": "run", "peer_id": "peer"}
    holder = home.holder()
    assert holder is not None
    assert (holder.pid, holder.live) == (os.getpid(), False)


def test_a_home_in_use_is_refused_with_the_process_that_uses_it(home: Home) -> None:
    with daemon(home) as process:
        with pytest.raises(ConfigError) as caught, home.lock("run", "peer"):
            pytest.fail("locked twice")
        assert str(caught.value) == (
            f"home '{home.path}' is in use by the daemon with process id {process.pid}; stop that one first "
            "(Ctrl-C, or kill with its process id), or give this one a folder of its own with --home"
        )
        holder = home.holder()
        assert holder is not None
        assert (holder.pid, holder.live) == (process.pid, True)


def test_a_process_cannot_lock_its_own_home_twice(home: Home) -> None:
    with home.lock("run", "peer"):
        with pytest.raises(ConfigError, match=f"in use by the daemon with process id {os.getpid()};"):
            home.lock("run", "peer").__enter__()
        holder = home.holder()
        assert holder is not None
        assert holder.live


def test_a_daemon_killed_with_9_leaves_the_home_free(home: Home) -> None:
    with daemon(home) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        holder = home.holder()
        assert holder is not None
        assert (holder.pid, holder.live) == (process.pid, False)
        with home.lock("run", "peer"):
            pass


def test_a_child_that_outlives_the_daemon_does_not_hold_the_home(home: Home) -> None:
    # It inherits the open lock, as a fork does.
    with home.lock("run", "peer"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=open_files(home))
    with child:
        with home.lock("run", "peer"):
            pass
        child.kill()


def open_files(home: Home) -> list[int]:
    lock = home.lock_file.stat()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == (lock.st_dev, lock.st_ino):
            found.append(int(name))
    assert found
    return found


def test_asking_who_holds_a_home_does_not_keep_a_daemon_out(home: Home) -> None:
    with daemon(home) as process:
        process.kill()
        process.wait()
    left = home.lock_file.read_bytes()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            home.holder()

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(20):
            home.lock_file.write_bytes(left)  # or it would name this process, which lives
            with home.lock("run", "peer"):
                pass
    finally:
        done.set()
        for thread in asking:
            thread.join()


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '{"pid": "x"}', "\0" * 9, '{"pid": 1, "started": 2}'])
def test_a_lock_that_says_nothing_of_use_is_free(home: Home, content: str) -> None:
    home.create()
    home.lock_file.write_text(content)
    assert home.holder() is None
    with home.lock("run", "peer"):
        assert home.holder() is not None


def test_a_home_is_paused_until_it_is_resumed_however_often_both_are_asked_for(home: Home) -> None:
    home.create()
    assert home.paused_s is None
    assert not home.resume()
    before = time.time() - 1.0  # file systems have clocks of their own
    assert home.pause()
    since = home.paused_s
    assert since is not None
    assert before <= since <= time.time() + 1.0
    assert not home.pause()
    assert home.paused_s == since
    assert home.resume()
    assert home.paused_s is None
    assert not home.resume()


def test_a_file_that_somebody_put_there_by_hand_pauses_as_well(home: Home) -> None:
    home.create()
    home.pause_file.write_text("until the weekend")
    os.utime(home.pause_file, (5.0, 5.0))
    assert home.paused_s == 5.0
    assert not home.pause()
    assert home.resume()


def test_a_home_that_is_not_there_cannot_be_paused(home: Home) -> None:
    with pytest.raises(ConfigError, match=f"home '{home.path}' cannot be used"):
        home.pause()
    assert not home.resume()
    assert home.paused_s is None
