"""How fast a link is, from what the other side says has arrived.

Nothing is sent only to measure: the frames of meetings tell. A stretch of time over which something was on its way all
along says how fast the link is (a measure); a short one that ended because there was nothing more to send only says how
fast it is at least (a bound). A stretch is counted from the moment at which its first byte was said. News of what has
arrived may come late, and several at once, as it waits behind the partner's own frames; but never early. So what a
stretch says is too little by its round trip at most, and never too much.
"""

from __future__ import annotations

from collections import OrderedDict, deque

STRETCH_S = 0.8
"""A shorter stretch is mostly round trips: it gives a bound."""

START_BITS_PER_S = 10e6
"""What a link is taken to be before anything was sent over it."""

MEETINGS = 16
"""So many meetings back a link is still what it was."""

PARTNERS = 256


class Gauge:
    """One direction of one stream: bytes said, and bytes that have arrived, over time."""

    def __init__(self) -> None:
        self.measure: float | None = None
        self.bound: float | None = None
        self._since: tuple[float, int] | None = None
        self._arrived_bytes = 0

    @property
    def bits_per_s(self) -> float | None:
        """The most that was seen; None before anything was."""
        known = [rate for rate in (self.measure, self.bound) if rate is not None]
        return max(known, default=None)

    def said(self, now_s: float, arrived_bytes: int) -> None:
        """Note that something is on its way, beside arrived_bytes that are there."""
        if self._since is None:
            self._since, self._arrived_bytes = (now_s, arrived_bytes), arrived_bytes

    def arrived(self, now_s: float, arrived_bytes: int, said_bytes: int) -> None:
        """Note that so much has arrived, of what was said."""
        if self._since is None:
            return
        began_s, before = self._since
        elapsed_s, all_there = now_s - began_s, arrived_bytes >= said_bytes
        if arrived_bytes > self._arrived_bytes and elapsed_s > 0:  # the partner also says other things
            self._arrived_bytes = arrived_bytes
            rate = 8 * (arrived_bytes - before) / elapsed_s
            if elapsed_s >= STRETCH_S:
                self.measure = max(self.measure or 0.0, rate)
            elif all_there:
                self.bound = max(self.bound or 0.0, rate)
        if all_there:
            self._since = None


class Line:
    """A peer's way out, as its last meetings showed it: bits a second, and round trips, with anybody and with each."""

    def __init__(self, bits_per_s: float = START_BITS_PER_S) -> None:
        self._up = bits_per_s
        self._seen: deque[tuple[float | None, float]] = deque(maxlen=MEETINGS)
        self._partners: OrderedDict[str, tuple[float, float | None]] = OrderedDict()

    @property
    def bits_per_s(self) -> float:
        """What this peer can send: the most of the last meetings."""
        return self._up

    @property
    def rtt_s(self) -> float:
        """The median of the round trips to the partners known."""
        found = sorted(rtt_s for _, rtt_s in self._partners.values() if rtt_s is not None)
        return found[len(found) // 2] if found else 0.0

    def to(self, partner: str) -> float:
        """Return how fast a partner took what was sent the last time; what is thought of the line before the first."""
        return self._partners[partner][0] if partner in self._partners else self._up

    def met(self, partner: str, gauge: Gauge, rtt_s: float | None) -> None:
        """Take note of what a meeting showed; rtt_s: None where it did not show it."""
        seen = gauge.bits_per_s
        if seen is None:
            return
        self._seen.append((gauge.measure, seen))
        best = max(rate for _, rate in self._seen)
        measured = [measure for measure, _ in self._seen if measure is not None]
        self._up = best if measured else max(self._up, best)
        known = self.to(partner) if gauge.measure is None else 0.0
        before = self._partners.get(partner, (0.0, None))[1]
        self._partners[partner] = (max(seen, known), before if rtt_s is None else rtt_s)
        self._partners.move_to_end(partner)
        while len(self._partners) > PARTNERS:
            self._partners.popitem(last=False)
