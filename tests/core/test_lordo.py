"""The low-rank inner optimizer against closed forms, singular values, brute force and torch's own Adam, in fp64."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.core import lordo
from peer.core.lordo import Memory, Mu, Rule

RULE = Rule(
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.0,
    rank=0,
    omega=0.9,
    mu="scalar",
    projection="power",
    feedback="none",
)
P, Q, R = 8, 12, 3
How = Literal["power", "svd"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(rows: int, columns: int, seed: int = 0) -> Tensor:
    basis: Tensor = torch.linalg.qr(noise(rows, columns, seed=seed))[0]
    return basis


def fresh(basis: Tensor, columns: int, feedback: Tensor | None = None) -> Memory:
    zero = torch.zeros(basis.shape[1], columns, dtype=basis.dtype)
    return Memory(basis, zero, zero.clone(), feedback)


def same_span(one: Tensor, other: Tensor) -> float:
    """Return how far two orthonormal bases are from spanning the same: the norm of the difference of projections."""
    return float((one @ one.mT - other @ other.mT).norm())


def close(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> bool:
    return bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance))


# ---------------------------------------------------------------- one step


def printed(
    weight: Tensor, gradient: Tensor, basis: Tensor, u: Tensor, v: Tensor, rule: Rule, t: int, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the step as the module's head prints it, number by number where it matters."""
    low = basis.mT @ gradient
    u = rule.beta1 * u + (1 - rule.beta1) * low
    v = rule.beta2 * v + (1 - rule.beta2) * low**2
    root = (v / (1 - rule.beta2**t)).sqrt() + rule.epsilon
    psi = u / (1 - rule.beta1**t) / root
    rest = gradient - basis @ low
    full = torch.empty_like(gradient)
    for j in range(gradient.shape[1]):
        size = rest[:, j].norm() / (P - R) ** 0.5
        own = psi[:, j].norm() / R**0.5
        full[:, j] = {
            "scalar": gradient[:, j] / (sum(root.flatten().tolist()) / root.numel()),
            "column": gradient[:, j] / (sum(root[:, j].tolist()) / R),
            "fira": rest[:, j] * min(float(psi[:, j].norm() / low[:, j].norm()), float(own / (size + rule.epsilon))),
            "unit": rest[:, j] / (size + rule.epsilon),
        }[rule.mu]
    eta = lr / rule.omega
    change = (1 - rule.omega) * full + rule.omega * basis @ psi
    return (1 - rule.omega * eta * rule.weight_decay) * weight - eta * change, u, v


