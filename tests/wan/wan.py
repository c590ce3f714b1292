"""The emulated WAN, as those use it who run programs on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peer.errors import ConfigError
from tests.wan.host import TUN
from tests.wan.lines import Lines
from tests.wan.relay import Traffic

ROOT = Path(__file__).parents[2]
END_WITHIN_S = 10.0
_TOOLS = {"ip": "iproute2", "nsenter": "util-linux"}


class Wan:
    """Hosts behind emulated lines, for a `with` statement: they start with it, and end with it or with this process.

    Hosts see one another and nothing else. Several of these can be up at the same time and know nothing of each other.
    A host is its index, from 0. May be used by several threads.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Wan:
        """Start; raises `ConfigError` that says what this machine lacks for it."""
        _require()
        # In a session of its own, so that Ctrl-C reaches it only through us.
        self._router = subprocess.Popen(
            [sys.executable, "-m", "tests.wan.router"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            made = self._ask(self._lines.table())
        except BaseException:
            self.close()
            raise
        self._addresses, self._namespaces = made["addresses"], made["namespaces"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End."""
        self.close()

    @property
    def router_pid(self) -> int:
        """The id of the process that carries the packets."""
        return self._router.pid

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        address: str = self._addresses[host]
        return address

    def popen(self, host: int, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, as `subprocess.Popen` would with these options; its id is the command's own."""
        enter = ["nsenter", f"--net={self._namespaces[host]}", "--", *command]
        process = subprocess.Popen(enter, **options)
        self._processes.append(process)
        return process

    def change(self, host: int, **line: Any) -> None:
        """Change a host's line from now on, by the names of `Line`; raises `ConfigError` for a wrong one."""
        self._order("change", host, line)

    def blackout(self, host: int, seconds: float) -> None:
        """Let nothing through to or from a host, from now on and for so long."""
        self._order("blackout", host, seconds)

    def traffic(self, host: int) -> Traffic:
        """Return what a host has sent and received so far."""
        return Traffic(**self._order("traffic", host))

    def close(self) -> None:
        """Kill all that runs on the hosts, and end them; idempotent."""
        assert self._router.stdin is not None and self._router.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._router.stdin.close()
        try:
            self._router.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()
        self._router.stdout.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _order(self, order: str, host: int, *arguments: Any) -> Any:
        return self._ask([order, range(len(self._addresses))[host], *arguments])

    def _ask(self, words: Any) -> Any:
        assert self._router.stdin is not None and self._router.stdout is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
                self._router.stdin.write(json.dumps(words) + "\n")
                self._router.stdin.flush()
            answer = self._router.stdout.readline()
        if not answer:
            raise RuntimeError(f"the router has ended with status {self._router.wait()}; why, it said above")
        said = json.loads(answer)
        if "error" in said:
            raise ConfigError(said["error"])
        return said["result"]


def _require() -> None:
    if not sys.platform.startswith("linux"):
        raise ConfigError("an emulated WAN needs Linux")
    if os.geteuid() != 0:
        raise ConfigError("an emulated WAN needs network namespaces: run as root")
    if not Path(TUN).exists():
        raise ConfigError(f"an emulated WAN needs {TUN}: run 'modprobe tun', or give it to the container")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise ConfigError(f"an emulated WAN needs the command '{tool}': run 'apt-get install {package}'")
