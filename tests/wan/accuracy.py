"""Print what iperf3 and ping find on lines of several kinds, and what it costs to carry the packets.

`python -m tests.wan.accuracy`; three minutes, in which nothing else should be running.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.wan import Line, Lines, Wan, iperf

SECONDS = 8.0
WARM_UP_S = 4.0


@dataclass(frozen=True)
class Case:
    """One row: two hosts with the same line."""

    mbit: float
    round_trip_ms: float
    mtu: int = 1500
    loss: float = 0.0


CASES = (
    Case(5, 100),
    Case(20, 100),
    Case(100, 100),
    Case(100, 100, loss=0.01),
    Case(1000, 20),
    Case(1000, 20, mtu=9000),
    Case(1000, 20, mtu=65_535),
)


def main() -> None:
    """Measure, and print a row as soon as it is there."""
    print("Mbit/s  round trip ms   MTU  loss │ TCP Mbit/s  ping ms  UDP Mbit/s  UDP lost │ router: share of a core")
    for case in CASES:
        line = Line(case.mbit, case.mbit, case.round_trip_ms / 4, loss=case.loss / 2)
        with Wan(Lines((line, line), mtu=case.mtu)) as wan:
            ping_ms = round_trip_ms(wan, 0, 1)
            began_s, cpu_s = time.monotonic(), cpu(wan.router_pid)
            tcp = iperf.tcp(wan, 0, 1, SECONDS, WARM_UP_S)
            share = (cpu(wan.router_pid) - cpu_s) / (time.monotonic() - began_s)
            udp = iperf.udp(wan, 0, 1, SECONDS, 0.9 * case.mbit, min(case.mtu - 100, 32_000))
        print(
            f"{case.mbit:6g} {case.round_trip_ms:14g} {case.mtu:5} {case.loss:5.1%} │ {tcp.mbit:10.1f} {ping_ms:8.1f} "
            f"{udp.mbit:11.1f} {udp.lost:9.2%} │ {share:22.0%}",
            flush=True,
        )


def round_trip_ms(wan: Wan, source: int, target: int, pings: int = 10) -> float:
    """Return the median round trip that ping finds."""
    command = ["ping", "-c", str(pings), "-i", "0.2", "-W", "5", wan.address(target)]
    with wan.popen(source, command, stdout=subprocess.PIPE, text=True) as process:
        text, _ = process.communicate(timeout=iperf.PATIENCE_S)
    times_ms = sorted(float(found) for found in re.findall(r"time=([\d.]+)", text))
    assert times_ms, text
    return times_ms[len(times_ms) // 2]


def cpu(pid: int) -> float:
    """Return the seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
