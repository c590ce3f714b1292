"""LoRDO, the low-rank inner optimizer (arXiv 2602.04396): Adam's moments in a few directions of every matrix.

For a weight W (p × q, p ≤ q; else seen transposed), an orthonormal basis Q (p × r), learning rate η, in step t:

    Ĝ                                                   the clipped gradient (clipping is the caller's)
    ĝ = Qᵀ (Ĝ + E)          E ← Ĝ + E − Q ĝ             error feedback, if it is on
    u ← β1 u + (1−β1) ĝ     v ← β2 v + (1−β2) ĝ²        r × q
    ψ = û / (√v̂ + ε)        û = u / (1−β1ᵗ), v̂ = v / (1−β2ᵗ)
    W ← (1 − ω η decay) W − η [ (1−ω) F + ω Q ψ ]

The moments are bias-corrected as in Adam. The equations as printed leave that open; LDAdam's rotation (`rotate`), which
they go with, is written in û and v̂, and without it the first steps are 1/√(1−β2) times too large or, of u, too small.

η is lr/ω: then the low-rank term and the decay are AdamW's at the same lr, whatever ω.

F is the full-rank quasi-hyperbolic term. Without it (ω = 1) every update lies in col(Q), so does the drift, and a basis
that is made from the drift can never leave it. What scales it could not be recovered from the paper; there are

    scalar   F = Ĝ / mean(√v̂ + ε)                        the mean over the whole of r × q
    column   F = Ĝ / mean over the r rows of (√v̂ + ε)    one scale a column
    fira     F_j = S_j ‖ψ_j‖ / ‖ĝ_j‖                      S = Ĝ − Q Qᵀ Ĝ, a column j at a time (Fira, arXiv 2410.01623)
    unit     F_j = S_j / (size of S_j + ε)               size: ‖S_j‖ / √(p−r), the root mean square in its directions

scalar and column add the whole Ĝ, as printed; fira and unit what col(Q) leaves out, since ψ stands for the rest. At
small r a column of ĝ is by chance far smaller than that of S, and Fira's scale diverges, even with its limiter of norm
growth; so here no column of F is larger, by size, than that of ψ. unit is Adam without momentum and with one v̂ for a
column, that of this very step: in the mean of many steps it moves as far as Adam, so ω = ½ weighs both alike.

Once a round Q is made anew, from the round's drift Δ or a seed (`project`, `drawn`), and the moments follow (`rotate`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from peer.core.quantize import Format, decode, encode, encoded_bytes

Mu = Literal["scalar", "column", "fira", "unit"]
Projection = Literal["power", "svd", "random"]
Feedback = Literal["none", "int8"]

SHARE = 12
"""Rank 0 stands for the shorter side divided by this: 64 at width 768."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What does not change in a run; the learning rate does.

    rank: see `rank_of`. omega: ω, above 0 and at most 1. weight_decay: of matrices, decoupled. projection: "power" and
    "svd" are `project`'s, "random" is `drawn`.
    """

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    rank: int
    omega: float
    mu: Mu
    projection: Projection
    feedback: Feedback


@dataclass(frozen=True)
class Memory:
    """What is kept of one matrix, changed in place. basis: Q (p × r); first, second: u and v (r × q).

    feedback: E in 8 bits (see `code`), or None.
    """

    basis: Tensor
    first: Tensor
    second: Tensor
    feedback: Tensor | None = None


def rank_of(shape: tuple[int, ...], rank: int) -> int:
    """Return a matrix's rank: the one asked for, 0 for a twelfth of the shorter side; at least 1, at most that side."""
    side = min(shape)
    return max(1, min(rank or side // SHARE, side))


def upright(matrix: Tensor) -> Tensor:
    """Return a view of a matrix that is no higher than wide."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def reduced(basis: Tensor, matrix: Tensor) -> Tensor:
    """Return Qᵀ M (r × q) for M (p × q)."""
    # A product with a transposed view of the large matrix can take twice as long.
    return basis.mT @ matrix if matrix.is_contiguous() else (matrix.mT @ basis).mT


# ---------------------------------------------------------------- one step


@torch.no_grad()
def update(weight: Tensor, gradient: Tensor, memory: Memory, rule: Rule, step: int, lr: float) -> None:
    """Take an inner step in place; weight and gradient (p × q, of the memory's dtype), step: 1 for the first one.

    lr: AdamW's, η = lr/ω.
    """
    low = compress(gradient, memory)
    moments(low, memory.first, memory.second, rule)
    spread = (memory.second / (1 - rule.beta2**step)).sqrt_().add_(rule.epsilon)
    adaptive = memory.first / (1 - rule.beta1**step) / spread
    weight.mul_(1 - lr * rule.weight_decay)
    scale = None
    if rule.omega < 1:
        inside = low if memory.feedback is None else reduced(memory.basis, gradient)
        scale = (1 / rule.omega - 1) * full_rank_scale(rule, gradient, inside, low, adaptive, spread)
        if rule.mu in ("fira", "unit"):
            adaptive -= scale * inside
    descend(weight, gradient, memory.basis, adaptive, scale, lr)


def compress(gradient: Tensor, memory: Memory) -> Tensor:
    """Return ĝ (r × q) and, where there is error feedback, keep what it leaves out."""
    if memory.feedback is None:
        return reduced(memory.basis, gradient)
    whole = gradient + uncoded(memory.feedback, gradient)
    low = reduced(memory.basis, whole)
    code(whole.sub_(memory.basis @ low), memory.feedback)
    return low


def moments(low: Tensor, first: Tensor, second: Tensor, rule: Rule) -> None:
    """Take a gradient into both moments, in place."""
    first.lerp_(low, 1 - rule.beta1)
    second.mul_(rule.beta2).addcmul_(low, low, value=1 - rule.beta2)


def full_rank_scale(
    rule: Rule, gradient: Tensor, inside: Tensor, low: Tensor, adaptive: Tensor, spread: Tensor
) -> Tensor:
    """Return what scales Ĝ or S in F, a number or one for each column (q).

    gradient: Ĝ; inside: Qᵀ Ĝ; low: ĝ; adaptive: ψ; spread: √v̂ + ε. r × q but for Ĝ.
    """
    if rule.mu == "scalar":
        return 1 / spread.mean()
    if rule.mu == "column":
        return 1 / spread.mean(0)
    unit = outside_scale(gradient, inside, rule.epsilon)
    if rule.mu == "unit":
        return unit
    size = adaptive.norm(dim=0)
    return torch.minimum(size / low.norm(dim=0).clamp(min=torch.finfo(low.dtype).tiny), size / len(low) ** 0.5 * unit)


def outside_scale(gradient: Tensor, inside: Tensor, epsilon: float) -> Tensor:
    """Return 1 / (‖S_j‖ / √(p−r) + ε) for each column of S = Ĝ − Q Qᵀ Ĝ, 0 where S is nothing but rounding."""
    rows, directions = len(gradient), len(gradient) - len(inside)
    whole = torch.linalg.vector_norm(gradient, dim=0) ** 2
    left = whole - torch.linalg.vector_norm(inside, dim=0) ** 2  # Q is orthonormal, so S itself is not needed
    if not directions:
        return torch.zeros_like(left)
    size = (left.clamp(min=0) / directions).sqrt()
    return torch.where(left > rows * torch.finfo(gradient.dtype).eps * whole, 1 / (size + epsilon), 0)


def descend(weight: Tensor, gradient: Tensor, basis: Tensor, thin: Tensor, scale: Tensor | None, lr: float) -> None:
    """Subtract η (scale ∘ Ĝ + Q thin) in place, without a temporary of the weight's size; thin: r × q; None: no Ĝ."""
    if scale is not None:
        weight.addcmul_(gradient, scale, value=-lr)
    weight.addmm_(basis, thin, alpha=-lr)


@torch.no_grad()
def adam(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rule: Rule, step: int, lr: float, decay: float
) -> None:
    """Take a step of AdamW in place, for what is not low-rank; all of one shape and dtype."""
    moments(gradient, first, second, rule)
    weight.mul_(1 - lr * decay)
    spread = second.sqrt().div_((1 - rule.beta2**step) ** 0.5).add_(rule.epsilon)
    weight.addcdiv_(first, spread, value=-lr / (1 - rule.beta1**step))


# ---------------------------------------------------------------- error feedback


def coded_bytes(shape: tuple[int, ...]) -> int:
    """Return how many bytes E takes for a matrix of this shape: a quarter of float32, and a scale for 64 numbers."""
    return encoded_bytes(Format.INT8, shape[0] * shape[1])


def code(error: Tensor, out: Tensor) -> None:
    """Write E into `out` (uint8), in 8 bits with a scale for every 64 numbers; what is not finite becomes 0."""
    # A gradient that overflowed shows in the weights; it is no reason to stop here.
    finite = torch.nan_to_num(error, 0.0, 0.0, 0.0)
    out.copy_(torch.frombuffer(encode(finite, Format.INT8), dtype=torch.uint8))


def uncoded(feedback: Tensor, like: Tensor) -> Tensor:
    """Return E with another tensor's shape, dtype and device."""
    payload = feedback.cpu().numpy().data
    return decode(payload, Format.INT8, tuple(like.shape)).to(like)


# ---------------------------------------------------------------- the basis


def drawn(shape: tuple[int, ...], seed: int, name: str, round: int) -> Tensor:
    """Return an orthonormal basis (p × r, float64, on the CPU) that every peer of a run draws alike."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = np.random.Generator(np.random.PCG64([seed, round, int.from_bytes(digest[:16], "little")]))
    basis: Tensor
    basis, triangle = torch.linalg.qr(torch.from_numpy(generator.standard_normal(shape)))
    basis = basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)  # QR leaves the signs to the library
    return basis.contiguous()  # as a checkpoint gives it back: a product's last bits depend on the layout


@torch.no_grad()
def project(delta: Tensor, old: Tensor, how: Literal["power", "svd"]) -> Tensor:
    """Return the basis that follows Q_old, from a drift Δ (p × q).

    power: QR(Δ Δᵀ Q_old), one step of block power iteration from the old basis. svd: the r first left singular vectors
    of Δ. Where Δ is numerically rank-deficient Q_old is kept: both take Δ Δᵀ + √eps λ P, λ the size of Δ Δᵀ and P the
    projection on col(Q_old), which decides where Δ does not and shifts a direction by about √eps elsewhere. A drift
    that is zero or not finite leaves Q_old as it is.
    """
    thin = reduced(old, delta)
    size = float(thin.norm() if how == "power" else delta.norm())
    if not 0 < size < math.inf:
        return old.clone()
    tie = torch.finfo(old.dtype).eps ** 0.5
    if how == "power":
        image = delta @ (thin / size).mT
        return _orthonormal(image / image.norm() + tie * old)
    scaled = delta / size
    square = scaled @ scaled.mT
    square = square / square.norm() + tie * (old @ old.mT)
    return _leading(square, old.shape[1])


@torch.no_grad()
def rotate(memory: Memory, basis: Tensor, rule: Rule, steps: int) -> None:
    """Take a new basis and express the moments in it, in place; steps: t − 1, those taken so far.

    R = Q_newᵀ Q_old ;  u ← R u ;  v ← (1−β2^(t−1)) |(R∘R)(v̂ − û²) + (R û)²|         (LDAdam, arXiv 2410.16103)

    v's rule is exact where the rows of ĝ are uncorrelated.
    """
    if steps:
        turn = basis.mT @ memory.basis
        mean = memory.first / (1 - rule.beta1**steps)
        square = memory.second / (1 - rule.beta2**steps)
        turned = (turn * turn) @ (square - mean**2) + (turn @ mean) ** 2
        memory.second.copy_(turned.abs_().mul_(1 - rule.beta2**steps))
        memory.first.copy_(turn @ memory.first)
    memory.basis.copy_(basis)


def _orthonormal(thin: Tensor) -> Tensor:
    # On the CPU in double precision: it is small there, and not every accelerator has a QR.
    basis: Tensor = torch.linalg.qr(thin.to("cpu", torch.float64))[0]
    return basis.to(thin)


def _leading(square: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors of a symmetric matrix that belong to the largest eigenvalues, the largest first."""
    here = square.cpu() if square.device.type == "mps" else square  # which has no eigh
    vectors: Tensor = torch.linalg.eigh(here)[1]
    return vectors[:, -rank:].flip(1).to(square)
