"""The outer step against torch's Nesterov SGD, against the printed equations, and against plain training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peer.core.gossip import Form, Outer, exchanged, laplacian, mix, outer_step, pair_weight, slots, start
from peer.core.state import State, Tensors

SHAPES = {"matrix": (4, 3), "vector": (3,)}
FORMS = list(Form)
Pairs = list[tuple[int, int]]


def gaussian(generator: torch.Generator, scale: float = 1.0) -> Tensors:
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def state_of(form: Form, weights: Tensors) -> State:
    return State(weights=weights, anchor=copied(weights), outer=start(form, weights))


def swarm(form: Form, n: int, generator: torch.Generator) -> list[State]:
    return [state_of(form, gaussian(generator)) for _ in range(n)]


def train(states: Iterable[State], generator: torch.Generator) -> None:
    """Stand in for inner steps: an arbitrary drift each."""
    for state in states:
        for name, drift in gaussian(generator).items():
            state.weights[name] += drift


def correct(state: State, correction: Tensors, weight: float) -> None:
    for name, tensor in correction.items():
        state.weights[name] += weight * tensor
        state.anchor[name] += weight * tensor


def meet(outer: Outer, a: State, b: State) -> None:
    difference = {name: exchanged(outer, a, name) - exchanged(outer, b, name) for name in SHAPES}
    correct(a, difference, -pair_weight(outer.alpha))
    correct(b, difference, pair_weight(outer.alpha))


def matching(n: int, generator: torch.Generator) -> Pairs:
    """Draw a matching of any size; peers left over are idle."""
    order = torch.randperm(n, generator=generator).tolist()
    size = int(torch.randint(n // 2 + 1, (1,), generator=generator))
    return [(order[2 * k], order[2 * k + 1]) for k in range(size)]


def mean(many: Iterable[Tensors]) -> Tensors:
    listed = list(many)
    return {name: torch.stack([one[name] for one in listed]).mean(0) for name in SHAPES}


def mean_drift(states: list[State]) -> Tensors:
    return mean({name: state.weights[name] - state.anchor[name] for name in SHAPES} for state in states)


def assert_close(actual: Tensors, expected: Tensors) -> None:
    for name in SHAPES:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12)


class DiLoCo:
    """torch's own SGD on a mean drift: the oracle."""

    def __init__(self, outer: Outer, begin: Tensors) -> None:
        self.weights = copied(begin)
        self.optimizer = torch.optim.SGD(
            self.weights.values(), lr=outer.eta, momentum=outer.gamma, nesterov=outer.gamma > 0
        )

    def step(self, drift: Tensors) -> None:
        for name, weight in self.weights.items():
            weight.grad = -drift[name]
        self.optimizer.step()


