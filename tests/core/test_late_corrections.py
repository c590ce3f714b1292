"""Corrections at any time: late, lossy, computed from live weights that moved on. Where does the mean of a swarm go?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.core.gossip import Form, Outer, exchanged, outer_step, pair_weight, start
from peer.core.state import State

PRINTED = [Form.MIXED, Form.PLAIN]


def peer_at(form: Form, x: Tensor) -> State:
    weights = {"x": x.clone()}
    return State(weights=weights, anchor={"x": x.clone()}, outer=start(form, weights))


def randn(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def correct(state: State, correction: Tensor) -> None:
    state.weights["x"] += correction
    state.anchor["x"] += correction


def mean(states: list[State]) -> Tensor:
    return torch.stack([state.weights["x"] for state in states]).mean(0)


class Meeting:
    """A meeting whose two sides read their live weights at two steps and apply what comes of it at two later ones."""

    def __init__(self, peers: list[int], generator: torch.Generator, begin: int, rounds_apart: int, steps: int) -> None:
        draws: list[int] = torch.randint(1, 2 * steps, (4,), generator=generator).tolist()
        read_a, read_b, apply_a, apply_b = draws
        self.peers = peers
        self.read_at = (begin + read_a, begin + read_b)
        first = max(self.read_at) // steps + 1  # the round after the one in which both have been read
        self.apply_at = (first * steps + apply_a % steps, (first + rounds_apart) * steps + apply_b % steps)
        self.readings = [torch.empty(0), torch.empty(0)]

    def correction(self) -> Tensor:
        """Keep the first singular direction of the difference, coarsely rounded."""
        u, s, v = torch.linalg.svd(self.readings[0] - self.readings[1])
        first: Tensor = s[0] * torch.outer(u[:, 0], v[0])
        return (first * 8).round() / 8

    def advance(self, outer: Outer, states: list[State], now: int) -> None:
        for side, sign in ((0, -1.0), (1, 1.0)):
            state = states[self.peers[side]]
            if self.read_at[side] == now:
                self.readings[side] = exchanged(outer, state, "x").clone()
            if self.apply_at[side] == now:
                correct(state, sign * pair_weight(outer.alpha) * self.correction())

    def half_applied(self, now: int) -> bool:
        return (self.apply_at[0] <= now) != (self.apply_at[1] <= now)


@pytest.mark.parametrize(
    ("form", "rounds_apart"), [(Form.OWN, 0), (Form.OWN, 1), (Form.OWN, 3), (Form.MIXED, 0), (Form.PLAIN, 0)]
)
@pytest.mark.parametrize("seed", range(3))
def test_late_stale_and_lossy_corrections_leave_the_mean_on_dilocos_path(
    form: Form, rounds_apart: int, seed: int
) -> None:
    n, steps, rounds = 5, 6, 14
    outer, generator = Outer(form, 0.9, 0.7, 0.8), torch.Generator().manual_seed(seed)
    states = [peer_at(form, randn(generator)) for _ in range(n)]
    targets = [randn(generator) for _ in range(n)]
    diloco = mean(states)
    oracle = torch.optim.SGD([diloco], lr=outer.eta, momentum=outer.gamma, nesterov=True)
    meetings = [
        Meeting(torch.randperm(n, generator=generator)[:2].tolist(), generator, begin, rounds_apart, steps)
        for begin in range(0, 5 * steps, 2)
    ]
    counted = {False: 0, True: 0}
    for now in range(rounds * steps):
        for state, target in zip(states, targets, strict=True):
            state.weights["x"] += 0.1 * (target - state.weights["x"]) + 0.1 * randn(generator)
        for meeting in meetings:
            meeting.advance(outer, states, now)
        if (now + 1) % steps == 0:
            diloco.grad = -torch.stack([state.weights["x"] - state.anchor["x"] for state in states]).mean(0)
            oracle.step()
            for state in states:
                outer_step(outer, state)
            half = any(meeting.half_applied(now) for meeting in meetings)
            counted[half] += 1
            if not half:
                torch.testing.assert_close(mean(states), diloco, rtol=1e-12, atol=1e-12)
    assert counted[False] >= 4
    assert bool(counted[True]) == bool(rounds_apart)


def displacement(form: Form, at_round: int, rounds: int) -> Tensor:
    """Follow, round by round, a correction of 1 that a peer applies at one time, with no drift and γ = 0.7."""
    outer, state = Outer(form, 1.0, 0.7, 1.0), peer_at(form, torch.zeros(1, dtype=torch.float64))
    path = []
    for now in range(rounds):
        if now == at_round:
            correct(state, torch.ones(1, dtype=torch.float64))
        outer_step(outer, state)
        path.append(state.weights["x"].clone())
    return torch.cat(path)


def test_own_momentum_never_sees_a_correction() -> None:
    assert displacement(Form.OWN, 2, 6).tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("form", PRINTED)
def test_in_the_printed_forms_a_correction_becomes_momentum(form: Form) -> None:
    expected = (1 - 0.7 ** torch.arange(2, 62, dtype=torch.float64)) / (1 - 0.7)
    torch.testing.assert_close(displacement(form, 0, 60), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", PRINTED)
def test_in_the_printed_forms_sides_rounds_apart_move_the_mean_by_an_amount_that_shrinks_with_gamma(
    form: Form,
) -> None:
    error = displacement(form, 1, 12) - displacement(form, 3, 12)
    assert error[3] > 0.1
    torch.testing.assert_close(error[4:], 0.7 * error[3:-1], rtol=1e-10, atol=1e-12)


def test_own_momentum_is_mixed_with_the_previous_point_moved_along_with_every_correction() -> None:
    generator = torch.Generator().manual_seed(8)
    own, mixed = Outer(Form.OWN, 0.8, 0.7, 1.0), Outer(Form.MIXED, 0.8, 0.7, 1.0)
    begin = [randn(generator) for _ in range(4)]
    ours, theirs = ([peer_at(outer.form, x) for x in begin] for outer in (own, mixed))
    for _ in range(6):
        for one, other in zip(ours, theirs, strict=True):
            drift = randn(generator)
            for outer, state in ((own, one), (mixed, other)):
                state.weights["x"] += drift
                outer_step(outer, state)
        i, j = torch.randperm(4, generator=generator)[:2].tolist()
        correction = 0.5 * (exchanged(own, ours[j], "x") - exchanged(own, ours[i], "x"))
        for k, sign in ((i, 1.0), (j, -1.0)):
            correct(ours[k], sign * correction)
            correct(theirs[k], sign * correction)
            theirs[k].outer["previous"]["x"] += sign * correction
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.weights["x"], other.weights["x"], rtol=1e-12, atol=1e-12)


class Visit:
    """A meeting among several at once: each side weighs it by how many it holds, and the smaller w holds for both.

    Each side reads its live weights some time after it began, and applies what came of it some time after both have.
    """

    def __init__(self, peers: tuple[int, int], weight: float, began: int, longest: int, draw: torch.Generator) -> None:
        delays: list[int] = torch.randint(0, longest + 1, (4,), generator=draw).tolist()
        self.peers, self.weight = peers, weight
        self.read_at = (began + delays[0], began + delays[1])
        both_read = max(self.read_at)
        self.apply_at = (both_read + delays[2], both_read + delays[3])
        self.over_at = max(self.apply_at)
        self._readings = [torch.empty(0), torch.empty(0)]

    def advance(self, outer: Outer, states: list[State], now: int) -> None:
        for side, peer in enumerate(self.peers):
            if self.read_at[side] == now:
                self._readings[side] = exchanged(outer, states[peer], "x").clone()
        for side, peer in enumerate(self.peers):
            if self.apply_at[side] == now:
                sign = 1 if side else -1
                correct(states[peer], sign * self.weight * (self._readings[0] - self._readings[1]))


class Crowd:
    """Peers that hold up to so many meetings at once, each with another partner; a step is the unit of time."""

    def __init__(self, states: list[State], outer: Outer, seats: int, longest: int, seed: int) -> None:
        self.states, self.outer, self.seats, self.longest = states, outer, seats, longest
        self.draw = torch.Generator().manual_seed(seed)
        self.visits: list[Visit] = []
        self.met = 0
        self.at_once = [0] * (seats + 1)

    def engaged(self, peer: int) -> list[Visit]:
        return [visit for visit in self.visits if peer in visit.peers]

    def step(self, now: int, begin: bool = True) -> None:
        one, other = torch.randperm(len(self.states), generator=self.draw)[:2].tolist()
        held = [self.engaged(peer) for peer in (one, other)]
        together = any(other in visit.peers for visit in held[0])
        if begin and not together and max(map(len, held)) < self.seats:
            weight = min(pair_weight(self.outer.alpha, len(visits) + 1) for visits in held)
            self.visits.append(Visit((one, other), weight, now, self.longest, self.draw))
            self.met += 1
        for visit in self.visits:
            visit.advance(self.outer, self.states, now)
        self.visits = [visit for visit in self.visits if visit.over_at > now]
        self.at_once[max(len(self.engaged(peer)) for peer in range(len(self.states)))] += 1

    def apart(self) -> float:
        points = torch.stack([state.weights["x"] for state in self.states])
        return float((points - points.mean(0)).norm())


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_several_meetings_at_once_leave_the_mean_on_dilocos_path(seats: int, seed: int) -> None:
    n, steps, rounds, quiet = 6, 8, 12, 4
    outer, draw = Outer(Form.OWN, 0.8, 0.65, 1.0), torch.Generator().manual_seed(100 + seed)
    states = [peer_at(outer.form, randn(draw)) for _ in range(n)]
    crowd, diloco = Crowd(states, outer, seats, 2 * steps, seed), mean(states)
    oracle = torch.optim.SGD([diloco], lr=outer.eta, momentum=outer.gamma, nesterov=True)
    for round in range(rounds + quiet):
        for step in range(steps):
            for state in states:
                state.weights["x"] += 0.1 * randn(draw)
            crowd.step(round * steps + step, begin=round < rounds)
        diloco.grad = -torch.stack([state.weights["x"] - state.anchor["x"] for state in states]).mean(0)
        oracle.step()
        for state in states:
            outer_step(outer, state)
        if not crowd.visits:
            torch.testing.assert_close(mean(states), diloco, rtol=1e-12, atol=1e-12)
    assert not crowd.visits
    assert crowd.at_once[seats] > 10
    assert crowd.met > rounds // 2


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("longest", [0, 1, 20])
@pytest.mark.parametrize("seed", range(3))
def test_peers_with_three_meetings_at_once_come_together_however_late_their_corrections_are(
    n: int, longest: int, seed: int
) -> None:
    """Without training, stale readings alone: they may come apart for a while, but not for long, nor by much."""
    outer, draw = Outer(Form.OWN, 1.0, 0.0, 1.0), torch.Generator().manual_seed(seed)
    states = [peer_at(outer.form, randn(draw)) for _ in range(n)]
    crowd = Crowd(states, outer, 3, longest, seed)
    begin, centre = crowd.apart(), mean(states)
    farthest = 0.0
    for now in range(80 * n * (1 + longest // 4)):
        crowd.step(now)
        farthest = max(farthest, crowd.apart())
    assert farthest < 2 * begin
    assert crowd.apart() < 1e-3 * begin
    now += 1
    while crowd.visits:
        crowd.step(now, begin=False)
        now += 1
    torch.testing.assert_close(mean(states), centre, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_training_peers_with_three_meetings_at_once_stay_as_close_as_they_are(seed: int) -> None:
    """Over hundreds of rounds, with momentum; without meetings they would drift apart for ever."""
    n, steps, rounds = 8, 4, 400
    outer, draw = Outer(Form.OWN, 0.7, 0.65, 1.0), torch.Generator().manual_seed(seed)
    states = [peer_at(outer.form, torch.zeros(4, 3, dtype=torch.float64)) for _ in range(n)]
    crowd, apart = Crowd(states, outer, 3, steps, seed), []
    for now in range(rounds * steps):
        for state in states:
            state.weights["x"] += randn(draw)
        crowd.step(now)
        if (now + 1) % steps == 0:
            for state in states:
                outer_step(outer, state)
        apart.append(crowd.apart())
    settled = len(apart) // 4
    early, late = apart[settled : 2 * settled], apart[-settled:]
    assert sum(late) < 1.3 * sum(early)
    assert max(late) < 1.5 * max(early)
