"""When a peer asks for meetings: as many a round as the run has it, spread over the round."""

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
        """How long the last round took, 0 before there was one."""

    @property
    def sensitivity(self) -> Mapping[str, float]:
        """Parameter name → how much the loss minds a change in it."""


class Timetable:
    """Says when the next meeting is due; meetings that a peer was asked for count as well."""

    def __init__(self, meetings: int, pace: Pace) -> None:
        self._wanted, self._pace = meetings, pace
        self._round, self._done = 0, 0

    @property
    def due(self) -> bool:
        """Whether it is time to ask for a meeting."""
        done = self._done if self._round == self._pace.round else 0
        return done < self._wanted and self._pace.fraction >= (done + 0.5) / self._wanted

    def met(self) -> None:
        """Count a meeting in the round that it fell into."""
        round = self._pace.round
        self._round, self._done = round, self._done + 1 if self._round == round else 1

    def rounds_in(self, seconds: float) -> int:
        """Return how many rounds a peer like this one may do meanwhile; 0 before one is done."""
        return int(seconds / self._pace.round_s) if self._pace.round_s else 0

    @property
    def patience_ms(self) -> int:
        """How long this peer may be silent while it waits for a step boundary."""
        return min(LONGEST_PATIENCE_MS, int(2000 * self._pace.step_s) + 1000)
