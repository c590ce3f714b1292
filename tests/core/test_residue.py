"""Modulo quantization: what remainders tell beside one's own numbers, by definition and by the statistics of chance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.core.half import COLD, Rounding, difference, first_half, half_bytes, steps_bytes
from peer.core.quantize import Format, encode
from peer.core.residue import BITS, packed_bytes, trust
from peer.core.residue import difference as read
from peer.core.residue import encode as send
from peer.errors import ProtocolError

COUNT = 200_000


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def told(theirs: Tensor, own: Tensor, step: float, bits: int) -> Tensor:
    steps = torch.full((len(own),), step)
    return read(send(theirs, steps, bits), own, steps, bits)


@pytest.mark.parametrize("bits", BITS)
@given(apart=st.integers(-300, 300), place=st.integers(-(10**5), 10**5), count=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_whole_steps_are_told_exactly_modulo_their_number(bits: int, apart: int, place: int, count: int) -> None:
    """On the grid itself c is the difference in steps, wrapped into its range."""
    own = torch.full((2, count), float(place))
    half = 2 ** (bits - 1)
    c = (apart + half) % (2 * half) - half
    expected = c * float(trust(torch.full((1, 1), c)))
    torch.testing.assert_close(told(own + apart, own, 1.0, bits), torch.full((2, count), expected))


def test_a_difference_far_below_the_step_is_right_on_average() -> None:
    """Over where the numbers lie between two grid points, before what is chance is left out."""
    own = 1000 * normal(1, COUNT)
    for apart in (0.1, 0.5, 0.9):
        found = told(own + apart, own, 1.0, 8)
        c = torch.round(found / found.max())
        error = math.sqrt(apart * (1 - apart) / COUNT)
        assert float(c.double().mean()) == pytest.approx(apart, abs=5 * error)


@pytest.mark.parametrize(
    ("bits", "step", "left"), [(4, 0.5, 0.055), (4, 0.9, 0.14), (8, 0.125, 0.003), (16, 2**-6, 5e-5)]
)
def test_of_normally_distributed_differences_so_much_is_left(bits: int, step: float, left: float) -> None:
    own, d = 30 * normal(1, COUNT), normal(1, COUNT, seed=3)
    error = (d - told(own + d, own, step, bits)).square().mean()
    assert left / 1.5 < float(error) < left


@pytest.mark.parametrize("step", [0.3, 1.0, 5.0, 50.0, 1e4])
def test_however_wide_the_step_what_is_told_is_no_worse_than_nothing(step: float) -> None:
    own, d = 1e5 * normal(1, COUNT), normal(1, COUNT, seed=3)
    assert float((d - told(own + d, own, step, 8)).square().mean()) < 1.01


@pytest.mark.parametrize("bits", BITS)
def test_a_difference_that_wraps_around_is_at_most_half_the_range(bits: int) -> None:
    own, d = normal(1, COUNT), 1e5 * normal(1, COUNT, seed=3)
    assert float(told(own + d, own, 0.01, bits).abs().max()) <= 0.01 * 2 ** (bits - 1)


def test_every_group_has_a_step_of_its_own_and_long_ones_are_rounded_without_a_seam() -> None:
    own, d = 100 * normal(3, 600_000), normal(3, 600_000, seed=3)
    steps = torch.tensor([0.1, 0.01, 0.001])
    found = read(send(own + d * steps[:, None], steps, 8), own, steps, 8)
    error = (found - d * steps[:, None]).abs().amax(1)
    assert bool((error < 1.6 * steps).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_remainders_take_no_more_bytes_than_their_bits(bits: int, count: int) -> None:
    own, steps = normal(1, count), torch.ones(1)
    sent = send(own, steps, bits)
    assert len(sent) == packed_bytes(bits, count) == math.ceil(bits * count / 8)
    assert read(sent, own, steps, bits).shape == (1, count)
    with pytest.raises(ProtocolError, match="malformed"):
        read(sent + b"xx", own, steps, bits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_never_sent(bad: float) -> None:
    with pytest.raises(ProtocolError, match="non-finite"):
        send(torch.tensor([[1.0, bad]]), torch.ones(1), 4)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_steps_that_are_none_are_refused(bad: float) -> None:
    sent = bytearray(torch.tensor([1.0, bad]).bfloat16().view(torch.uint8).numpy().tobytes())
    with pytest.raises(ProtocolError):
        difference(memoryview(sent + bytes(10)), torch.ones(2, 5), Rounding(8, 0.1))


@pytest.mark.parametrize("rounding", [None, Rounding(8, 0.1), Rounding(4, 0.5)])
def test_a_half_takes_the_bytes_that_both_sides_expect(rounding: Rounding | None) -> None:
    own = normal(3, 7)
    assert len(first_half(own, None, rounding)) == steps_bytes(rounding, 3) + half_bytes(rounding, 21)


def test_a_peer_without_experience_covers_what_any_two_models_may_differ_by() -> None:
    own = torch.stack([normal(COUNT), 5 * normal(COUNT), torch.zeros(COUNT)])
    theirs = torch.stack([normal(COUNT, seed=2), 5 * normal(COUNT, seed=3), torch.zeros(COUNT)])
    for spread in (None, torch.zeros(3)):
        found = difference(memoryview(first_half(theirs, spread, Rounding(8, 0.1))), own, Rounding(8, 0.1))
        assert float((found - (theirs - own)).norm() / (theirs - own).norm()) < COLD / 2**7 / 2


def test_experience_makes_the_grid_as_fine_as_the_difference() -> None:
    own, d = normal(1, COUNT), 1e-4 * normal(1, COUNT, seed=3)
    half = first_half(own + d, torch.tensor([1e-4]), Rounding(8, 0.125))
    assert float((difference(memoryview(half), own, Rounding(8, 0.125)) - d).norm() / d.norm()) < 0.06


def test_without_rounding_the_difference_is_exact() -> None:
    own, theirs = normal(2, 5), normal(2, 5, seed=1)
    half = first_half(theirs, None, None)
    assert half == encode(theirs, Format.FP32)
    assert torch.equal(difference(memoryview(half), own, None), theirs - own)
