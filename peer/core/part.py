"""How a model is cut for an exchange: each tensor whole, or as a matrix of which a thin product travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One tensor's share of an exchange: how it is cut, and how many bytes it takes in each leg.

    The tensor is seen as a matrix of `rows` × `columns`, rows ≥ columns (turned if the tensor is wider than high), of
    which `rank` directions travel. Rank 0 means that all numbers travel, as rows × columns as they lie in memory, each
    row with a step of its own; a large tensor then comes in several parts, of which this one begins at row `first`.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    turned: bool
    rank: int
    leg_bytes: tuple[int, int, int]
    first: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Return the numbers of a part that travels whole (rows × columns), in x's own memory."""
        matrix = x.view(-1, self.columns) if x.numel() else x.view(self.rows, self.columns)
        return matrix[self.first : self.first + self.rows]

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of the numbers of a part that travels whole (rows × columns)."""
        return self.of(x.detach()).clone()

    def times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return X thin (rows × rank) for thin (columns × rank), in float32."""
        thin = thin.to(x.device)
        return _left(x, thin) if self.turned else _right(x, thin)

    def transposed_times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return Xᵀ thin (columns × rank) for thin (rows × rank), in float32."""
        thin = thin.to(x.device)
        return _right(x, thin) if self.turned else _left(x, thin)


_THINNEST = 3
"""A product with so few columns is twice as fast from the other side."""


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(x.shape[0], -1).float()


def _right(x: Tensor, thin: Tensor) -> Tensor:
    if thin.shape[1] <= _THINNEST:
        return (thin.T.contiguous() @ _flat(x).T).T
    return _flat(x) @ thin


def _left(x: Tensor, thin: Tensor) -> Tensor:
    # never a product with a transposed view of the large matrix: for small ranks that is over ten times slower
    return (thin.T @ _flat(x)).T
