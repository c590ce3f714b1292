"""What a peer expects of its next exchange, with anybody, from its last ones: directions and size of the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.core.change import Correction
from peer.core.half import COLD
from peer.core.part import Part

NEARER = 4.0
"""How much smaller a difference is that an exchange without experience did not see."""

SMALLEST = 0.25

FADING = 0.5
"""The share of an expected size that stays when an exchange found less: the next partner may be further away."""


@dataclass(frozen=True)
class Prior:
    """Of one tensor. basis: Q (columns × rank, orthonormal), None if it travels whole.

    spread: the standard deviation of the difference in every group of what leg 1 is about; None, or 0, where nothing
    was found yet. cold: what the difference can be at most there, in the numbers' own size.
    """

    basis: Tensor | None
    spread: Tensor | None = None
    cold: float = COLD


Priors = dict[str, Prior]
"""Parameter name → prior."""


def start_priors(parts: list[Part], generator: torch.Generator) -> Priors:
    """Return what a peer that has met nobody expects: a random orthonormal Q for every low-rank part, no spread."""
    return {part.name: Prior(_random(part, generator) if part.rank else None) for part in parts}


def next_priors(correction: Correction, old: Priors) -> Priors:
    """Return what to expect after an exchange: the directions of Z, the old ones where it is zero; and sizes."""
    found = {}
    for change in correction.changes:
        part, before = change.part, old[change.part.name]
        if change.right is None:
            numbers = change.left.reshape(part.rows, part.columns)
            basis, spread = None, spread_of(numbers, part.columns)
        else:
            basis, mixed = torch.linalg.qr(change.right)
            basis, spread = basis if bool(change.right.any()) else before.basis, spread_of(mixed, part.rows)
            # Z tells too little of D Q where P̂ missed what is there, as when P wrapped around
            spread = even(spread if change.spread is None else torch.maximum(spread, change.spread))
        found[part.name] = Prior(basis, _fading(before.spread, spread), before.cold / NEARER)
    return old | found


def spread_of(rows: Tensor, size: int) -> Tensor:
    """Return the standard deviation of `size` numbers whose squares add up to those of a row (rows,).

    A thin Y = Q R tells of the difference D, of which it is a product with something orthonormal, that column j of D Q
    is at least as long as row j of R.
    """
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1) / math.sqrt(max(1, size))
    return norms


def even(spread: Tensor) -> Tensor:
    """Return the spread of some directions, none taken to be less than `SMALLEST` of the largest.

    On a grid that is too narrow a direction looks like any other, and would never be found again.
    """
    return torch.maximum(spread, SMALLEST * spread.max()) if len(spread) else spread


def _random(part: Part, generator: torch.Generator) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(part.columns, part.rank, generator=generator))[0]
    return basis


def _fading(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else torch.maximum(new, old * FADING)