@pytest.mark.parametrize("mu", get_args(Mu))
@pytest.mark.parametrize("omega", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("tall", [False, True])
def test_a_step_is_the_printed_one(mu: Mu, omega: float, tall: bool) -> None:
    rule = replace(RULE, mu=mu, omega=omega, weight_decay=0.1, epsilon=1e-3)
    basis = orthonormal(P, R)
    memory = fresh(basis.clone(), Q)
    stored = noise(Q, P) if tall else noise(P, Q)
    weight = lordo.upright(stored)
    expected, u, v = weight.clone(), memory.first.clone(), memory.second.clone()
    for t in range(1, 5):
        gradient = lordo.upright(noise(*stored.shape, seed=t))
        expected, u, v = printed(expected, gradient, basis, u, v, rule, t, 0.01)
        lordo.update(weight, gradient, memory, rule, t, 0.01)
    assert close(lordo.upright(stored), expected)  # a tall weight is changed where it lies
    assert close(memory.first, u)
    assert close(memory.second, v)


def test_both_of_firas_scales_occur() -> None:
    """Where ĝ is small by chance the bound holds, elsewhere Fira's own φ."""
    basis, gradient = torch.eye(P, R).double(), noise(P, Q)
    gradient[:R, 0] *= 1e-6
    gradient[R:, 1] *= 1e-2
    low, psi = gradient[:R], noise(R, Q, seed=1)
    scale = lordo.full_rank_scale(replace(RULE, mu="fira"), gradient, low, low, psi, psi)
    rest = gradient - basis @ low
    assert float((rest[:, 0] * scale[0]).norm() / (P - R) ** 0.5) == pytest.approx(float(psi[:, 0].norm() / R**0.5))
    assert float(scale[1]) == pytest.approx(float(psi[:, 1].norm() / low[:, 1].norm()))


@pytest.mark.parametrize("mu", ["fira", "unit"])
def test_what_is_outside_of_the_basis_by_rounding_alone_is_left_out(mu: Mu) -> None:
    basis = orthonormal(P, R).float()
    gradient = basis @ noise(R, Q).float()
    alone, both = torch.zeros(P, Q), torch.zeros(P, Q)
    lordo.update(alone, gradient, fresh(basis, Q), replace(RULE, omega=1.0), 1, 0.1)
    lordo.update(both, gradient, fresh(basis, Q), replace(RULE, mu=mu, omega=0.1), 1, 0.1)
    assert torch.equal(alone, both)


@pytest.mark.parametrize("mu", get_args(Mu))
def test_at_full_rank_nothing_is_outside(mu: Mu) -> None:
    """fira and unit then are Adam at every ω; scalar and column add the whole gradient, as printed."""
    weights = [noise(P, Q), noise(P, Q)]
    for weight, omega in zip(weights, (0.3, 1.0), strict=True):
        memory = fresh(torch.eye(P, dtype=torch.float64), Q)
        for step in range(1, 4):
            lordo.update(weight, noise(P, Q, seed=step), memory, replace(RULE, mu=mu, omega=omega), step, 0.01)
    assert close(weights[0], weights[1]) == (mu in ("fira", "unit"))


def test_at_full_rank_with_omega_1_and_the_identity_it_is_adam() -> None:
    weight, theirs = noise(P, Q), torch.nn.Parameter(noise(P, Q))
    memory = fresh(torch.eye(P, dtype=torch.float64), Q)
    rule = replace(RULE, omega=1.0, weight_decay=0.1)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 30):
        gradient = noise(P, Q, seed=step)
        theirs.grad = gradient.clone()
        adam.step()
        lordo.update(weight, gradient, memory, rule, step, 0.01)
    assert close(weight, theirs.detach())


def test_a_gradient_of_zero_moves_nothing() -> None:
    for mu in get_args(Mu):
        weight = noise(P, Q)
        before = weight.clone()
        lordo.update(weight, torch.zeros(P, Q).double(), fresh(orthonormal(P, R), Q), replace(RULE, mu=mu), 1, 0.1)
        assert torch.equal(weight, before)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_is_not_low_rank_is_torchs_adamw(decay: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=draw)
    theirs = torch.nn.Parameter(weight.clone())
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    for step in range(1, 50):
        gradient = torch.randn(7, 5, generator=draw)
        theirs.grad = gradient.clone()
        adam.step()
        lordo.adam(weight, gradient, first, second, RULE, step, 0.01, decay)
    assert torch.allclose(weight, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "wish", "rank"),
    [
        ((768, 3072), 0, 64),
        ((3072, 768), 0, 64),
        ((64, 64), 0, 5),
        ((11, 40), 0, 1),
        ((768, 768), 16, 16),
        ((8, 768), 16, 8),
        ((1, 5), 3, 1),
    ],
)
def test_the_rank_is_a_twelfth_of_the_shorter_side_or_the_one_asked_for_and_fits(
    shape: tuple[int, int], wish: int, rank: int
) -> None:
    assert lordo.rank_of(shape, wish) == rank


# ---------------------------------------------------------------- error feedback


