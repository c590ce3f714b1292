"""What a peer expects of its next exchange, with anybody, from its last ones: directions and size of the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from peer.core.change import Change, Correction
from peer.core.half import COLD
from peer.core.part import Part

NEARER = 4.0
"""How much smaller a difference is that an exchange without experience did not see."""

SMALLEST = 0.25
"""The least spread of a direction, as a share of the largest one's: see `even`."""

FADING = 0.5
"""The share of an expected size that stays when an exchange found less: the next partner may be further away."""

FAINT = 0.1
"""What the difference in any direction is taken to be at least, as a share of the strongest: nothing today may grow."""

LONGER = 1.15
"""How much larger the energy in directions is taken to be for every exchange that was not about them."""

NEAR = 1e-3
"""A difference that is not seen is there all the same, as long as it would have to be this large, in own size."""


@dataclass(frozen=True)
class Guess:
    """What an exchange of one tensor starts from, cut as its part is.

    basis: Q (columns × rank, orthonormal), None if the tensor travels whole. spread: the standard deviation of the
    difference in every group of what leg 1 is about; None, or 0, where nothing was found yet. cold: what the difference
    can be at most there, in the numbers' own size.
    """

    basis: Tensor | None
    spread: Tensor | None = None
    cold: float = COLD


@dataclass(frozen=True)
class Prior:
    """Of one tensor, however it is cut. Nothing, before the first exchange.

    basis: directions of the difference (columns × seen, orthonormal), the strongest first. energy: how large it is in
    each of them (seen,), squared; where it went whole, evenly spread over all directions. spread: as in a guess, of
    these directions. rows: as in a guess, of the whole tensor. cold: as there. idle: exchanges in a row that were not
    about this tensor.
    """

    basis: Tensor | None = None
    energy: Tensor | None = None
    spread: Tensor | None = None
    rows: Tensor | None = None
    cold: float = COLD
    idle: int = 0

    def expected(self, rank: int) -> float:
        """Return the energy in direction number `rank`, from 1; beyond those seen it is that of the last."""
        if self.energy is None:
            return math.inf
        return float(self.energy[min(rank, len(self.energy)) - 1]) * LONGER**self.idle

    def guess(self, part: Part, generator: torch.Generator) -> Guess:
        """Return what an exchange starts from; directions that nobody has looked at are random."""
        known = self.energy
        if not part.rank:
            if self.rows is not None:
                return Guess(None, self.rows[part.first : part.first + part.rows], self.cold)
            evenly = None if known is None else (known.sum() / prod(part.shape)).sqrt().expand(part.rows)
            return Guess(None, evenly, self.cold)
        more = torch.randn(part.columns, part.rank, generator=generator)
        seen = more[:, :0] if self.basis is None else self.basis[:, : part.rank]
        # as QR keeps the span of what comes first, but not its signs
        new = torch.linalg.qr(torch.cat((seen, more[:, seen.shape[1] :]), 1))[0][:, seen.shape[1] :]
        spread = self.spread
        if spread is None and known is not None:
            spread = (known / part.rows).sqrt()
        if spread is not None:
            spread = torch.cat((spread, spread.min().expand(max(0, part.rank - len(spread)))))[: part.rank]
        return Guess(torch.cat((seen, new), 1), spread, self.cold)

    def after(self, changes: Sequence[Change]) -> Prior:
        """Return what to expect after an exchange: the directions of C, the old ones where it is zero; and sizes.

        changes: of this tensor, in the order of its parts; more than one only where it went whole.
        """
        change, cold = changes[0], self.cold / NEARER
        part, size = change.part, sum(each.squared_norm() for each in changes)
        if change.right is None:
            rows = torch.cat([spread_of(each.left, part.columns) for each in changes])
            ways = 1 if len(part.shape) < 2 else min(len(rows), part.columns)
            energy = torch.full((ways,), size / max(1, ways)) if size else self._unseen()
            return Prior(None, energy, None, _fading(self.rows, rows), cold)
        if not size:
            spread = None if self.spread is None else FADING * self.spread
            return replace(self, energy=self._unseen(), spread=spread, cold=cold, idle=0)
        basis, sizes, _ = torch.linalg.svd(change.right @ change.lower(), full_matrices=False)
        sizes = torch.maximum(sizes, FAINT * sizes[0])
        if change.spread is not None:
            # C tells too little of D Q where P̂ missed what is there, as when P wrapped around
            sizes = torch.maximum(sizes, math.sqrt(part.rows) * change.spread.sort(descending=True)[0])
        spread = even(sizes / math.sqrt(max(1, part.rows)))
        found = Prior(basis, sizes.square(), spread, self.rows, cold)
        return found if self.basis is None or self.energy is None or self.spread is None else self._kept(found)

    def _unseen(self) -> Tensor | None:
        """Return the energy after an exchange that found nothing; None as long as it could not have."""
        if self.energy is not None:
            return FADING**2 * self.energy
        return None if self.cold > NEAR else torch.zeros(1)

    def _kept(self, found: Prior) -> Prior:
        """Return what was found with the sizes that fade, and the directions that this exchange had no room for."""
        assert self.basis is not None and self.energy is not None and self.spread is not None
        assert found.basis is not None and found.energy is not None and found.spread is not None
        size, seen = len(found.energy), len(self.energy)
        shared = min(size, seen)
        spread = found.spread.clone()
        spread[:shared] = _fading(self.spread[:shared], spread[:shared])
        if seen <= size:
            return replace(found, spread=spread)
        basis = torch.linalg.qr(torch.cat((found.basis, self.basis[:, size:]), 1))[0][:, size:]
        weaker = torch.minimum(LONGER * self.energy[size:], found.energy[-1])
        return replace(
            found,
            basis=torch.cat((found.basis, basis), 1),
            energy=torch.cat((found.energy, weaker)),
            spread=torch.cat((spread, self.spread[size:])),
        )


Priors = dict[str, Prior]
"""Parameter name → prior."""


def start_priors(names: Iterable[str]) -> Priors:
    """Return what a peer that has met nobody expects."""
    return {name: Prior() for name in names}


def seed_of(meeting_id: bytes) -> int:
    """Return the seed of a meeting's random directions."""
    return int.from_bytes(meeting_id[:8], "big", signed=True)


def guesses(parts: Iterable[Part], priors: Priors, seed: int) -> list[Guess]:
    """Return what the exchange of each part starts from; seed: of its random directions."""
    generator = torch.Generator().manual_seed(seed)
    return [priors[part.name].guess(part, generator) for part in parts]


def next_priors(correction: Correction, old: Priors) -> Priors:
    """Return what to expect after an exchange."""
    found: dict[str, list[Change]] = {}
    for change in correction.changes:
        found.setdefault(change.part.name, []).append(change)
    return {
        name: prior.after(found[name]) if name in found else replace(prior, idle=prior.idle + 1)
        for name, prior in old.items()
    }


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


def _fading(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else torch.maximum(new, old * FADING)
