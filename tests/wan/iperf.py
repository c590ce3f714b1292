"""Measure emulated lines with iperf3, whose server reports what really arrived."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from tests.wan.wan import Wan

MISSING = "iperf3 is not installed: run 'apt-get install iperf3'"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Received:
    """What arrived: Mbit/s of payload, without headers, and the share of UDP's datagrams that did not."""

    mbit: float
    lost: float = 0.0


def tcp(wan: Wan, source: int, target: int, seconds: float, warm_up_s: float = 2.0) -> Received:
    """Send as fast as one connection can, after a warm-up that does not count."""
    sums = _run(wan, source, target, "-t", f"{seconds:g}", "-O", f"{warm_up_s:g}")
    return Received(sums["sum_received"]["bits_per_second"] / 1e6)


def udp(wan: Wan, source: int, target: int, seconds: float, mbit: float, size_bytes: int = 1200) -> Received:
    """Send datagrams of one size at a rate, which includes no headers."""
    sums = _run(wan, source, target, "-u", "-t", f"{seconds:g}", "-b", f"{mbit:g}M", "-l", str(size_bytes))
    told = sums["sum"]
    got = told["packets"] - told["lost_packets"]
    return Received(8e-6 * got * size_bytes / told["seconds"], told["lost_packets"] / told["packets"])


def _run(wan: Wan, source: int, target: int, *arguments: str) -> dict[str, Any]:
    server = wan.popen(target, ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server:
        while b"listening" not in server.stdout.readline():
            assert server.poll() is None, "iperf3 does not listen: is another one running on this host?"
        command = ["iperf3", "-c", wan.address(target), "--json", *arguments]
        with wan.popen(source, command, stdout=subprocess.PIPE) as client:
            text, _ = client.communicate(timeout=PATIENCE_S)
        server.kill()
    told = json.loads(text)
    assert "error" not in told, told["error"]
    end: dict[str, Any] = told["end"]
    return end
