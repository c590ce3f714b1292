"""State: what is checkpointed, handed to newcomers, and advanced. Nothing else is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]
"""Parameter name → tensor, in the model's own order."""


@dataclass(frozen=True)
class Cursor:
    """Where in its stream a peer reads: which shard, which pass over it, how many sequences of that pass are read."""

    shard: int = 0
    lap: int = 0
    sequence: int = 0


@dataclass
class State:
    """One peer's whole training state.

    weights: the live parameters, float32, the very tensors that the model computes with.
    anchor: the weights at the start of the round, plus every correction since.
    outer: slot → tensors, the outer optimizer's memory (see `peer.core.gossip`); each shaped like the weights.
    inner: slot → tensors, the inner optimizer's memory (AdamW: exp_avg, exp_avg_sq, step; LoRDO: basis, feedback too).
    round: outer steps done. step: inner steps done since this peer's first round.
    origin: hash of the run's first weights, the same for all peers of a run.
    """

    weights: Tensors
    anchor: Tensors
    outer: dict[str, Tensors]
    inner: dict[str, Tensors] = field(default_factory=dict)
    round: int = 0
    step: int = 0
    cursor: Cursor = Cursor()
    origin: str = ""
