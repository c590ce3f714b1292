"""How many meetings a round, and how rich: what the link's share and the round allow, unnoticed by training.

What the lab found (docs/algorithms.md, "What was measured") is the order of the rungs. At equal bytes many cheap
meetings beat few rich ones, so a round has as many as the run wants, and the link decides how rich each is: all of the
model, exact or rounded, or as many directions of it as there is room for, and below one direction of everything those
tensors that matter most. Only what is too little for a single tensor makes meetings fewer, one in several rounds in the
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peer.core.terms import ladder

MEETING_SHARE = 0.25
"""No meeting should take more of a round than this."""

WAITING_SHARE = 0.3
"""Of a round, at most this goes to what a meeting needs beside its bytes: round trips and arithmetic."""

TRAINING_SHARE = 0.005
"""Of a round, training is to lose at most this to meetings."""

COMPUTING_SHARE = 0.1
"""Of a round, a processor core is to compute for meetings at most this; on a CPU it may be one that training uses."""

FEWEST = 2
"""So many meetings a round are worth what they cost, if the link has room for them."""

RAREST = 1 / 16
"""A peer meets somebody once in so many rounds, whatever its link."""


@dataclass(frozen=True)
class Cost:
    """What meetings of a codec take, in bytes of all legs together: least, where they are smallest; whole, at most.

    computing_s_per_byte: of a processor core.
    """

    least_bytes: int
    whole_bytes: int
    computing_s_per_byte: float = 0.0

    def bearable_bytes(self, round_s: float) -> float:
        """Return what a round's meetings may carry without being too much to compute."""
        return _ratio(COMPUTING_SHARE * round_s, self.computing_s_per_byte)


@dataclass(frozen=True)
class Means:
    """What there is to spend.

    bits_per_s: what this peer sends at most. waiting_s: what a meeting takes beside its bytes. round_s: how long a
    round takes. share: of the link, for meetings. stall_s: what training loses to a meeting. most: meetings a round
    that the run wants. budget_bytes: of a meeting under a fixed codec; None: up to the link. limited: bits_per_s is
    what the user allows.
    """

    bits_per_s: float
    waiting_s: float
    round_s: float
    share: float
    stall_s: float
    most: int
    budget_bytes: int | None = None
    limited: bool = False


@dataclass(frozen=True)
class Plan:
    """What a peer means to do. meetings: a round, less than 1 for one in several rounds.

    budget_bytes: of a meeting, all legs together. round_bytes: of all meetings of a round, both ways.
    """

    meetings: float
    codec: str
    budget_bytes: int
    round_bytes: float
    why: str


def plan(means: Means, codec: str, costs: Mapping[str, Cost]) -> Plan:
    """Choose; codec: the run's; costs: of every codec that it allows."""
    allowed = 2 * means.share * means.bits_per_s * means.round_s / 8  # both ways: a meeting's legs add up to twice one
    meetings, limit = float(means.most), "the run wants no more"
    for most, why in (
        (_ratio(WAITING_SHARE * means.round_s, means.waiting_s), "more would not fit into a round"),
        (_ratio(TRAINING_SHARE * means.round_s, means.stall_s), "more would slow training down"),
    ):
        most = max(most, min(FEWEST, means.most))
        if most < meetings:
            meetings, limit = most, why
    meetings = _whole(meetings)
    bearable = {spec: min(allowed, costs[spec].bearable_bytes(means.round_s)) for spec in ladder(codec)}
    each = {spec: most / max(meetings, 1.0) for spec, most in bearable.items()}
    spec = _richest(costs, each)
    budget = min(int(each[spec]), costs[spec].whole_bytes) if means.budget_bytes is None else means.budget_bytes
    budget = max(budget, costs[spec].least_bytes)
    if budget * meetings > bearable[spec]:
        too_much = "more would take more of the link" if bearable[spec] == allowed else "more would be more to compute"
        meetings, limit = _whole(bearable[spec] / budget), too_much
    if meetings < (rarest := min(RAREST, means.most)):
        meetings, limit = rarest, "a peer meets somebody that often, whatever its link"
    rich = "all of the model" if budget >= costs[spec].whole_bytes else f"{budget / 1e6:.3g} MB of the model"
    rate = f"{means.bits_per_s / 1e6:.3g} Mbit/s"
    share = f"the {rate} that are allowed" if means.limited else f"{means.share:.0%} of {rate}"
    why = (
        f"{share} for a round of {means.round_s:.3g} s is {allowed / 2e6:.3g} MB each way: "
        f"{meetings:.3g} meeting{'' if meetings == 1 else 's'} with {rich}, as {limit}"
    )
    return Plan(meetings, spec, budget, allowed, why)


def within(planned: Plan, costs: Mapping[str, Cost], bits_per_s: float, round_s: float) -> tuple[str, int]:
    """Return codec and budget of a meeting over a link of so many bits a second, so that it takes its share of a round.

    costs: of every codec that the run allows, the richest first.
    """
    link = int(2 * MEETING_SHARE * round_s * bits_per_s / 8)
    rungs = list(costs)
    most = {
        spec: min(planned.budget_bytes, link, costs[spec].bearable_bytes(round_s) / max(planned.meetings, 1.0))
        for spec in rungs[rungs.index(planned.codec) :]
    }
    spec = _richest(costs, most)
    return spec, max(min(int(most[spec]), costs[spec].whole_bytes), costs[spec].least_bytes)


def _richest(costs: Mapping[str, Cost], each_bytes: Mapping[str, float]) -> str:
    """Return the first codec of which a meeting may be as large as it is at least, or the last."""
    *richer, poorest = each_bytes
    return next((spec for spec in richer if costs[spec].least_bytes <= each_bytes[spec]), poorest)


def _whole(meetings: float) -> float:
    return float(int(meetings * (1 + 1e-9))) if meetings >= 1 else meetings


def _ratio(whole: float, part: float) -> float:
    return whole / part if part > 0 else float("inf")