@given(
    form=st.sampled_from(FORMS),
    n=st.integers(1, 7),
    eta=st.floats(0.1, 1.5),
    gamma=st.sampled_from([0.0, 0.3, 0.7, 0.9]),
    alpha=st.floats(0.1, 1.0),
    meetings=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_the_mean_of_a_swarm_follows_nesterov_sgd_on_any_matchings(
    form: Form, n: int, eta: float, gamma: float, alpha: float, meetings: int, seed: int
) -> None:
    outer, generator = Outer(form, eta, gamma, alpha), torch.Generator().manual_seed(seed)
    states = swarm(form, n, generator)
    oracle = DiLoCo(outer, mean(state.weights for state in states))
    for _ in range(4):
        train(states, generator)
        oracle.step(mean_drift(states))
        for state in states:
            outer_step(outer, state)
        for _ in range(meetings):
            for i, j in matching(n, generator):
                meet(outer, states[i], states[j])
        assert_close(mean(state.weights for state in states), oracle.weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("eta", "gamma", "alpha"), [(1.0, 0.7, 1.0), (0.7, 0.9, 0.5), (1.3, 0.5, 0.3)])
def test_every_peer_follows_its_form_as_it_is_printed(form: Form, eta: float, gamma: float, alpha: float) -> None:
    n, outer, generator = 5, Outer(form, eta, gamma, alpha), torch.Generator().manual_seed(1)
    states = swarm(form, n, generator)
    theta = torch.stack([state.weights["matrix"].flatten() for state in states])
    previous, momentum = theta, torch.zeros_like(theta)
    for _ in range(5):
        train(states, generator)
        g = torch.stack([(state.weights["matrix"] - state.anchor["matrix"]).flatten() for state in states])
        for state in states:
            outer_step(outer, state)
        pairs = matching(n, generator)
        for i, j in pairs:
            meet(outer, states[i], states[j])

        graph, y = laplacian(pairs, n), theta + eta * g
        momentum = gamma * momentum + g
        push = gamma * (y - previous)
        theta = {
            Form.OWN: mix(theta + eta * (g + gamma * momentum), graph, alpha),
            Form.MIXED: mix(y + push, graph, alpha),
            Form.PLAIN: mix(y, graph, alpha) + push,
        }[form]
        previous = y
        actual = torch.stack([state.weights["matrix"].flatten() for state in states])
        torch.testing.assert_close(actual, theta, rtol=1e-12, atol=1e-12)


def on_complete_graph(outer: Outer) -> tuple[list[State], DiLoCo]:
    """Run a few rounds in which everybody meets everybody at α = 1."""
    n, generator = 4, torch.Generator().manual_seed(2)
    states = swarm(outer.form, n, generator)
    oracle = DiLoCo(outer, mean(state.weights for state in states))
    graph = laplacian(combinations(range(n), 2), n)
    for _ in range(5):
        train(states, generator)
        oracle.step(mean_drift(states))
        for state in states:
            outer_step(outer, state)
        for name, shape in SHAPES.items():
            points = torch.stack([exchanged(outer, state, name).flatten() for state in states])
            for state, change in zip(states, mix(points, graph, 1.0) - points, strict=True):
                state.weights[name] += change.view(shape)
                state.anchor[name] += change.view(shape)
    return states, oracle


@pytest.mark.parametrize(
    ("form", "gamma"), [(Form.OWN, 0.0), (Form.OWN, 0.9), (Form.MIXED, 0.0), (Form.MIXED, 0.9), (Form.PLAIN, 0.0)]
)
def test_on_the_complete_graph_every_peer_is_diloco(form: Form, gamma: float) -> None:
    states, oracle = on_complete_graph(Outer(form, 0.7, gamma, 1.0))
    for state in states:
        assert_close(state.weights, oracle.weights)


def test_on_the_complete_graph_plain_is_diloco_only_on_average_once_it_has_momentum() -> None:
    states, oracle = on_complete_graph(Outer(Form.PLAIN, 0.7, 0.9, 1.0))
    assert_close(mean(state.weights for state in states), oracle.weights)
    assert all((state.weights["matrix"] - oracle.weights["matrix"]).norm() > 0.1 for state in states)


@pytest.mark.parametrize("form", FORMS)
def test_without_momentum_and_with_one_inner_step_it_is_decentralized_sgd(form: Form) -> None:
    n, rate, generator = 6, 0.1, torch.Generator().manual_seed(3)
    outer = Outer(form, 1.0, 0.0, 1.0)
    states = swarm(form, n, generator)
    targets = [gaussian(generator) for _ in range(n)]
    expected = torch.stack([state.weights["matrix"] for state in states])
    for _ in range(10):
        pairs = matching(n, generator)
        for state, target in zip(states, targets, strict=True):
            state.weights["matrix"] -= rate * (state.weights["matrix"] - target["matrix"])
            outer_step(outer, state)
        for i, j in pairs:
            meet(outer, states[i], states[j])
        expected = expected - rate * (expected - torch.stack([target["matrix"] for target in targets]))
        for i, j in pairs:
            expected[[i, j]] = (expected[i] + expected[j]) / 2
        actual = torch.stack([state.weights["matrix"] for state in states])
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


@pytest.mark.parametrize("form", FORMS)
def test_one_peer_with_eta_1_and_gamma_0_is_plain_training_bit_for_bit(form: Form) -> None:
    plain, ours = network(4), network(4)
    state = state_of(form, dict(ours.named_parameters()))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in (plain, ours)]
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 16):
        x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step % 3 == 0:
            assert outer_step(Outer(form, 1.0, 0.0, 1.0), state) > 0
        for expected, actual in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))
    assert state.round == 5


