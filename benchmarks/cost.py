"""What something costs this process and its children: seconds, CPU seconds, and memory on top of what it had before.

Memory is the kernel's own high-water mark of the resident set (VmHWM), reset before (5 to clear_refs), so that no short
peak is missed and nothing is sampled. Of several processes the marks are added up: an upper bound.
Where the mark may not be reset, the resident set is sampled instead.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.005


@dataclass(frozen=True)
class Cost:
    """began_s, ended_s: on the clock that all processes of this machine share (CLOCK_MONOTONIC)."""

    began_s: float
    ended_s: float
    cpu_s: float
    peak_bytes: int


class Meter:
    """Runs from its making to `stop`."""

    def __init__(self) -> None:
        gc.collect()
        _return_free_memory()
        self._pids = _family(os.getpid())
        self._before = {pid: _memory_bytes(pid, "VmRSS") for pid in self._pids}
        self._marked = False not in list(map(_reset_mark, self._pids))
        self._sampled = 0
        self._stopping = threading.Event()
        if not self._marked:
            threading.Thread(target=self._sample, daemon=True).start()
        self._cpu_s = sum(map(_cpu_s, self._pids))
        self._began_s = time.monotonic()

    def stop(self, began_s: float | None = None, ended_s: float | None = None) -> Cost:
        """Return the cost since the meter was made; the times, where known better, may be given."""
        ended_s = time.monotonic() if ended_s is None else ended_s
        cpu_s = sum(map(_cpu_s, self._pids)) - self._cpu_s
        self._stopping.set()
        if self._marked:
            peak = sum(_memory_bytes(pid, "VmHWM") - before for pid, before in self._before.items())
        else:
            peak = self._sampled
        return Cost(self._began_s if began_s is None else began_s, ended_s, cpu_s, max(0, peak))

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            extra = sum(_memory_bytes(pid, "VmRSS") - before for pid, before in self._before.items())
            self._sampled = max(self._sampled, extra)


def loopback_bytes() -> int:
    """Return the bytes that have crossed the loopback interface so far, all processes and both directions together."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[0])
    return 0


def processor_s(pid: int) -> float:
    """Return the CPU seconds that a process and its descendants have had so far."""
    return sum(map(_cpu_s, _family(pid)))


def _return_free_memory() -> None:
    """Give back what malloc keeps, or it would hide as much of what comes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    family = [pid]
    for member in family:
        family.extend(children.get(member, []))
    return family


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (the third) on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0


def _memory_bytes(pid: int, key: str) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status") as lines:
        for line in lines:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_mark(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")
        file.flush()
        return True
    return False
