"""How much a peer meets others: its plan, and what it wishes for with each partner, from what meetings have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peer.core.allocation import Allocation
from peer.core.gauge import Line
from peer.core.plan import Cost, Means, Plan, plan, within
from peer.core.prior import start_priors
from peer.core.terms import EFFORT, codecs
from peer.manifest import Exchange
from peer.timetable import Pace

ROUND_S = 10.0
"""What a round is taken to last before anybody knows."""

NEWER = 0.25
"""How much the last meeting, or round, counts in a running mean."""


class Planner:
    """Plans meetings of one run. share: of the link. most_bits_per_s: what the user allows each way; None: no limit."""

    def __init__(
        self,
        exchange: Exchange,
        shapes: Mapping[str, Sequence[int]],
        pace: Pace,
        share: float,
        most_bits_per_s: float | None = None,
        line: Line | None = None,
    ) -> None:
        self.line = line or Line()
        self.priors = start_priors(shapes)
        self.allocations = {spec: Allocation(shapes, codec) for spec, codec in codecs(exchange.codec).items()}
        self._exchange, self._pace, self._share = exchange, pace, share
        self._most_bits_per_s = most_bits_per_s
        self._waiting_s, self._stall_s = 0.0, 0.0
        self._computing_s_per_byte: dict[str, float] = {}
        self._budget_bytes = self._fixed_bytes()

    @property
    def plan(self) -> Plan:
        """What this peer does now."""
        rate, share, most = self.line.bits_per_s, self._share, self._most_bits_per_s
        limited = most is not None and most < share * rate
        if most is not None and limited:
            rate, share = most, 1.0  # a limit is no link to leave half of
        means = Means(
            bits_per_s=rate,
            waiting_s=self._waiting_s,
            round_s=self._round_s,
            share=share,
            stall_s=self._stall_s,
            most=self._exchange.meetings,
            budget_bytes=self._budget_bytes,
            limited=limited,
        )
        return plan(means, self._exchange.codec, self._costs)

    def wish(self, planned: Plan, partner: str) -> tuple[str, int]:
        """Return codec and budget of a meeting with this partner, of all legs together."""
        if self._budget_bytes is not None:
            return planned.codec, self._budget_bytes
        return within(planned, self._costs, self.line.to(partner), self._round_s)

    def met(self, idle_s: float) -> None:
        """Take note of a meeting: for how long none of its bytes were on their way."""
        self._waiting_s = _mean(self._waiting_s, idle_s)

    def most_bytes(self, codec: str) -> int | None:
        """Return what a meeting of this codec may carry without being too much to compute; None: no limit."""
        if self._budget_bytes is not None or not self.allocations[codec].codec.low:
            return None
        cost = self._costs[codec]
        most = cost.bearable_bytes(self._round_s) / max(1.0, self.plan.meetings)
        return max(cost.least_bytes, int(min(most, cost.whole_bytes)))

    def computed(self, codec: str, seconds: float, size_bytes: int) -> None:
        """Take note of how long a processor core worked for a meeting that carried so many bytes, both ways."""
        if size_bytes:
            known = self._computing_s_per_byte.pop(codec, 0.0)
            self._computing_s_per_byte[codec] = _mean(known, seconds / size_bytes)  # the last one last

    def stalled(self, seconds: float, meetings: int) -> None:
        """Take note of what training lost to the meetings of a round."""
        if meetings:
            self._stall_s = _mean(self._stall_s, seconds / meetings)

    @property
    def _costs(self) -> dict[str, Cost]:
        return {
            spec: Cost(allocation.least_bytes, allocation.whole_bytes, self._computing_of(spec))
            for spec, allocation in self.allocations.items()
        }

    def _computing_of(self, codec: str) -> float:
        """Return what a byte is to compute; of a codec that was not tried, from the last one that was."""
        known = self._computing_s_per_byte
        if codec in known or not known:
            return known.get(codec, 0.0)
        tried = next(reversed(known))
        return known[tried] * EFFORT[codec] / EFFORT[tried]

    @property
    def _round_s(self) -> float:
        return self._pace.round_s or ROUND_S

    def _fixed_bytes(self) -> int | None:
        """Return what a meeting costs where the run's codec says so."""
        if len(self.allocations) > 1:
            return None
        (allocation,) = self.allocations.values()
        if not allocation.codec.low:
            return allocation.whole_bytes
        return None if allocation.codec.rank is None else allocation.evenly_bytes(allocation.codec.rank)


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - NEWER) * old + NEWER * new
