"""A token bucket: how long something has to wait, so that a rate is kept whatever is sent.

The bucket fills with bytes at the rate, up to the burst. What passes is taken out of it, and what is not in it yet is
owed: whoever took it waits until the debt is paid. So a frame larger than the burst passes as well, it waits longer.
"""

from __future__ import annotations


class Bucket:
    """Allows a rate, and above it a burst after a pause.

    At most rate × T + burst bytes pass in the first T seconds, and in any T seconds at most one frame more, which was
    paid for before they began. (What others gave back while a frame waited can add to the latter, not to the former.)
    """

    def __init__(self, bits_per_s: float, burst_bytes: float) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._burst_bytes = burst_bytes
        self._level_bytes = burst_bytes  # below zero: owed
        self._last_s: float | None = None

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take the bytes of one frame; return how many seconds it has to wait, 0.0 if it may pass at once."""
        if self._last_s is not None and now_s > self._last_s:
            self._fill(self._bytes_per_s * (now_s - self._last_s))
        self._last_s = now_s if self._last_s is None else max(self._last_s, now_s)
        self._level_bytes -= size_bytes
        return max(0.0, -self._level_bytes / self._bytes_per_s)

    def give_back(self, size_bytes: int) -> None:
        """Put back the bytes of a frame that did not pass after all."""
        self._fill(size_bytes)

    def _fill(self, size_bytes: float) -> None:
        self._level_bytes = min(self._burst_bytes, self._level_bytes + size_bytes)
