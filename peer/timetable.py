"""When a peer asks for meetings: as many a round as its plan has, spread over the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from peer.core.admit import LONGEST_PATIENCE_MS


class Pace(Protocol):
    """Where training is; read only."""

    @property
    def round(self) -> int:
        """Outer steps done."""

    @property
    def fraction(self) -> float:
        """How much of the round is done, from 0 to 1."""

    @property
    def step_s(self) -> float:
        """How long an inner step takes."""

    @property
    def round_s(self) -> float:
        """How long a round takes: the last one, or as planned before there was one; 0 where nobody knows yet."""

    @property
    def sensitivity(self) -> Mapping[str, float]:
        """Parameter name → how much the loss minds a change in it."""


class Timetable:
    """Says when the next meeting is due, and what this round has seen; meetings that a peer was asked for count too."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._round, self._done = 0, 0
        self._paid, self._bytes = pace.round, 0.0
        self._last: float | None = None

    def due(self, wanted: float, under_way: int) -> bool:
        """Tell whether it is time to ask for a meeting; wanted: a round; under_way: how many are going on."""
        if wanted <= 0:
            return False
        self._turn()
        fraction, done = self._pace.fraction, self._done + under_way
        if wanted >= 1:
            return done < int(wanted) and fraction >= (done + 0.5) / int(wanted)
        return not done and (self._last is None or self._pace.round + fraction >= self._last + 1 / wanted)

    def spend(self, size_bytes: int) -> None:
        """Count what a meeting carried both ways, however it ended."""
        self._bytes += size_bytes

    def met(self) -> None:
        """Count a meeting in the round that it fell into."""
        self._turn()
        self._done += 1
        self._last = self._pace.round + self._pace.fraction

    def spent(self, round_bytes: float) -> bool:
        """Tell whether meetings have taken a round's share of the link, both ways; what was too much is held over."""
        rounds, self._paid = self._pace.round - self._paid, self._pace.round
        if rounds:
            self._bytes = max(0.0, self._bytes - rounds * round_bytes) if rounds > 0 else 0.0
        return self._bytes >= round_bytes

    @property
    def left_s(self) -> float:
        """How long this round may still take."""
        return max(0.0, 1 - self._pace.fraction) * self._pace.round_s

    def rounds_in(self, seconds: float) -> int:
        """Return how many rounds a peer like this one may do meanwhile; 0 where nobody knows."""
        return int(seconds / self._pace.round_s) if self._pace.round_s else 0

    @property
    def patience_ms(self) -> int:
        """How long this peer may be silent while it computes."""
        return min(LONGEST_PATIENCE_MS, int(2000 * self._pace.step_s) + 1000)

    def _turn(self) -> None:
        if self._round != self._pace.round:
            self._round, self._done = self._pace.round, 0
