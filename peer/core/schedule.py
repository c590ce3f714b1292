"""The inner learning rate's factor as a function of the round.

Progress is the round plus the fraction of it that is done, so peers that take different numbers of inner steps
agree on the learning rate whenever they agree on the progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from peer.core.decision import ALLOWED, Decision

Kind = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over a run.

    kind: after the warm-up, "cosine" falls on half a wave until the last round, "wsd" (warm-up, stable, decay) stays
    at 1 and falls on a straight line over the last decay_rounds, "constant" stays at 1. warmup_rounds: from 0 to 1 on
    a straight line. decay_rounds: used by "wsd" alone. floor: the factor at the end.
    """

    kind: Kind
    warmup_rounds: float
    decay_rounds: float
    floor: float


def factor(schedule: Schedule, rounds: int, progress: float) -> float:
    """Return what to multiply the peak learning rate by, from 0 to 1.

    rounds: of the whole run; past them the factor stays where it ended. progress: rounds done, with a fraction.
    Continuous in progress for every schedule that `check` allows.
    """
    if progress < schedule.warmup_rounds:
        return max(progress, 0.0) / schedule.warmup_rounds
    if schedule.kind == "constant":
        return 1.0
    length = schedule.decay_rounds if schedule.kind == "wsd" else rounds - schedule.warmup_rounds
    left = rounds - progress  # rounds
    if left <= 0:
        return schedule.floor
    if left >= length:
        return 1.0
    share = left / length
    height = share if schedule.kind == "wsd" else (1 - math.cos(math.pi * share)) / 2
    return schedule.floor + (1 - schedule.floor) * height


def check(schedule: Schedule, rounds: int) -> Decision:
    """Decide whether a schedule fits a run of so many rounds. Reasons: "warmup", "decay", "floor"."""
    warmup, decay = schedule.warmup_rounds, schedule.decay_rounds
    if not (0 <= warmup < math.inf):
        return Decision(False, "warmup", f"warmup_rounds is {warmup:g}; give 0 or more")
    if not (0 <= decay < math.inf):
        return Decision(False, "decay", f"decay_rounds is {decay:g}; give 0 or more")
    if not 0 <= schedule.floor <= 1:
        return Decision(False, "floor", f"floor is {schedule.floor:g}; give a number from 0 to 1")
    if schedule.kind == "cosine" and warmup >= rounds:
        return Decision(False, "warmup", f"warmup_rounds {warmup:g} leaves nothing of {rounds} rounds; shorten it")
    if schedule.kind == "wsd" and warmup + decay > rounds:
        return Decision(
            False, "decay", f"warmup_rounds {warmup:g} and decay_rounds {decay:g} exceed {rounds} rounds; shorten one"
        )
    return ALLOWED
