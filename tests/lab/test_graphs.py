"""Who may meet whom."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import variance

import pytest

from peer.lab.graphs import GRAPHS, Graph, neighbours, pairs

NEVER = [0, 0, 0, 0, 0]
"""When a peer met each of five last."""


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("peers", [1, 2, 3, 7, 8])
def test_a_neighbour_has_its_neighbour_back_and_nobody_is_its_own(graph: Graph, peers: int) -> None:
    near = [neighbours(graph, peer, peers) for peer in range(peers)]
    for peer in range(peers):
        assert peer not in near[peer]
        assert all(peer in near[other] for other in near[peer])
        assert peers == 1 or near[peer]


def test_the_ring_and_the_exponential_graph_are_what_they_are_called() -> None:
    assert neighbours("ring", 0, 8) == [1, 7]
    assert neighbours("exponential", 0, 16) == [1, 2, 4, 8, 12, 14, 15]
    assert neighbours("one-peer", 2, 4) == [0, 1, 3]


def test_a_caller_meets_one_or_two_and_on_the_complete_graph_all_meet_all() -> None:
    draw, free = random.Random(0), {1, 2, 4}
    assert {len(pairs("one-peer", 0, NEVER, free, draw)) for _ in range(20)} == {1}
    two = [pairs("two-peer", 0, NEVER, free, draw) for _ in range(50)]
    assert {frozenset(pair) for some in two for pair in some} == {frozenset({0, other}) for other in free}
    assert all(len({other for _, other in some}) == 2 for some in two)
    assert set(pairs("complete", 0, NEVER, free, draw)) == set(combinations((0, 1, 2, 4), 2))
    assert pairs("ring", 0, NEVER, {2, 3}, draw) == []


def test_partners_are_drawn_evenly() -> None:
    draw = random.Random(1)
    drawn = [pairs("one-peer", 0, NEVER, {1, 2, 3, 4}, draw)[0][1] for _ in range(4000)]
    for other in (1, 2, 3, 4):
        assert abs(drawn.count(other) - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5


def test_who_was_not_met_for_longest_comes_first() -> None:
    draw, met = random.Random(2), [0, 7, 3, 9, 3]
    assert pairs("one-peer", 0, met, {1, 3}, draw) == [(0, 1)]
    assert {pairs("one-peer", 0, met, {1, 2, 3, 4}, draw)[0] for _ in range(50)} == {(0, 2), (0, 4)}
    assert set(pairs("two-peer", 0, met, {1, 2, 3, 4}, draw)) == {(0, 2), (0, 4)}


def test_eight_peers_agree_sooner_so_than_by_chance() -> None:
    """Every peer averages with three others a round, and every round brings as much disagreement as the last one."""

    def left(remembered: bool) -> float:
        draw, points = random.Random(3), [[0.0] * 50 for _ in range(8)]
        met, meetings, total = [[0] * 8 for _ in range(8)], 0, 0.0
        for _ in range(60):
            points = [[x + draw.gauss(0, 1) for x in point] for point in points]
            for _ in range(3):
                free = set(range(8))
                for caller in draw.sample(range(8), 8):
                    if caller in free:
                        ((_, other),) = pairs("one-peer", caller, met[caller], free - {caller}, draw)
                        free -= {caller, other}
                        meetings += remembered
                        met[caller][other] = met[other][caller] = meetings
                        points[caller] = points[other] = [
                            (x + y) / 2 for x, y in zip(points[caller], points[other], strict=True)
                        ]
            total += sum(variance(each) for each in zip(*points, strict=True))
        return total

    assert left(True) < 0.7 * left(False)
