"""How fast a link is, from what the other side says has arrived.

Nothing is sent only to measure: the frames of meetings tell. A stretch of time over which the link was full says how
fast it is (a measure); a short one, or one in which the link may have waited for us, since what is sent has to be
computed first, only says how fast it is at least (a bound). A link is full while more is on its way than it carries in
a round trip at the rate seen: then a queue has formed. A stretch is counted from the moment at which its first byte was
said. News of what has arrived may come late, and several at once, as it waits behind the partner's own frames; but
never early. So what a stretch says is too little by its round trip at most, and never too much.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

STRETCH_S = 0.8
"""A shorter stretch, some round trips apart, is mostly beginning and end: it gives a bound."""

QUEUE = 2.0
"""A link is full if so many times what it carries in a round trip is on its way."""

HOPE = 2.0
"""A link that was never full is taken to carry so many times what it was seen to: the next meeting shows whether."""

START_BITS_PER_S = 10e6
"""What a link is taken to be before anything was sent over it."""

MEETINGS = 16
"""So many meetings back a link is still what it was."""

PARTNERS = 256


class Gauge:
    """One direction of one stream: bytes said, and bytes that have arrived, over time.

    round_trip_s: from when a byte is said on an empty link until it is known to have arrived.
    """

    def __init__(self, round_trip_s: float = 0.0) -> None:
        self._round_trip_s = round_trip_s
        self.measure: float | None = None
        self.bound: float | None = None
        self._since: tuple[float, int] | None = None
        self._full_since: tuple[float, int] | None = None
        self._arrived_bytes = 0

    @property
    def bits_per_s(self) -> float | None:
        """The most that was seen; None before anything was."""
        known = [rate for rate in (self.measure, self.bound) if rate is not None]
        return max(known, default=None)

    def said(self, now_s: float, arrived_bytes: int, before_bytes: int) -> None:
        """Note that something is on its way, beside arrived_bytes that are there and before_bytes that were said."""
        if self._since is None:
            self._since, self._arrived_bytes = (now_s, arrived_bytes), arrived_bytes
        if self._full_since is None:
            self._full_since = now_s, before_bytes

    def pause(self, on_the_way_bytes: int) -> None:
        """Note that nothing more is said for now."""
        rate = self.bits_per_s
        if rate is not None and 8 * on_the_way_bytes < QUEUE * rate * self._round_trip_s:
            self._full_since = None

    def arrived(self, now_s: float, arrived_bytes: int, said_bytes: int) -> None:
        """Note that so much has arrived, of what was said."""
        if self._since is None:
            return
        if arrived_bytes > self._arrived_bytes and now_s > self._since[0]:  # the partner also says other things
            self._arrived_bytes = arrived_bytes
            self.bound = _more(self.bound, self._since, now_s, arrived_bytes)
            # before some round trips are over no link is seen to be full or not
            long_s = STRETCH_S + 2 * QUEUE * self._round_trip_s
            if self._full_since is not None and now_s - self._full_since[0] >= long_s:
                self.measure = _more(self.measure, self._full_since, now_s, arrived_bytes)
        if arrived_bytes >= said_bytes:
            self._since = self._full_since = None


def _more(known: float | None, since: tuple[float, int], now_s: float, arrived_bytes: int) -> float | None:
    """Return the rate of what was said and has arrived since then, if it is higher than what is known."""
    rate = 8 * (arrived_bytes - since[1]) / (now_s - since[0])
    return known if rate <= 0 else max(known or 0.0, rate)


@dataclass
class _Way:
    """To one partner: bits a second, whether it ever was full, and its round trip, if it is known."""

    bits_per_s: float
    full: bool = False
    rtt_s: float | None = None


class Line:
    """A peer's way out, as its last meetings showed it: bits a second, and round trips, with anybody and with each."""

    def __init__(self, bits_per_s: float = START_BITS_PER_S) -> None:
        self._up = bits_per_s
        self._seen: deque[tuple[bool, float]] = deque(maxlen=MEETINGS)
        self._ways: OrderedDict[str, _Way] = OrderedDict()

    @property
    def bits_per_s(self) -> float:
        """What this peer can send: the most of the last meetings, and more than that if they never filled it."""
        return self._up

    @property
    def rtt_s(self) -> float:
        """The median of the round trips to the partners known."""
        found = sorted(way.rtt_s for way in self._ways.values() if way.rtt_s is not None)
        return found[len(found) // 2] if found else 0.0

    def to(self, partner: str) -> float:
        """Return how fast a partner took what was sent the last time; what is thought of the line before the first."""
        return self._ways[partner].bits_per_s if partner in self._ways else self._up

    def met(self, partner: str, gauge: Gauge, rtt_s: float | None) -> None:
        """Take note of what a meeting showed; rtt_s: None where it did not show it."""
        seen = gauge.bits_per_s
        if seen is None:
            return
        full = gauge.measure is not None
        way = self._ways.setdefault(partner, _Way(self._up))
        self._ways.move_to_end(partner)
        way.full |= full
        way.bits_per_s = seen if full else max(way.bits_per_s, seen if way.full else HOPE * seen)
        way.rtt_s = way.rtt_s if rtt_s is None else rtt_s
        self._seen.append((full, seen))
        best = max(rate for _, rate in self._seen)
        self._up = best if any(full for full, _ in self._seen) else max(self._up, HOPE * best)
        while len(self._ways) > PARTNERS:
            self._ways.popitem(last=False)
