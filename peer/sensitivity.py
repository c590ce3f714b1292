"""How much the loss minds a change in a parameter, as far as the inner optimizer knows."""

from __future__ import annotations

import math

import torch

from peer.core.state import Tensors

SLOT = "exp_avg_sq"

LEAST = 1e-30
"""Of v: a parameter without gradients matters next to nothing, but is not forgotten."""


@torch.no_grad()
def sensitivity(optimizer: torch.optim.Optimizer, weights: Tensors) -> dict[str, float]:
    """Return √(mean v) by name, where v is the running mean of squared gradients.

    Before the first step there is nothing, or the same for all.

    Adam divides by √v, and so takes it for the curvature; so do we. v of a low-rank optimizer is that of the directions
    it follows, and takes the curvature for larger than it is on average, the same in all matrices of one shape.
    """
    memories = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
    known = {name: memory[SLOT] for name, memory in memories.items() if SLOT in memory}
    if not known:
        return {}
    found = torch.stack([v.float().mean().clamp(min=LEAST).sqrt() for v in known.values()]).tolist()
    return {name: value for name, value in zip(known, found, strict=True) if not math.isnan(value)}
