"""Who may meet whom, and with how many at once."""

from __future__ import annotations

import random
from collections.abc import Collection
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


def pairs(graph: Graph, caller: int, peers: int, free: Collection[int], draw: random.Random) -> list[tuple[int, int]]:
    """Draw the meetings that a peer begins now with those that are free: one, or two at once.

    On the complete graph all who are free meet one another at once.
    """
    near = [other for other in neighbours(graph, caller, peers) if other in free]
    if graph == "complete":
        return list(combinations([caller, *near], 2))
    return [(caller, other) for other in draw.sample(near, min(2 if graph == "two-peer" else 1, len(near)))]
