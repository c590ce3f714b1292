"""The process that carries packets between the hosts. Started by `tests.wan.wan`, ends with it.

It makes the hosts, reads each packet from its sender's device and writes it to its target's when the `Relay` says so.
Standard input: one JSON value a line, first the table of `Lines`, then orders ["traffic", host], ["blackout", host,
seconds] and ["change", host, {values}]; standard output: one answer each, {"result": …} or {"error": "a sentence"}. The
end of standard input, or of the process that started this one, ends all that runs on the hosts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from ipaddress import IPv4Address
from typing import Any

from peer.errors import ConfigError
from tests.wan.host import Host, kill_all
from tests.wan.lines import Lines
from tests.wan.relay import Relay

FIRST = IPv4Address("10.77.0.1")
PAUSE_S = 0.0005
"""After each look around, so that a busy line costs one look for several packets; as much later is a packet at most."""

BURST = 512
"""Packets that are read from one device in a look, before others have their turn."""


class Router:
    """Hosts, and the packets between them."""

    def __init__(self, lines: Lines) -> None:
        self.addresses = [FIRST + n for n in range(len(lines.hosts))]
        self.hosts = [Host(str(address), lines.mtu) for address in self.addresses]
        self._largest_bytes = lines.mtu
        self._relay = Relay(lines)
        self._began_s = time.monotonic()

    def run(self, owner: int) -> None:
        """Carry packets and obey orders until standard input ends, or the process behind the descriptor `owner`."""
        relay = self._relay
        tuns = {host.tun: n for n, host in enumerate(self.hosts)}
        descriptors = [owner, sys.stdin.fileno(), *tuns]
        while True:
            wait_s = None if relay.next_s == math.inf else max(0.0, relay.next_s - self._now_s())
            ready, _, _ = select.select(descriptors, [], [], wait_s)  # which waits by the µs, epoll by the ms
            for descriptor in ready:
                if descriptor in tuns:
                    self._take(tuns[descriptor], descriptor)
                elif descriptor == owner or not (order := sys.stdin.readline()):
                    return
                else:
                    _say(self._obey(*json.loads(order)))
            for target, packet in relay.deliver(self._now_s()):
                os.write(self.hosts[target].tun, packet)
            time.sleep(PAUSE_S)

    def _take(self, source: int, tun: int) -> None:
        """Read what a host sends; packets for nobody here, and all of IPv6, are gone."""
        now_s = self._now_s()
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST):
                packet = os.read(tun, self._largest_bytes)
                target = int.from_bytes(packet[16:20], "big") - int(FIRST)
                if 0 <= target < len(self.hosts):
                    self._relay.send(now_s, source, target, packet)

    def _obey(self, order: str, host: int, argument: Any = None) -> dict[str, Any]:
        line = self._relay.line(host)
        match order:
            case "traffic":
                return {"result": asdict(self._relay.traffic(host))}
            case "blackout":
                now_s = self._now_s()
                values = {"blackouts": [*line.blackouts, (now_s, now_s + argument)]}
            case _:
                values = argument
        try:
            self._relay.change(host, line.changed(values))
        except ConfigError as error:
            return {"error": str(error)}
        return {"result": None}

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s


def main() -> None:
    """Make the hosts, say where they are, and carry packets."""
    owner = os.pidfd_open(os.getppid())
    lines = Lines.of(json.loads(sys.stdin.readline()))
    try:
        router = Router(lines)
    except OSError as error:
        advice = "run as root; a container needs --privileged"
        _say({"error": f"this machine allows no emulated hosts ({error}): {advice}"})
        return
    except subprocess.CalledProcessError as error:
        _say({"error": f"'ip' could not set up a host: {error.stderr.decode().strip()}"})
        return
    with contextlib.suppress(OSError):  # on a busy machine packets would be late
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    namespaces = [f"/proc/{os.getpid()}/fd/{host.namespace}" for host in router.hosts]
    _say({"result": {"addresses": [str(address) for address in router.addresses], "namespaces": namespaces}})
    try:
        router.run(owner)
    finally:
        kill_all(router.hosts)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
