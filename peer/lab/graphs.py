"""Who may meet whom, and with how many at once."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Literal, get_args

Graph = Literal["one-peer", "two-peer", "ring", "exponential", "complete"]
GRAPHS: tuple[Graph, ...] = get_args(Graph)


def neighbours(graph: Graph, peer: int, peers: int) -> list[int]:
    """Return whom a peer may ever meet: all others, its two neighbours on the ring, or those 2^k places away."""
    if graph == "ring":
        steps = {1, peers - 1}
    elif graph == "exponential":
        steps = {sign * 2**k % peers for k in range(peers.bit_length()) if 2**k < peers for sign in (1, -1)}
    else:
        return [other for other in range(peers) if other != peer]
    return sorted({(peer + step) % peers for step in steps} - {peer})


def pairs(
    graph: Graph, caller: int, met: Sequence[int], free: Collection[int], draw: random.Random
) -> list[tuple[int, int]]:
    """Draw the meetings that a peer begins now with those that are free: one, or two at once.

    met: for every peer when the caller met it last, in any growing numbers. As the daemon does, it meets those whom it
    did not meet for longest, at random among equals. On the complete graph all who are free meet one another at once.
    """
    near = [other for other in neighbours(graph, caller, len(met)) if other in free]
    if graph == "complete":
        return list(combinations([caller, *near], 2))
    due = sorted(draw.sample(near, len(near)), key=met.__getitem__)
    return [(caller, other) for other in due[: 2 if graph == "two-peer" else 1]]
