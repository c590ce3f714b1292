"""What of a model a meeting is about: as many directions of each tensor as are worth their bytes.

A meeting under a low-rank codec has a budget in bytes: that of R directions of every matrix if the codec says R, else
what the two links afford. How to spend it the caller decides anew for every meeting, one direction after another, each
time where a byte buys most. Averaging a direction in which two peers differ by an energy of σ² (a squared singular
value of the difference) is worth about h σ², where h is how much the loss minds (`peer.sensitivity`): differences are
larger in some tensors than in others, and matter more in some.

What σ² to expect a peer knows from its last exchanges, with whomever (`peer.core.prior`). A direction beyond those it
has seen is taken to be as strong as the weakest of them, and so a tensor gets one more, and then another, for as long
as what is found there is worth it; what nobody has looked at for some meetings is taken to grow.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from peer.core.codec import Codec, part, parts, slices
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
    """How meetings of one run and codec are made up. shapes: of the parameters, in the model's order."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], codec: Codec) -> None:
        self.codec = codec
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._most = {
            name: max(1, min(shape[0], prod(shape[1:]))) if shape else 1 for name, shape in self._shapes.items()
        }
        self._cuts: dict[tuple[str, int], Part] = {}
        self.whole_bytes = sum(_bytes(self._cut(name, self._most[name])) for name in self._shapes)
        least = max(_bytes(self._cut(name, 1)) for name in self._shapes)
        self.least_bytes = least if codec.low else self.whole_bytes

    def evenly_bytes(self, rank: int) -> int:
        """Return the budget of so many directions of every matrix: `VECTORS` of all vectors come on top."""
        total = sum(_bytes(self._cut(name, rank)) * _share(shape) for name, shape in self._shapes.items())
        return max(int(total), self.least_bytes)

    def rank_for(self, budget_bytes: int) -> int:
        """Return how many directions of every matrix a budget is good for, at least 1."""
        more = range(2, max(self._most.values()) + 1)
        return 1 + bisect_right(more, budget_bytes, key=self.evenly_bytes)

    def ranks(
        self, priors: Mapping[str, Prior], sensitivity: Mapping[str, float], budget_bytes: int | None = None
    ) -> list[int]:
        """Return how many directions of each tensor to send, 0: nothing; nothing at all to say where all go whole.

        sensitivity: h by name; 1 where there is none. budget_bytes: of all legs together; None: what the codec says.
        """
        if not self.codec.low:
            return []
        left = self._budget(budget_bytes)
        ranks, curious = dict.fromkeys(self._shapes, 0), self.rank_for(left)
        heap = [bid for name in self._shapes for bid in self._next(name, 1, curious, priors, sensitivity)]
        heapq.heapify(heap)
        while heap:
            bid = heapq.heappop(heap)
            if bid.bytes <= left:
                left -= bid.bytes
                ranks[bid.name] = bid.rank
                for more in self._next(bid.name, bid.rank + 1, curious, priors, sensitivity):
                    heapq.heappush(heap, more)
        return list(ranks.values())

    def parts(self, ranks: Sequence[int], budget_bytes: int | None = None) -> list[Part]:
        """Return what travels, in the order in which it does: the model's, but for a low-rank codec's largest part.

        Raises `ProtocolError` for ranks that no honest caller has.
        """
        if not self.codec.low:
            if ranks:
                raise ProtocolError("malformed", f"there are ranks beside codec {self.codec.spec}, which has none")
            return parts(self._shapes, self.codec)
        if len(ranks) != len(self._shapes):
            raise ProtocolError("malformed", f"there are {len(ranks)} ranks for {len(self._shapes)} tensors")
        cut = [self._cut(name, rank) for name, rank in zip(self._shapes, ranks, strict=True) if rank]
        size, most = sum(map(_bytes, cut)), self._budget(budget_bytes)
        if not cut or size > most:
            detail = f"the meeting's ranks come to {size} bytes, above 0 and up to {most} are allowed"
            raise ProtocolError("malformed", detail)
        return [piece for each in _in_turn(cut) for piece in slices(each, self.codec)]

    def _budget(self, budget_bytes: int | None) -> int:
        if budget_bytes is None:
            return self.evenly_bytes(self.codec.rank or 1)
        return max(budget_bytes, self.least_bytes)

    def _next(
        self, name: str, rank: int, curious: int, priors: Mapping[str, Prior], sensitivity: Mapping[str, float]
    ) -> Iterator[_Bid]:
        """Yield one more direction of a tensor, if there is one to have."""
        prior, before = priors[name], self._cut(name, rank - 1) if rank > 1 else None
        if before is not None and not before.rank:
            return  # it travels whole already
        known = None if prior.energy is None else len(prior.energy)
        most = curious if known is None else known + max(1, known // CURIOSITY)
        cost = _bytes(self._cut(name, rank)) - (_bytes(before) if before else 0)
        if rank <= most and cost > 0:
            worth = math.inf if rank == 1 and prior.idle >= FORGOTTEN else prior.expected(rank)
            yield _Bid(-worth * sensitivity.get(name, 1.0) / cost, rank, name, cost)

    def _cut(self, name: str, rank: int) -> Part:
        rank = min(rank, self._most[name])  # so that what is kept has a bound
        if (name, rank) not in self._cuts:
            self._cuts[name, rank] = part(name, self._shapes[name], self.codec, rank)
        return self._cuts[name, rank]


def _in_turn(parts: list[Part]) -> list[Part]:
    """Have the largest part wait until others of half its size are on their way.

    A product that takes long, such as the embedding's, would otherwise leave the partner with nothing to do at first,
    or, if it came last, at last.
    """
    largest = max(parts, key=_bytes)
    others, before = [each for each in parts if each is not largest], 0
    for index, each in enumerate(others):
        if 2 * before >= _bytes(largest):
            return [*others[:index], largest, *others[index:]]
        before += _bytes(each)
    return [*others, largest]


def _bytes(part: Part) -> int:
    return sum(part.leg_bytes)


def _share(shape: tuple[int, ...]) -> float:
    return 1 if len(shape) > 1 else VECTORS
