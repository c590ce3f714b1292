"""Growth of disagreement: against exact enumeration of matchings, against closed forms, and against swarms that run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from peer.core.gossip import Form, Outer, exchanged, laplacian, outer_step, pair_weight, start
from peer.core.stability import SIZES, check, growth, mixing, radius
from peer.core.state import State

FORMS = list(Form)
PRINTED = [Form.MIXED, Form.PLAIN]
Pairs = list[tuple[int, int]]
Matrix = NDArray[np.float64]


def perfect_matchings(peers: list[int]) -> Iterator[Pairs]:
    if not peers:
        yield []
        return
    first, rest = peers[0], peers[1:]
    for k, other in enumerate(rest):
        for pairs in perfect_matchings(rest[:k] + rest[k + 1 :]):
            yield [(first, other), *pairs]


def disagreements(n: int) -> Matrix:
    """Return an orthonormal basis, n × (n − 1), of what differs between peers."""
    basis: Matrix = np.linalg.svd(np.eye(n) - 1 / n)[0][:, : n - 1]
    return basis


def second_moments(outer: Outer, matchings: list[Pairs], n: int) -> Matrix:
    """Average K ⊗ K over all matchings, where K takes (y, y_prev) of all peers, without their mean, one round on."""
    gamma, basis = outer.gamma, disagreements(n)
    eye, zero = np.eye(n - 1), np.zeros((n - 1, n - 1))
    total = np.zeros((4 * (n - 1) ** 2, 4 * (n - 1) ** 2))
    for pairs in matchings:
        mixer = basis.T @ (np.eye(n) - outer.alpha * laplacian(pairs, n).numpy()) @ basis
        if outer.form is Form.OWN:
            one_round = np.block([[mixer, zero], [zero, zero]])
        elif outer.form is Form.MIXED:
            one_round = np.block([[(1 + gamma) * mixer, -gamma * mixer], [eye, zero]])
        else:
            one_round = np.block([[mixer + gamma * eye, -gamma * eye], [eye, zero]])
        total += np.kron(one_round, one_round)
    return total / len(matchings)


def second_moment_radius(outer: Outer, matchings: list[Pairs], n: int) -> float:
    return float(np.abs(np.linalg.eigvals(second_moments(outer, matchings, n))).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.0), (1.0, 0.9), (0.5, 0.7), (0.66, 0.95), (0.3, 0.5)])
def test_the_radius_is_that_of_the_second_moments_over_all_matchings(
    form: Form, n: int, alpha: float, gamma: float
) -> None:
    outer = Outer(form, 1.0, gamma, alpha)
    expected = second_moment_radius(outer, list(perfect_matchings(list(range(n)))), n)
    assert radius(outer, n) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_swarm_with_one_peer_idle_is_like_a_large_one(form: Form) -> None:
    outer = Outer(form, 1.0, 0.7, 0.5)
    matchings = [[(a, b)] for a, b in ((0, 1), (0, 2), (1, 2))]
    assert radius(outer, math.inf) == pytest.approx(second_moment_radius(outer, matchings, 3), rel=1e-6)
    assert mixing(10**9) == pytest.approx(mixing(math.inf))


def swarm_after(outer: Outer, begin: Tensor, rounds: list[Pairs]) -> Tensor:
    """Run peers without any drift; return what is left of their disagreement. begin: n × d."""
    states = []
    for x in begin:
        weights = {"x": x.clone()}
        states.append(State(weights=weights, anchor={"x": x.clone()}, outer=start(outer.form, weights)))
    for pairs in rounds:
        for state in states:
            outer_step(outer, state)
        for i, j in pairs:
            correction = pair_weight(outer.alpha) * (
                exchanged(outer, states[i], "x") - exchanged(outer, states[j], "x")
            )
            for state, sign in ((states[i], -1.0), (states[j], 1.0)):
                state.weights["x"] += sign * correction
                state.anchor["x"] += sign * correction
    points = torch.stack([state.weights["x"] for state in states])
    return points - points.mean(0)


def random_rounds(n: int, rounds: int, generator: torch.Generator) -> list[Pairs]:
    drawn = []
    for _ in range(rounds):
        order = torch.randperm(n, generator=generator).tolist()
        drawn.append(list(zip(order[::2], order[1::2], strict=True)))
    return drawn


@pytest.mark.parametrize("form", FORMS)
def test_swarms_that_run_disagree_by_their_second_moments_on_average_over_all_matchings(form: Form) -> None:
    n, rounds, outer = 4, 5, Outer(form, 1.0, 0.9, 0.8)
    matchings = list(perfect_matchings(list(range(n))))
    begin = torch.randn(n, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    squares = [
        float(swarm_after(outer, begin, list(path)).square().sum()) for path in product(matchings, repeat=rounds)
    ]
    both = np.concatenate([disagreements(n).T @ begin.numpy().ravel()] * 2)  # y and y_prev begin alike
    moments = np.linalg.matrix_power(second_moments(outer, matchings, n), rounds) @ np.kron(both, both)
    expected = np.trace(moments.reshape(len(both), len(both))[: n - 1, : n - 1])
    assert np.mean(squares) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("peers", [8, 32, math.inf])
def test_pair_averaging_with_strong_momentum_diverges_in_the_printed_forms_only(peers: float) -> None:
    assert radius(Outer(Form.OWN, 1.0, 0.9, 1.0), peers) < 0.58
    assert radius(Outer(Form.MIXED, 1.0, 0.9, 1.0), peers) > 1.01
    assert radius(Outer(Form.PLAIN, 1.0, 0.9, 1.0), peers) > 1.01


def test_disagreement_under_own_momentum_contracts_as_if_gamma_were_0() -> None:
    generator = torch.Generator().manual_seed(2)
    begin = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    rounds = random_rounds(6, 8, generator)
    expected = swarm_after(Outer(Form.OWN, 1.0, 0.0, 0.8), begin, rounds)
    actual = swarm_after(Outer(Form.OWN, 1.0, 0.9, 0.8), begin, rounds)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for form in PRINTED:
        other = swarm_after(Outer(form, 1.0, 0.9, 0.8), begin, rounds)
        assert (other - expected).norm() > expected.norm()


@pytest.mark.parametrize(
    ("gamma", "alpha", "contraction"),
    [(0.0, 1.0, 0.484), (0.3, 0.69, 0.49), (0.5, 0.47, 0.54), (0.7, 0.39, 0.67), (0.9, 0.40, 0.84)],
)
def test_the_best_contraction_of_the_mixed_form_at_32_peers(gamma: float, alpha: float, contraction: float) -> None:
    found = {step: radius(Outer(Form.MIXED, 1.0, gamma, step / 100), 32) for step in range(1, 101)}
    best = min(found, key=lambda step: found[step])
    assert best / 100 == pytest.approx(alpha)
    assert found[best] == pytest.approx(contraction, abs=0.006 if contraction != 0.484 else 0.0005)


@settings(deadline=None)
@given(gamma=st.floats(0, 0.99))
def test_plain_in_a_large_swarm_holds_up_to_alpha_2_times_1_minus_gamma_squared(gamma: float) -> None:
    limit = 2 * (1 - gamma**2)
    assert radius(Outer(Form.PLAIN, 1.0, gamma, 0.999 * limit), math.inf) < 1
    assert radius(Outer(Form.PLAIN, 1.0, gamma, 1.001 * limit), math.inf) > 1


@settings(deadline=None)
@given(form=st.sampled_from(PRINTED), gamma=st.floats(0, 0.99))
def test_rare_meetings_lower_the_limit_of_the_printed_forms_to_alpha_2_times_1_minus_gamma(
    form: Form, gamma: float
) -> None:
    limit = 2 * (1 - gamma)
    assert growth(Outer(form, 1.0, gamma, 0.99 * limit), 1e-4 * (1 - gamma)) < 1
    assert growth(Outer(form, 1.0, gamma, 1.01 * limit), 1e-4 * (1 - gamma)) > 1


@settings(deadline=None)
@given(gamma=st.floats(0, 0.999), alpha=st.floats(0.01, 0.66), peers=st.sampled_from(SIZES))
def test_mixed_up_to_alpha_066_holds_for_every_gamma(gamma: float, alpha: float, peers: float) -> None:
    assert radius(Outer(Form.MIXED, 1.0, gamma, alpha), peers) < 1


@settings(deadline=None)
@given(gamma=st.floats(0, 0.999), alpha=st.floats(0.01, 1.0), eta=st.floats(0.01, 10))
def test_own_momentum_is_always_allowed(gamma: float, alpha: float, eta: float) -> None:
    assert check(Outer(Form.OWN, eta, gamma, alpha))


@pytest.mark.parametrize(
    ("outer", "reason", "quoted"),
    [
        (Outer(eta=0.0), "eta", "eta is 0"),
        (Outer(eta=-1.0), "eta", "eta is -1"),
        (Outer(eta=math.nan), "eta", "eta is nan"),
        (Outer(eta=math.inf), "eta", "eta is inf"),
        (Outer(gamma=1.0), "gamma", "gamma is 1"),
        (Outer(gamma=-0.1), "gamma", "gamma is -0.1"),
        (Outer(gamma=math.nan), "gamma", "gamma is nan"),
        (Outer(alpha=0.0), "alpha", "alpha is 0"),
        (Outer(alpha=-0.5), "alpha", "alpha is -0.5"),
        (Outer(alpha=1.5), "alpha", "alpha is 1.5"),
        (Outer(alpha=2.0), "alpha", "alpha is 2"),
        (Outer(alpha=math.nan), "alpha", "alpha is nan"),
        (Outer(Form.MIXED, 1.0, 0.9, 1.0), "unstable", "mixed form with alpha 1 and gamma 0.9"),
        (Outer(Form.PLAIN, 1.0, 0.9, 1.0), "unstable", "plain form with alpha 1 and gamma 0.9"),
    ],
)
def test_an_outer_optimizer_that_does_not_hold_is_refused_with_the_reason(
    outer: Outer, reason: str, quoted: str
) -> None:
    decision = check(outer)
    assert not decision
    assert decision.reason == reason
    assert quoted in decision.detail


@pytest.mark.parametrize(
    ("outer", "alpha", "gamma"),
    [
        (Outer(Form.PLAIN, 1.0, 0.85, 1.0), 0.55, 0.70),  # 2(1 − .7225), √½
        (Outer(Form.PLAIN, 1.0, 0.99, 0.5), 0.039, 0.86),  # 2(1 − .9801), √¾
        (Outer(Form.PLAIN, 1.0, 0.999, 1.0), 0.0039, 0.70),
    ],
)
def test_a_refusal_names_the_growth_and_the_nearest_values_that_hold(outer: Outer, alpha: float, gamma: float) -> None:
    detail = check(outer).detail
    assert f"alpha {alpha:g} or less, or gamma {gamma:g} or less" in detail
    assert f"{radius(outer, math.inf):.3g}-fold a round" in detail


@pytest.mark.parametrize("form", PRINTED)
@pytest.mark.parametrize("gamma", [0.9, 0.95, 0.987, 0.999])
@pytest.mark.parametrize("alpha", [0.87, 0.93, 1.0])
def test_the_values_that_a_refusal_names_are_allowed_and_a_little_more_is_not(
    form: Form, gamma: float, alpha: float
) -> None:
    decision = check(Outer(form, 1.0, gamma, alpha))
    assert not decision
    named = re.search(r"take alpha (\S+) or less, or gamma (\S+) or less", decision.detail)
    assert named is not None
    nearest_alpha, nearest_gamma = float(named[1]), float(named[2])
    assert check(Outer(form, 1.0, gamma, nearest_alpha))
    assert check(Outer(form, 1.0, nearest_gamma, alpha))
    more = nearest_alpha * 1.11 if nearest_alpha < 0.1 else nearest_alpha + 0.011
    assert more > alpha or not check(Outer(form, 1.0, gamma, more))
    assert nearest_gamma + 0.011 > gamma or not check(Outer(form, 1.0, nearest_gamma + 0.011, alpha))


@pytest.mark.parametrize("outer", [Outer(Form.MIXED, 0.7, 0.7, 0.5), Outer(Form.MIXED, 1.0, 0.9, 0.5), Outer()])
def test_the_measured_settings_are_allowed(outer: Outer) -> None:
    decision = check(outer)
    assert decision.allowed
    assert (decision.reason, decision.detail) == ("", "")
