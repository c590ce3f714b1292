"""Which outer optimizers hold a swarm together: growth of the disagreement between peers.

Let peers be paired at random each round, p the mean of Λ on disagreements, E1 = 1 − αp and E2 = 1 − 2αp + α²p the
means of I − αΛ and of its square (Λ² = Λ for pairs). With equal drifts, the printed forms turn the second moments
(E‖y‖², E⟨y, y_prev⟩, E‖y_prev‖²) of the disagreement into the next round's by

    plain: [[E2 + 2γE1 + γ², −2γ(E1 + γ), γ²], [E1 + γ, −γ, 0], [1, 0, 0]]
    mixed: [[E2(1 + γ)², −2γ(1 + γ)E2, γ²E2], [E1(1 + γ), −γE1, 0], [1, 0, 0]]

and own-momentum, whose buffer no correction enters, the weights' disagreement by E2, for every γ. (Buffers that differ
come closer by themselves, γ²-fold a round.)

n peers, all paired: p = n / (2(n − 1)). A swarm with one peer idle, and every large one: p = ½, where the limit of
plain is α = 2(1 − γ²), and mixed holds for every γ < 1 when α ≤ 0.66. When only some of the peers meet in a round p
is smaller, and so is the limit of both printed forms: it falls towards α = 2(1 − γ), because a correction then has
the time to count 1/(1 − γ)-fold. `check` speaks of swarms in which everybody meets about once a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from peer.core.decision import ALLOWED, Decision
from peer.core.gossip import Form, Outer

SIZES = (2.0, 4.0, 8.0, 32.0, math.inf)
"""Swarm sizes that an outer optimizer must hold for; inf: the limit of large swarms."""

_MARGIN = 1e-6
_BISECTIONS = 40


def mixing(peers: float) -> float:
    """Return p, the mean of Λ on disagreements, when all of an even number of peers are paired at random."""
    return 0.5 if math.isinf(peers) else peers / (2 * (peers - 1))


def growth(outer: Outer, p: float) -> float:
    """Return the factor by which squared disagreement grows a round, at mixing p; below 1 peers come closer."""
    gamma = outer.gamma
    first = 1 - outer.alpha * p
    second = 1 - 2 * outer.alpha * p + outer.alpha**2 * p
    if outer.form is Form.OWN:
        return second
    if outer.form is Form.PLAIN:
        top = [second + 2 * gamma * first + gamma**2, -2 * gamma * (first + gamma), gamma**2]
        middle = [first + gamma, -gamma, 0.0]
    else:
        top = [second * (1 + gamma) ** 2, -2 * gamma * (1 + gamma) * second, gamma**2 * second]
        middle = [first * (1 + gamma), -gamma * first, 0.0]
    return float(np.abs(np.linalg.eigvals(np.array([top, middle, [1.0, 0.0, 0.0]]))).max())


def radius(outer: Outer, peers: float) -> float:
    """Return `growth` for a swarm of so many peers (even, or inf), all paired at random every round."""
    return growth(outer, mixing(peers))


def check(outer: Outer) -> Decision:
    """Decide whether a swarm may run with this outer optimizer; otherwise name the nearest values that hold.

    Reasons: "eta", "gamma", "alpha" (outside their range) and "unstable" (peers would drift apart).
    """
    if not (outer.eta > 0 and math.isfinite(outer.eta)):
        return Decision(False, "eta", f"outer eta is {outer.eta:g}; give a number above 0, such as 1")
    if not 0 <= outer.gamma < 1:
        return Decision(False, "gamma", f"outer gamma is {outer.gamma:g}; give a number from 0 to below 1, such as 0.7")
    if not 0 < outer.alpha <= 1:
        # Above 1 a pair steps beyond its average, and no partner accepts its weight α/2.
        return Decision(False, "alpha", f"outer alpha is {outer.alpha:g}; give a number above 0 and at most 1")
    worst = max(SIZES, key=lambda peers: radius(outer, peers))
    if _stable(outer):
        return ALLOWED
    swarm = "a large swarm" if math.isinf(worst) else f"a swarm of {worst:g}"
    alpha = _largest(lambda value: replace(outer, alpha=value), outer.alpha)
    gamma = _largest(lambda value: replace(outer, gamma=value), outer.gamma)
    return Decision(
        False,
        "unstable",
        f"{outer.form.value} form with alpha {outer.alpha:g} and gamma {outer.gamma:g} drives peers apart: in {swarm} "
        f"their squared disagreement grows {radius(outer, worst):.3g}-fold a round; take alpha {alpha:g} or less, or "
        f"gamma {gamma:g} or less, or the {Form.OWN.value} form, which holds with both",
    )


def _stable(outer: Outer) -> bool:
    return all(radius(outer, peers) < 1 - _MARGIN for peers in SIZES)


def _largest(make: Callable[[float], Outer], unstable: float) -> float:
    """Return the largest stable value between 0 and an unstable one, rounded down to two digits."""
    low, high = 0.0, unstable
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _stable(make(middle)) else (low, middle)
    digits = 2 if low >= 0.1 or low == 0 else 1 - math.floor(math.log10(low))
    scale = 10.0**digits
    return math.floor(low * scale) / scale