@pytest.mark.parametrize("form", FORMS)
def test_with_eta_1_and_gamma_0_even_a_negative_zero_stays_as_it_is(form: Form) -> None:
    weights = {"x": torch.tensor([-0.0, 1.0]), "scalar": torch.tensor(-0.0)}
    outer_step(Outer(form, 1.0, 0.0, 1.0), state_of(form, weights))
    assert torch.signbit(weights["x"]).tolist() == [True, False]
    assert torch.signbit(weights["scalar"])


@pytest.mark.parametrize("form", FORMS)
def test_an_outer_step_writes_into_the_live_parameters_and_returns_the_drift(form: Form) -> None:
    model = network(9)
    state = state_of(form, dict(model.named_parameters()))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    drift = torch.cat([(state.weights[name] - state.anchor[name]).flatten() for name in state.weights])
    expected = float(drift.detach().double().norm())
    assert outer_step(Outer(form, 0.7, 0.9, 1.0), state) == pytest.approx(expected, rel=1e-6)
    assert state.round == 1
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        assert torch.equal(state.anchor[name], parameter)
        assert state.anchor[name].data_ptr() != parameter.data_ptr()


@pytest.mark.parametrize(
    ("form", "names"), [(Form.OWN, ("momentum",)), (Form.MIXED, ("previous",)), (Form.PLAIN, ("previous", "push"))]
)
def test_outer_memory_starts_as_if_the_peer_had_always_stood_still(form: Form, names: tuple[str, ...]) -> None:
    weights = gaussian(torch.Generator().manual_seed(10))
    memory = start(form, weights)
    assert tuple(memory) == slots(form) == names
    for slot, tensors in memory.items():
        assert list(tensors) == list(weights)
        for name, tensor in tensors.items():
            expected = weights[name] if slot == "previous" else torch.zeros_like(weights[name])
            assert torch.equal(tensor, expected)
            assert tensor.data_ptr() != weights[name].data_ptr()


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts large new tensors, and how many of them are alive at once."""

    def __init__(self, numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel, self.total, self.most = numel, 0, 0
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {given.data_ptr() for given in (*args, *(kwargs or {}).values()) if isinstance(given, Tensor)}
        if isinstance(result, Tensor) and result.numel() >= self.numel and result.data_ptr() not in known:
            self.total += 1
            self.alive = [*(ref for ref in self.alive if ref() is not None), weakref.ref(result)]
            self.most = max(self.most, len(self.alive))
        return result


@pytest.mark.parametrize("form", FORMS)
def test_an_outer_step_holds_one_temporary_tensor_at_a_time(form: Form) -> None:
    weights = {str(k): torch.randn(64) for k in range(4)}
    state = state_of(form, weights)
    gc.collect()
    with Allocations(64) as allocations:
        outer_step(Outer(form, 0.7, 0.9, 1.0), state)
    assert (allocations.total, allocations.most) == (4, 1)


@pytest.mark.parametrize(
    ("edges", "n", "expected"),
    [
        ([], 2, [[0, 0], [0, 0]]),
        ([(1, 0)], 2, [[0.5, -0.5], [-0.5, 0.5]]),
        ([(0, 2)], 3, [[0.5, 0, -0.5], [0, 0, 0], [-0.5, 0, 0.5]]),
        ([(0, 1), (0, 2), (1, 2)], 3, [[2 / 3, -1 / 3, -1 / 3], [-1 / 3, 2 / 3, -1 / 3], [-1 / 3, -1 / 3, 2 / 3]]),
        ([(0, 1), (1, 2)], 3, [[1 / 3, -1 / 3, 0], [-1 / 3, 2 / 3, -1 / 3], [0, -1 / 3, 1 / 3]]),
    ],
)
def test_the_laplacian_of_a_graph_is_as_expected(edges: Pairs, n: int, expected: list[list[float]]) -> None:
    torch.testing.assert_close(laplacian(edges, n), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("edges", [[(0, 0)], [(0, 3)], [(-1, 0)], [(0, 1), (1, 0)]])
def test_edges_that_are_no_graph_are_refused(edges: Pairs) -> None:
    with pytest.raises(ValueError, match="no set of edges between 3 peers"):
        laplacian(edges, 3)


def test_the_complete_graph_at_alpha_1_gives_the_mean() -> None:
    points = torch.randn(6, 9, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    mixed = mix(points, laplacian(combinations(range(6), 2), 6), 1.0)
    torch.testing.assert_close(mixed, points.mean(0).expand(6, 9))
