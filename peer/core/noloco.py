"""The outer step of NoLoCo (Kolehmainen et al. 2025), a baseline: pairs average drifts and pull their anchors together.

    m ← μ m + η mean(Δ) + η (mean(φ) − φ_i)        Δ = θ_end − φ, the drift; means over the pair
    φ ← φ + m

Written from a description of the method, not from its code; it sends two models a round, Δ and φ.
"""

from __future__ import annotations

import torch

from peer.core.state import State


@torch.no_grad()
def noloco_step(states: list[State], mu: float, eta: float) -> None:
    """End a round of a group of peers that met (two; one that met nobody is a group of itself), in place.

    Uses the outer slot "momentum" for m and the anchor for φ.
    """
    for name in states[0].weights:
        anchors = torch.stack([state.anchor[name] for state in states])
        drift = torch.stack([state.weights[name] for state in states]).sub_(anchors).mean(0)
        middle = anchors.mean(0)
        for state, anchor in zip(states, anchors, strict=True):
            momentum = state.outer["momentum"][name]
            momentum.mul_(mu).add_(drift, alpha=eta).add_(middle - anchor, alpha=eta)
            state.anchor[name].add_(momentum)
            state.weights[name].copy_(state.anchor[name])
    for state in states:
        state.round += 1
