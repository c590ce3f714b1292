"""All packets that are under way, over lines around a perfect core. It knows no clock and no sockets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from tests.wan.direction import Direction
from tests.wan.lines import Line, Lines


@dataclass(frozen=True)
class Traffic:
    """What a host has sent and received so far, IP headers included, and the packets that its own line dropped.

    sent_bytes: whatever became of them. queue_drops, losses: of both directions; a loss is by chance or by a blackout.
    """

    sent_bytes: int
    received_bytes: int
    queue_drops: int
    losses: int


class Relay:
    """Takes packets and gives them back when they have crossed the source's up and the target's down.

    A host is its index. Times in seconds, never earlier than the ones before.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = list(lines.hosts)
        self._ups = [Direction(line, line.up_mbit, f"{lines.seed} {n} up") for n, line in enumerate(lines.hosts)]
        self._downs = [Direction(line, line.down_mbit, f"{lines.seed} {n} down") for n, line in enumerate(lines.hosts)]
        self._sent_bytes = [0] * len(self._lines)
        self._received_bytes = [0] * len(self._lines)
        self._events: list[tuple[float, int, bool, int, bytes]] = []  # time, tie-break, at the end?, target, packet
        self._numbers = count()

    @property
    def next_s(self) -> float:
        """When `deliver` has something to do again; infinity for never."""
        return self._events[0][0] if self._events else math.inf

    def send(self, now_s: float, source: int, target: int, packet: bytes) -> None:
        """Take a packet."""
        self._sent_bytes[source] += len(packet)
        core_s = self._ups[source].cross(now_s, len(packet))
        if core_s is not None:
            heappush(self._events, (core_s, next(self._numbers), False, target, packet))

    def deliver(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield the targets and packets whose time has come."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, number, ended, target, packet = heappop(events)
            if ended:
                self._received_bytes[target] += len(packet)
                yield target, packet
            else:
                end_s = self._downs[target].cross(at_s, len(packet))
                if end_s is not None:
                    heappush(events, (end_s, number, True, target, packet))

    def change(self, host: int, line: Line) -> None:
        """Give a host another line; what is under way goes on as it was."""
        self._lines[host] = line
        self._ups[host].adjust(line, line.up_mbit)
        self._downs[host].adjust(line, line.down_mbit)

    def line(self, host: int) -> Line:
        """Return a host's line as it is now."""
        return self._lines[host]

    def traffic(self, host: int) -> Traffic:
        """Return what has come of a host's packets so far."""
        both = (self._ups[host], self._downs[host])
        return Traffic(
            self._sent_bytes[host],
            self._received_bytes[host],
            sum(direction.queue_drops for direction in both),
            sum(direction.losses for direction in both),
        )