def test_what_was_applied_and_what_is_kept_are_together_the_sum_of_the_gradients() -> None:
    """With a fixed basis Σ Q ĝ + E = Σ Ĝ; each of the roundings of E to 8 bits adds its own error at most."""
    basis = orthonormal(P, R)
    feedback = torch.zeros(lordo.coded_bytes((P, Q)), dtype=torch.uint8)
    memory = fresh(basis, Q, feedback)
    applied, gradients, allowed = torch.zeros(P, Q).double(), torch.zeros(P, Q).double(), 0.0
    for step in range(40):
        gradient = noise(P, Q, seed=step)
        whole = gradient + lordo.uncoded(feedback, gradient)
        low = lordo.compress(gradient, memory)
        assert close(low, basis.mT @ whole)
        exact = whole - basis @ low
        error = lordo.uncoded(feedback, exact)
        step_size = float(exact.abs().max()) / 127 * (1 + 2**-6)  # of the coarsest block
        assert float((error - exact).abs().max()) <= step_size / 2 * (1 + 1e-6)
        allowed += step_size / 2
        applied += basis @ low
        gradients += gradient
    kept = lordo.uncoded(feedback, gradients)
    assert float((applied + kept - gradients).abs().max()) <= allowed
    assert close(basis.mT @ gradients, basis.mT @ applied, allowed)
    assert float(kept.norm()) > 10  # what a fixed basis never sees adds up


def test_error_feedback_takes_a_quarter_of_the_weights_and_a_scale_for_64() -> None:
    assert lordo.coded_bytes((64, 96)) == 64 * 96 + 2 * 96


def test_a_gradient_that_overflowed_leaves_no_debt() -> None:
    feedback = torch.zeros(lordo.coded_bytes((P, Q)), dtype=torch.uint8)
    gradient = noise(P, Q)
    gradient[0, 0] = math.inf
    lordo.compress(gradient, fresh(orthonormal(P, R), Q, feedback))
    assert bool(torch.isfinite(lordo.uncoded(feedback, gradient)).all())


# ---------------------------------------------------------------- the basis


def decaying(rows: int = P, columns: int = Q) -> tuple[Tensor, Tensor]:
    """Return a drift with singular values 1, ½, ¼, …, and its left singular vectors."""
    left, right = orthonormal(rows, rows, seed=1), orthonormal(columns, rows, seed=2)
    return left @ torch.diag(0.5 ** torch.arange(rows, dtype=torch.float64)) @ right.mT, left


def test_svd_gives_the_leading_singular_vectors() -> None:
    delta, left = decaying()
    basis = lordo.project(delta, orthonormal(P, R, seed=3), "svd")
    overlap = (left[:, :R].mT @ basis).abs()
    assert close(overlap, torch.eye(R, dtype=torch.float64), 1e-6)


def test_a_power_step_is_the_printed_one() -> None:
    delta, _ = decaying()
    old = orthonormal(P, R, seed=3)
    expected = torch.linalg.qr(delta @ delta.mT @ old)[0]
    basis = lordo.project(delta, old, "power")
    assert close(basis.abs(), expected.abs(), 1e-6)
    assert same_span(basis, expected) < 1e-6


def test_power_steps_on_one_drift_come_to_its_leading_singular_vectors() -> None:
    delta, left = decaying()
    basis = orthonormal(P, R, seed=3)
    gaps = []
    for _ in range(12):
        basis = lordo.project(delta, basis, "power")
        gaps.append(same_span(basis, left[:, :R]))
    assert gaps[-1] < 1e-6
    # squared singular values, a quarter from one to the next, so each step divides what is wrong by about 4
    assert all(later < earlier / 3 for earlier, later in pairwise(gaps[2:7]))


@pytest.mark.parametrize("how", ["power", "svd"])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_new_basis_is_orthonormal_whatever_the_drifts_size(how: How, scale: float, dtype: torch.dtype) -> None:
    delta = (noise(P, Q, seed=4) * scale).to(dtype)
    basis = lordo.project(delta, orthonormal(P, R).to(dtype), how)
    assert basis.dtype == dtype
    assert torch.allclose(basis.mT @ basis, torch.eye(R, dtype=dtype), atol=1e-5)


