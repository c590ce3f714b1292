"""How much of the processor others have while something is measured: what is slower for it is not slower by itself."""

from __future__ import annotations

import os
import time

from benchmarks.cost import TICK_S, processor_s

_BUSY = (0, 1, 2, 5, 6)
"""Fields of /proc/stat: user, nice, system, irq, softirq."""


class Bystanders:
    """From its making on: all processes of this machine but this one and what it started."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._ours_s = time.monotonic(), _busy_s(), processor_s(os.getpid())

    def share(self) -> float:
        """Return their share of all cores so far, from 0 to 1; what of ours has ended meanwhile counts as theirs."""
        busy_s = (_busy_s() - self._busy_s) - (processor_s(os.getpid()) - self._ours_s)
        return max(0.0, busy_s / (time.monotonic() - self._began_s) / (os.cpu_count() or 1))


def _busy_s() -> float:
    with open("/proc/stat") as file:
        fields = file.readline().split()[1:]
    return sum(int(fields[index]) for index in _BUSY) * TICK_S
