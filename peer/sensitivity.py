"""How much the loss minds a change in a parameter, as far as the inner optimizer knows."""

from __future__ import annotations

import torch

from peer.core.state import Tensors

SLOT = "exp_avg_sq"


@torch.no_grad()
def sensitivity(optimizer: torch.optim.Optimizer, weights: Tensors) -> dict[str, float]:
    """Return √(mean v) by name, where v is the running mean of squared gradients; nothing before the first step.

    Adam divides by √v, and so takes it for the curvature; so do we. v of a low-rank optimizer is that of the directions
    it follows, and takes the curvature for larger than it is on average, the same in all matrices of one shape.
    """
    known = {name: memory[SLOT] for name, weight in weights.items() if SLOT in (memory := optimizer.state[weight])}
    if not known:
        return {}
    found = torch.stack([v.float().mean().clamp(min=0).sqrt() for v in known.values()]).tolist()
    return {name: value for name, value in zip(known, found, strict=True) if value > 0}