@pytest.mark.parametrize("how", ["power", "svd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tall", [False, True])
def test_where_the_drift_is_rank_deficient_the_old_basis_is_kept(how: How, dtype: torch.dtype, tall: bool) -> None:
    """A drift of rank 1 takes one direction; the other two are what the old basis has beside it."""
    direction = orthonormal(P, 1, seed=5)
    delta = (direction @ noise(1, Q, seed=6)).to(dtype)
    old = orthonormal(P, R, seed=7).to(dtype)
    basis = lordo.project(delta.mT.contiguous().mT if tall else delta, old, how).double()
    kept = (
        old.double() @ torch.linalg.svd(direction.mT @ old.double())[2][1:].mT
    )  # span of Q_old that Δ says nothing of
    assert same_span(basis, torch.cat([direction, kept], 1)) < 10 * torch.finfo(dtype).eps ** 0.5


@pytest.mark.parametrize("how", ["power", "svd"])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_drift_that_says_nothing_leaves_the_basis_as_it_is(how: How, value: float) -> None:
    old = orthonormal(P, R)
    assert torch.equal(lordo.project(torch.full((P, Q), value).double(), old, how), old)


def test_a_drawn_basis_is_orthonormal_and_shared_by_run_name_and_round_alone() -> None:
    basis = lordo.drawn((P, R), 7, "h.0.weight", 3)
    assert close(basis.mT @ basis, torch.eye(R, dtype=torch.float64))
    torch.manual_seed(5)
    assert torch.equal(basis, lordo.drawn((P, R), 7, "h.0.weight", 3))
    others = [lordo.drawn((P, R), *key) for key in ((8, "h.0.weight", 3), (7, "h.1.weight", 3), (7, "h.0.weight", 4))]
    assert all(same_span(basis, other) > 0.1 for other in others)


def test_a_drawn_basis_has_the_signs_of_gram_schmidt() -> None:
    """The one basis with a positive triangle, so no library's choice of signs shows."""
    digest = hashlib.sha256(b"w").digest()[:16]
    draws = np.random.Generator(np.random.PCG64([1, 2, int.from_bytes(digest, "little")]))
    columns = torch.from_numpy(draws.standard_normal((P, R)))
    expected = torch.zeros(P, R, dtype=torch.float64)
    for i in range(R):
        left = columns[:, i] - expected @ (expected.mT @ columns[:, i])
        expected[:, i] = left / left.norm()
    assert close(lordo.drawn((P, R), 1, "w", 2), expected)


# ---------------------------------------------------------------- rotation


def lived(basis: Tensor, steps: int) -> Memory:
    memory = fresh(basis, Q)
    for step in range(steps):
        lordo.moments(basis.mT @ noise(P, Q, seed=20 + step), memory.first, memory.second, RULE)
    return memory


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_rotation_is_ldadams_rule(steps: int) -> None:
    memory, new = lived(orthonormal(P, R), steps), orthonormal(P, R, seed=9)
    turn = new.mT @ memory.basis
    mean, square = memory.first / (1 - 0.9**steps), memory.second / (1 - 0.95**steps)
    first, second = torch.zeros(R, Q).double(), torch.zeros(R, Q).double()
    for row in range(R):
        for column in range(Q):
            spread = math.fsum(turn[row, k] ** 2 * (square[k, column] - mean[k, column] ** 2) for k in range(R))
            centre = math.fsum(turn[row, k] * mean[k, column] for k in range(R))
            first[row, column] = math.fsum(turn[row, k] * memory.first[k, column] for k in range(R))
            second[row, column] = (1 - 0.95**steps) * abs(spread + centre**2)
    lordo.rotate(memory, new, RULE, steps)
    assert close(memory.first, first)
    assert close(memory.second, second)
    assert torch.equal(memory.basis, new)


def test_a_basis_of_the_same_span_re_expresses_the_momentum_exactly() -> None:
    memory = lived(orthonormal(P, R), 5)
    whole = memory.basis @ memory.first
    new = memory.basis @ orthonormal(R, R, seed=9)
    lordo.rotate(memory, new, RULE, 5)
    assert close(memory.basis @ memory.first, whole)


def test_a_basis_with_the_same_vectors_in_another_order_and_with_other_signs_moves_the_moments_along() -> None:
    memory = lived(orthonormal(P, R), 5)
    first, second = memory.first.clone(), memory.second.clone()
    lordo.rotate(memory, memory.basis[:, [2, 0, 1]] * torch.tensor([1.0, -1.0, 1.0]).double(), RULE, 5)
    assert close(memory.first, first[[2, 0, 1]] * torch.tensor([[1.0], [-1.0], [1.0]]).double())
    assert close(memory.second, second[[2, 0, 1]])


def test_before_the_first_step_there_is_nothing_to_rotate() -> None:
    memory, new = fresh(orthonormal(P, R), Q), orthonormal(P, R, seed=9)
    lordo.rotate(memory, new, RULE, 0)
    assert not memory.first.any()
    assert not memory.second.any()
    assert torch.equal(memory.basis, new)


# ---------------------------------------------------------------- stagnation


class Pair:
    """Two peers that descend to W* ± D by momentum-SGD in a shared basis, K = 4 steps a round, and then average.

    η .1, β1 .9, no decay; W* (8 × 12) has norm 1, so the loss of the mean, ½‖W − W*‖², begins at ½.
    """

    K, LR = 4, 0.1

    def __init__(self, omega: float, how: How, seed: int) -> None:
        self.rule, self.how = replace(RULE, omega=omega), how
        self.goal = noise(P, Q, seed=seed) / noise(P, Q, seed=seed).norm()
        apart = noise(P, Q, seed=seed + 100)
        self.goals = [self.goal + apart, self.goal - apart]
        self.first_basis = lordo.drawn((P, 2), seed, "w", 0)
        self.memories = [fresh(self.first_basis.clone(), Q) for _ in self.goals]
        self.weight, self.steps = torch.zeros(P, Q).double(), 0

    def round(self) -> None:
        ends = [self._steps(goal, memory) for goal, memory in zip(self.goals, self.memories, strict=True)]
        mean = (ends[0] + ends[1]) / 2
        basis = lordo.project(mean - self.weight, self.memories[0].basis, self.how)
        self.weight, self.steps = mean, self.steps + self.K
        for memory in self.memories:
            lordo.rotate(memory, basis, self.rule, self.steps)

    def _steps(self, goal: Tensor, memory: Memory) -> Tensor:
        weight = self.weight.clone()
        scale = torch.tensor(1 - self.rule.omega).double() if self.rule.omega < 1 else None
        for _ in range(self.K):
            gradient = weight - goal
            lordo.moments(lordo.compress(gradient, memory), memory.first, memory.second, self.rule)
            lordo.descend(weight, gradient, memory.basis, self.rule.omega * memory.first, scale, self.LR)
        return weight

    @property
    def loss(self) -> float:
        return 0.5 * float((self.weight - self.goal).norm()) ** 2

    @property
    def rank(self) -> int:
        return int(torch.linalg.matrix_rank(self.weight, atol=1e-6))

    @property
    def overlap(self) -> float:
        """Return how much of the first basis the last one still spans, from 0 to 1."""
        return float((self.first_basis.mT @ self.memories[0].basis).norm()) ** 2 / 2


@pytest.mark.parametrize("how", ["power", "svd"])
@pytest.mark.parametrize("seed", range(3))
def test_without_the_full_rank_term_training_never_leaves_the_first_basis(how: How, seed: int) -> None:
    pair = Pair(1.0, how, seed)
    for _ in range(200):
        pair.round()
    outside = pair.goal - pair.first_basis @ (pair.first_basis.mT @ pair.goal)
    assert pair.loss == pytest.approx(0.5 * float(outside.norm()) ** 2, rel=1e-9)
    assert pair.loss > 0.1
    assert pair.rank == 2
    assert pair.overlap == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("how", ["power", "svd"])
@pytest.mark.parametrize("seed", range(3))
def test_with_the_full_rank_term_the_rank_becomes_8_and_the_loss_vanishes(how: How, seed: int) -> None:
    pair = Pair(0.9, how, seed)
    overlaps = []
    for _ in range(200):
        pair.round()
        overlaps.append(pair.overlap)
    assert pair.loss < 1e-12
    assert pair.rank == P
    assert min(overlaps) < 0.2
