"""What an emulated WAN starts with and what is left of it: nothing, however it ends. And its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.wan import Line, Lines, Wan

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
NAMESPACES = Path("/run/netns")
LINES = "[[peers]]\ncount = 2\nlatency_ms = 5\n"

emulation = pytest.mark.usefixtures("emulation")


def namespaces() -> dict[int, str]:
    """Return the network namespaces of all processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found[int(entry.name)] = os.readlink(entry / "ns" / "net")
        except OSError:
            continue  # it ended meanwhile
    return found


def inside(theirs: set[str]) -> set[int]:
    return {pid for pid, namespace in namespaces().items() if namespace in theirs}


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, namespaces()
        time.sleep(0.05)


def command(lines: Path, *on: str) -> list[str]:
    pairs = zip(on[::2], on[1::2], strict=True)
    return [sys.executable, "-m", "tests.wan", str(lines), *(word for pair in pairs for word in ("--on", *pair))]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.toml"
    path.write_text(LINES)
    return path


@pytest.fixture
def owner(lines: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a program on each host, one of them with a child of a session of its own."""
    start = command(lines, "0", "setsid sleep 1000 & sleep 1000; true", "1", "exec sleep 1000")
    with subprocess.Popen(start, cwd=ROOT, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@emulation
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_the_owner_ends_nothing_is_left(owner: subprocess.Popen[bytes], number: signal.Signals) -> None:
    until(lambda: len(inside(hosts_of(owner))) == 4)
    theirs = hosts_of(owner)
    assert len(theirs) == 2
    (router,) = (child for child in children(owner) if b"tests.wan.router" in words(child))
    if number == signal.SIGINT:
        os.killpg(owner.pid, number)  # as Ctrl-C does
    else:
        owner.send_signal(number)
    assert owner.wait(DEADLINE_S) == (130 if number == signal.SIGINT else -number)
    until(lambda: not inside(theirs) and router not in namespaces())


def hosts_of(owner: subprocess.Popen[bytes]) -> set[str]:
    """Return the namespaces of the programs that it runs."""
    known = namespaces()
    return {known[child] for child in children(owner) if child in known} - {known[os.getpid()]}


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@emulation
def test_leaving_ends_all_programs_and_reaps_them() -> None:
    named = sorted(NAMESPACES.glob("*"))
    with Wan(Lines((Line(), Line()))) as wan:
        processes = [wan.popen(host, ["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE) for host in (0, 1)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
        theirs = {namespaces()[process.pid] for process in processes}
        assert len(theirs | {namespaces()[os.getpid()]}) == 3
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert inside(theirs) == set()
    assert wan.router_pid not in namespaces()
    assert sorted(NAMESPACES.glob("*")) == named


@emulation
def test_several_at_once_do_not_see_one_another(ping: None) -> None:
    with Wan(Lines((Line(), Line()))) as one, Wan(Lines((Line(),))) as other:
        target = one.address(1)
        reached = [
            wan.popen(0, ["ping", "-c", "1", "-W", "1", target], stdout=subprocess.DEVNULL).wait(DEADLINE_S)
            for wan in (one, other)
        ]
        assert reached == [0, 1]


@emulation
def test_a_host_has_a_loopback_of_its_own() -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 7700)); print(1, flush=True); s.accept()"
    call = "import socket; socket.create_connection(('127.0.0.1', 7700))"
    with Wan(Lines((Line(), Line()))) as wan:
        server = wan.popen(0, [sys.executable, "-c", serve], stdout=subprocess.PIPE)
        with server:
            assert server.stdout is not None
            server.stdout.readline()
            for host, status in ((1, 1), (0, 0)):
                process = wan.popen(host, [sys.executable, "-c", call], stderr=subprocess.DEVNULL)
                assert process.wait(DEADLINE_S) == status


@emulation
def test_a_router_that_died_is_told_of() -> None:
    with Wan(Lines((Line(),))) as wan:
        os.kill(wan.router_pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the router has ended with status -9"):
            wan.traffic(0)


@emulation
def test_the_command_ends_with_its_last_program_and_as_that_did(lines: Path) -> None:
    last = "test {0} = 10.77.0.1 && test {1} = 10.77.0.2 && echo '{}' && exit 7"
    ended = subprocess.run(
        command(lines, "0", "sleep 1000", "1", last), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "{}\n", "")


@pytest.mark.parametrize("on", [("2", "true"), ("0", "ping {2}"), ("x", "true")])
def test_a_host_that_is_not_described_gets_a_sentence(lines: Path, on: tuple[str, str]) -> None:
    ended = subprocess.run(command(lines, *on), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    host = "x" if on[0] == "x" else "2"
    assert ended.returncode == 1
    assert ended.stderr == f"python -m tests.wan: there is no host {host}; the file describes hosts 0 to 1\n"
