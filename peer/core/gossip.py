"""The outer step of GASLoC in its three forms: tensors in, tensors out.

One round of a peer, with outer learning rate η, outer momentum γ and gossip step α (arXiv 2606.11081):

    θ_start                      weights at the start of the round (the anchor)
    θ_end  = H inner steps
    g      = θ_end − θ_start     the drift
    y      = θ_start + η g       the proposed point
    Λ      = Σ_(i,j) λ_ij (e_i − e_j)(e_i − e_j)ᵀ     the graph's Laplacian; λ = ½ for a pair

    plain         θ_next = y − α Λ y + γ (y − y_prev)                              as printed
    mixed         θ_next = v − α Λ v,   v = y + γ (y − y_prev)
    own-momentum  θ_next = v − α Λ v,   v = θ_start + η (g + γ m),  m ← γ m + g

The outer step here is a peer's own part, all but Λ. Λ comes from meetings, at any time: one side subtracts w C, the
other adds w C (`pair_weight`), where C is the difference of what `exchanged` returns, or a lossy reading of it.

A correction is added to the weights *and to the anchor*, never to the drift. So own-momentum never sees it: its buffer
holds the peer's own drifts alone, and a correction passes through every later outer step unchanged. In the two printed
forms y contains it and y_prev does not, so it becomes momentum, as in the paper: in the end it counts 1/(1 − γ)-fold.

What a swarm does on average: all three forms are linear with the same coefficients for every peer. So the mean over
peers is exactly DiLoCo's, torch's SGD(lr=η, momentum=γ, nesterov=True) on the mean drift, whatever the graph and
however lossy the corrections, if both sides of a meeting apply them (equal and opposite) in rounds of the same
number, early or late in it. Under own-momentum these rounds may differ too: the mean is on DiLoCo's path whenever no
meeting is half applied. In the printed forms the side that applied earlier has by then turned more of the correction
into momentum: the mean errs by an amount that shrinks γ-fold a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from peer.core.state import State, Tensors


class Form(Enum):
    """Where the outer momentum stands in relation to mixing."""

    OWN = "own-momentum"
    MIXED = "mixed"
    PLAIN = "plain"


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: form, η (eta), γ (gamma), α (alpha). `peer.core.stability.check` says which values hold."""

    form: Form = Form.OWN
    eta: float = 0.7
    gamma: float = 0.65
    alpha: float = 1.0


_SLOTS = {Form.OWN: ("momentum",), Form.MIXED: ("previous",), Form.PLAIN: ("previous", "push")}


def slots(form: Form) -> tuple[str, ...]:
    """Name the outer memory of a form, in a fixed order; each slot is as large as the weights."""
    return _SLOTS[form]


def start(form: Form, weights: Tensors) -> dict[str, Tensors]:
    """Return the outer memory before the first round: y_prev is θ_0, momentum and push are zero."""
    with torch.no_grad():
        return {
            slot: {
                name: weight.detach().clone() if slot == "previous" else torch.zeros_like(weight)
                for name, weight in weights.items()
            }
            for slot in slots(form)
        }


@torch.no_grad()
def outer_step(outer: Outer, state: State) -> float:
    """End a round: set weights and anchor to v (plain: y plus push) in place, advance the round.

    Needs one temporary tensor of one parameter at a time. The weights keep their storage, so the model sees the step.
    With η = 1 and γ = 0 the weights are not touched at all: one peer alone is plain inner training, bit for bit.
    Returns the L2 norm of the drift.
    """
    squares = 0.0
    for name, weight in state.weights.items():
        memory = [state.outer[slot][name] for slot in slots(outer.form)]
        squares += _step(outer, weight, state.anchor[name], memory) ** 2
    state.round += 1
    return math.sqrt(squares)


def _step(outer: Outer, weight: Tensor, anchor: Tensor, memory: list[Tensor]) -> float:
    """Take the outer step of one parameter; a function of its own so that its temporary dies with it."""
    temporary = weight - anchor  # g
    # Row by row: one float32 sum over a whole embedding is off by 1e-3.
    norm = float(torch.linalg.vector_norm(torch.linalg.vector_norm(temporary, dim=-1), dtype=torch.float64))
    if outer.form is Form.OWN:
        memory[0].mul_(outer.gamma).add_(temporary)
    # θ_start + η g, written from θ_end so that η = 1 rounds nothing.
    _add(weight, temporary, outer.eta - 1.0)
    if outer.form is Form.OWN:
        _add(weight, memory[0], outer.eta * outer.gamma)
    elif outer.form is Form.MIXED:
        torch.sub(weight, memory[0], out=temporary)  # y − y_prev
        memory[0].copy_(weight)
        _add(weight, temporary, outer.gamma)
    else:
        previous, push = memory
        torch.sub(weight, previous, out=push).mul_(outer.gamma)
        previous.copy_(weight)
        _add(weight, push, 1.0 if outer.gamma else 0.0)
    anchor.copy_(weight)
    return norm


def _add(target: Tensor, term: Tensor, factor: float) -> None:
    # Adding 0 × term is not nothing: −0 would become +0, and 0 × ∞ is NaN.
    if factor:
        target.add_(term, alpha=factor)


@torch.no_grad()
def exchanged(outer: Outer, state: State, name: str) -> Tensor:
    """Return what a meeting mixes of one parameter: the live weight, or for plain weight − push, so that Λ acts on y.

    Own-momentum and mixed return a view, which changes as training goes on; plain returns a new tensor.
    """
    weight = state.weights[name].detach()
    return weight - state.outer["push"][name] if outer.form is Form.PLAIN else weight


def pair_weight(alpha: float, at_once: int = 1) -> float:
    """Return w of X_a −= w C, X_b += w C where a peer holds so many meetings at once: α/(k + 1).

    That is λ_ij of `laplacian`: α/2 for a pair, since there Λ y is ½ (y_i − y_j).
    """
    return alpha / (at_once + 1)


def laplacian(edges: Iterable[tuple[int, int]], n: int) -> Tensor:
    """Return Λ (n × n, float64) of an undirected graph of meetings with λ_ij = 1 / (1 + max(degree_i, degree_j)).

    For a matching that is ½ for every pair, for the complete graph 1/n, with which α = 1 gives the mean; for k
    meetings at once 1/(k + 1). Raises ValueError when an edge is repeated, a loop, or leads outside 0 … n − 1.
    """
    pairs = [tuple(sorted(edge)) for edge in edges]
    if len(set(pairs)) < len(pairs) or any(not 0 <= i < j < n for i, j in pairs):
        raise ValueError(f"{pairs} is no set of edges between {n} peers")
    degree = [sum(i in pair for pair in pairs) for i in range(n)]
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for i, j in pairs:
        weight = 1 / (1 + max(degree[i], degree[j]))
        matrix[i, i] += weight
        matrix[j, j] += weight
        matrix[i, j] = matrix[j, i] = -weight
    return matrix


def mix(points: Tensor, laplacian: Tensor, alpha: float) -> Tensor:
    """Return (I − α Λ) points; points: n × d, one peer a row; laplacian: n × n."""
    return points - alpha * (laplacian.to(points) @ points)
