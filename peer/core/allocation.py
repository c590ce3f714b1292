"""What of a model a meeting is about: as many directions of each tensor as are worth their bytes.

A low-rank codec names a budget, that of R directions of every matrix. How to spend it the caller decides anew for every
meeting, one direction after another, each time where a byte buys most. Averaging a direction in which two peers differ
by an energy of σ² (a squared singular value of the difference) is worth about h σ², where h is how much the loss minds
(`peer.sensitivity`): differences are larger in some tensors than in others, and matter more in some.

What σ² to expect a peer knows from its last exchanges, with whomever (`peer.core.prior`). A direction beyond those it
has seen is taken to be as strong as the weakest of them, and so a tensor gets one more, and then another, for as long
as what is found there is worth it; what nobody has looked at for some meetings is taken to grow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from peer.core.codec import Codec, part, parts
from peer.core.part import Part
from peer.core.prior import Prior
from peer.errors import ProtocolError

VECTORS = 1 / 4
"""The share of all vectors' bytes that the budget counts beside low-rank matrices: a few numbers, but whole."""

CURIOSITY = 4
"""A tensor gets at most one direction in so many, and at least one, more than were ever looked at."""

FORGOTTEN = 16
"""After so many meetings in a row that left a tensor out one looks at it, whatever it is thought to be worth."""


@dataclass(frozen=True, order=True)
class _Bid:
    """One more direction of a tensor; the smallest goes first, among equals the lowest rank."""

    price: float
    rank: int
    name: str
    bytes: int


class Allocation:
    """How meetings of one run are made up. shapes: of the parameters, in the model's order."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], codec: Codec) -> None:
        self.codec = codec
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._most = {
            name: max(1, min(shape[0], prod(shape[1:]))) if shape else 1 for name, shape in self._shapes.items()
        }
        self._cuts: dict[tuple[str, int], Part] = {}
        evenly = parts(self._shapes, codec)
        total = sum(_bytes(each) * (1 if len(each.shape) > 1 else VECTORS) for each in evenly)
        self._budget_bytes = max(int(total), *(_bytes(self._cut(name, 1)) for name in self._shapes))

    def ranks(self, priors: Mapping[str, Prior], sensitivity: Mapping[str, float]) -> list[int]:
        """Return how many directions of each tensor to send, 0: nothing; nothing at all to say where all go whole.

        sensitivity: h by name; 1 where there is none.
        """
        if self.codec.rank is None:
            return []
        ranks, left = dict.fromkeys(self._shapes, 0), self._budget_bytes
        heap = [bid for name in self._shapes for bid in self._next(name, 1, priors, sensitivity)]
        heapq.heapify(heap)
        while heap:
            bid = heapq.heappop(heap)
            if bid.bytes <= left:
                left -= bid.bytes
                ranks[bid.name] = bid.rank
                for more in self._next(bid.name, bid.rank + 1, priors, sensitivity):
                    heapq.heappush(heap, more)
        return list(ranks.values())

    def parts(self, ranks: Sequence[int]) -> list[Part]:
        """Return what travels, in the model's order; raises `ProtocolError` for ranks that no honest caller offers."""
        if self.codec.rank is None:
            if ranks:
                raise ProtocolError("malformed", f"the offer has ranks beside codec {self.codec.spec}, which has none")
            return parts(self._shapes, self.codec)
        if len(ranks) != len(self._shapes):
            raise ProtocolError("malformed", f"the offer has {len(ranks)} ranks for {len(self._shapes)} tensors")
        cut = [self._cut(name, rank) for name, rank in zip(self._shapes, ranks, strict=True) if rank]
        size = sum(map(_bytes, cut))
        if not cut or size > self._budget_bytes:
            detail = f"the offer's ranks come to {size} bytes, above 0 and up to {self._budget_bytes} are allowed"
            raise ProtocolError("malformed", detail)
        return cut

    def _next(
        self, name: str, rank: int, priors: Mapping[str, Prior], sensitivity: Mapping[str, float]
    ) -> Iterator[_Bid]:
        """Yield one more direction of a tensor, if there is one to have."""
        prior, before = priors[name], self._cut(name, rank - 1) if rank > 1 else None
        if before is not None and not before.rank:
            return  # it travels whole already
        known = None if prior.energy is None else len(prior.energy)
        most = (self.codec.rank or 1) if known is None else known + max(1, known // CURIOSITY)
        cost = _bytes(self._cut(name, rank)) - (_bytes(before) if before else 0)
        if rank <= most and cost > 0:
            worth = math.inf if rank == 1 and prior.idle >= FORGOTTEN else prior.expected(rank)
            yield _Bid(-worth * sensitivity.get(name, 1.0) / cost, rank, name, cost)

    def _cut(self, name: str, rank: int) -> Part:
        rank = min(rank, self._most[name])  # so that what is kept has a bound
        if (name, rank) not in self._cuts:
            self._cuts[name, rank] = part(name, self._shapes[name], self.codec, rank)
        return self._cuts[name, rank]


def _bytes(part: Part) -> int:
    return sum(part.leg_bytes)
