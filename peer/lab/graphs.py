"""Who may meet whom, and with how many at once."""

from __future__ import annotations

import random
from collections.abc import Collection
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


def partners(graph: Graph, peer: int, peers: int, free: Collection[int], draw: random.Random) -> list[int]:
    """Draw whom a peer meets now, among those that are free: one, two at once, or on the complete graph all."""
    near = [other for other in neighbours(graph, peer, peers) if other in free]
    count = {"two-peer": 2, "complete": len(near)}.get(graph, 1)
    return draw.sample(near, min(count, len(near)))
