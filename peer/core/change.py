"""What a meeting comes to: a change of every tensor, equal and opposite on the two sides, and what to expect next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peer.core.part import Part
from peer.core.state import Tensors

_CHUNK = 2**18

_TINY = 1e-9
"""What keeps a matrix whose columns say the same positive definite."""


@dataclass(frozen=True)
class Change:
    """C of one part: `left` (rows × rank) times `right` (columns × rank) transposed; `left` (rows × columns) if whole.

    spread: the standard deviation of D Q's columns, where D is the difference and Q the caller's basis (rank,).
    """

    part: Part
    left: Tensor
    right: Tensor | None
    spread: Tensor | None = None

    def add_(self, x: Tensor, weight: float) -> None:
        """Add weight × C to a tensor in place, on the tensor's own device and in its dtype."""
        if self.right is None:
            self.part.of(x).add_(self.left.to(x.device, x.dtype), alpha=weight)
            return
        left, right = self.left.to(x.device), self.right.to(x.device)
        if self.part.turned:
            left, right = right, left
        flat = x.view(x.shape[0], -1)
        if x.dtype == torch.float32:
            flat.addmm_(left, right.T, alpha=weight)
        else:
            flat.add_((left @ right.T).mul_(weight).to(x.dtype))

    def to(self, device: torch.device) -> Change:
        """Return this change on a device."""
        if self.left.device == device:
            return self
        right = None if self.right is None else _moved(self.right, device)
        return replace(self, left=_moved(self.left, device), right=right)

    def squared_norm(self) -> float:
        """Return ‖C‖²; for factors tr((PᵀP)(δᵀδ)), without forming C."""
        if self.right is None:
            # in pieces: one sum of so many squares in float32 is off by a third of a percent
            pieces = torch.split(self.left.reshape(-1), _CHUNK)
            return math.fsum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in pieces)
        right = self.right.double()
        return float((self._gram() * (right.T @ right)).sum().clamp(min=0))

    def lower(self) -> Tensor:
        """Return L (rank × rank), lower triangular, of L Lᵀ = PᵀP: right @ L has the singular values of C."""
        gram = self._gram()
        lower: Tensor = torch.linalg.cholesky_ex(gram.diagonal_scatter(gram.diagonal() + _TINY))[0]
        return lower.float()

    def _gram(self) -> Tensor:
        left = self.left.double()
        return left.T @ left


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # it fetches that by itself
    return x.to(device)


@dataclass(frozen=True)
class Correction:
    """C of a whole model. The caller adds −w C, the callee +w C: equal and opposite, so the swarm's mean stays."""

    changes: tuple[Change, ...]

    @torch.no_grad()
    def add_(self, weight: float, *models: Tensors) -> None:
        """Add weight × C to every tensor of some models (weights, anchor) in place."""
        for change in self.changes:
            for tensors in models:
                change.add_(tensors[change.part.name], weight)

    def to(self, device: torch.device) -> Correction:
        """Return this correction on a device."""
        return Correction(tuple(change.to(device) for change in self.changes))

    def norm(self) -> float:
        """Return the L2 norm of C over all tensors."""
        return math.sqrt(sum(change.squared_norm() for change in self.changes))
