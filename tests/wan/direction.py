"""One direction of an access line, as arithmetic over packet sizes and times. It knows no clock: times are given."""

from __future__ import annotations

from random import Random

from tests.wan.lines import Line


class Direction:
    """A drop-tail queue, the bandwidth behind it, and then the way: latency, jitter, loss.

    The queue is never kept: all that matters of it is when the bandwidth is free again. seed: of jitter and loss.
    """

    def __init__(self, line: Line, mbit: float, seed: str) -> None:
        self.queue_drops = 0
        self.losses = 0
        self._random = Random(seed)
        self._free_s = 0.0
        self._last_s = 0.0
        self.adjust(line, mbit)

    def adjust(self, line: Line, mbit: float) -> None:
        """Be as the line is now, for packets that come from now on."""
        self._byte_s = 8e-6 / mbit
        self._queue_s = line.queue_ms / 1000
        self._latency_s = line.latency_ms / 1000
        self._jitter_s = line.jitter_ms / 1000
        self._loss = line.loss
        self._blackouts = line.blackouts

    def cross(self, now_s: float, size_bytes: int) -> float | None:
        """Return when a packet that comes now leaves at the far end; None when it does not.

        To be called in the order of times; packets leave in the order in which they came.
        """
        if self._blackouts and any(from_s <= now_s < to_s for from_s, to_s in self._blackouts):
            self.losses += 1
            return None
        turn_s = max(now_s, self._free_s)
        if turn_s - now_s > self._queue_s:
            self.queue_drops += 1
            return None
        self._free_s = turn_s + size_bytes * self._byte_s
        if self._loss and self._random.random() < self._loss:  # on the way, so it has taken its bandwidth
            self.losses += 1
            return None
        leaves_s = self._free_s + self._latency_s
        if self._jitter_s:
            leaves_s += self._jitter_s * self._random.random()
        self._last_s = max(self._last_s, leaves_s)  # who is ahead is not overtaken
        return self._last_s
