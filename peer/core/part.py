"""How a model is cut for an exchange: each tensor whole, or as a matrix of which a thin product travels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One tensor's share of an exchange: how it is cut, and how many bytes it takes in each leg.

    The tensor is seen as a matrix of `rows` × `columns`, rows ≥ columns (turned if the tensor is wider than high), of
    which `rank` directions travel. Rank 0 means that it travels whole, as rows × columns as they lie in memory, each
    row with a step of its own.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    turned: bool
    rank: int
    leg_bytes: tuple[int, int, int]

    def times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return X thin (rows × rank) for thin (columns × rank), in float32."""
        return _left(x, thin) if self.turned else _right(x, thin)

    def transposed_times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return Xᵀ thin (columns × rank) for thin (rows × rank), in float32."""
        return _right(x, thin) if self.turned else _left(x, thin)


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(x.shape[0], -1).float()


def _right(x: Tensor, thin: Tensor) -> Tensor:
    return _flat(x) @ thin


def _left(x: Tensor, thin: Tensor) -> Tensor:
    # never a product with a transposed view of the large matrix: for small ranks that is over ten times slower
    return (thin.T @ _flat(x)).T


RARITY = 4
"""Under a low-rank codec one in so many meetings carries a vector: a few numbers, but whole, and so a good share of all
bytes."""


def drawn(parts: list[Part], meeting_id: bytes) -> list[Part]:
    """Return the parts of a model that a meeting is about, in their order; both sides draw the same ones.

    All of them, but for vectors beside low-rank matrices: each of these by a chance of its own.
    """
    if not any(part.rank for part in parts):
        return parts
    chance = np.random.PCG64(np.random.SeedSequence(int.from_bytes(meeting_id, "big"))).random_raw(len(parts))
    return [
        part for part, number in zip(parts, chance, strict=True) if len(part.shape) > 1 or int(number) % RARITY == 0
    ]
