"""The algorithms on the bench, by name: who averages what with whom; published constants where there are any."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from peer.core.gossip import Form, Outer


class Mixing(Enum):
    """How peers agree."""

    GRADIENTS = "gradients"  # all-reduce of gradients at every inner step
    DRIFTS = "drifts"  # all-reduce of drifts at the end of a round
    NOLOCO = "noloco"  # pairs average drifts and anchors at the end of a round
    MEETINGS = "meetings"  # the daemon's: exchanges of differences, beside training or after the round


@dataclass(frozen=True)
class Algorithm:
    """One method.

    outer: its constants; for NoLoCo γ is its μ. meetings: None where the run's own number counts. inner: the inner
    optimizer that belongs to it, None: the run's. fixed: whether outer constants that are given are passed over, since
    there is no outer step. own_bases: whether an all-reduce method makes low-rank bases of each peer's own drift, in
    place of the mean of all.
    """

    mixing: Mixing
    outer: Outer
    what: str
    meetings: int | None = None
    inner: Literal["lordo"] | None = None
    fixed: bool = False
    own_bases: bool = False


NO_MOMENTUM = Outer(eta=1.0, gamma=0.0)
"""The weights after a round are those that averaging left."""

ALGORITHMS = {
    "gasloc": Algorithm(Mixing.MEETINGS, Outer(), "GASLoC with own momentum, the daemon's default"),
    "gasloc-mixed": Algorithm(
        Mixing.MEETINGS, Outer(Form.MIXED, 1.0, 0.7, 0.5), "GASLoC with mixed momentum, γ 0.7, α 0.5"
    ),
    "gasloc-plain": Algorithm(
        Mixing.MEETINGS, Outer(Form.PLAIN, 1.0, 0.7, 0.5), "GASLoC as printed, momentum unmixed, γ 0.7, α 0.5"
    ),
    "diloco": Algorithm(
        Mixing.DRIFTS, Outer(eta=0.7, gamma=0.9), "DiLoCo: all-reduce of drifts, Nesterov momentum, η 0.7, γ 0.9"
    ),
    "ddp": Algorithm(
        Mixing.GRADIENTS, NO_MOMENTUM, "data-parallel training: gradients averaged every step", fixed=True
    ),
    "lordo": Algorithm(
        Mixing.DRIFTS,
        NO_MOMENTUM,
        "LoRDO: all-reduce of drifts, low-rank inside, bases from their mean",
        inner="lordo",
    ),
    "lordo-local": Algorithm(
        Mixing.DRIFTS,
        NO_MOMENTUM,
        "the same with bases from each peer's own drift",
        inner="lordo",
        own_bases=True,
    ),
    "lordo-ddp": Algorithm(Mixing.GRADIENTS, NO_MOMENTUM, "low-rank data-parallel training", inner="lordo", fixed=True),
    "noloco": Algorithm(Mixing.NOLOCO, Outer(eta=0.7, gamma=0.5), "NoLoCo: random pairs, μ 0.5, η 0.7"),
    "pair-average": Algorithm(Mixing.MEETINGS, NO_MOMENTUM, "pair averaging without outer momentum", fixed=True),
    "alone": Algorithm(Mixing.MEETINGS, Outer(), "no communication: each peer's outer momentum alone", meetings=0),
}
"""Name → method. Constants are the published ones for DiLoCo and NoLoCo."""
