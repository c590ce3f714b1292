"""Random numbers that don't depend on the processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peer.models import draws
from peer.models.draws import PortableDraws


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_normal_draws_are_numpys_to_the_last_bit() -> None:
    with PortableDraws(3):
        plain = torch.empty(4, 5).normal_()
        scaled = torch.nn.init.normal_(torch.empty(7), mean=2.0, std=0.02)
    expected = generator(3)
    np.testing.assert_array_equal(plain.numpy(), expected.standard_normal((4, 5)).astype(np.float32))
    np.testing.assert_array_equal(scaled.numpy(), (expected.standard_normal(7) * 0.02 + 2.0).astype(np.float32))


def test_uniform_draws_are_numpys_to_the_last_bit() -> None:
    with PortableDraws(3):
        plain = torch.empty(3).uniform_()
        upper = torch.empty(3).uniform_(-1)
        ranged = torch.nn.init.uniform_(torch.empty(6), -0.5, 0.25)
    expected = generator(3)
    np.testing.assert_array_equal(plain.numpy(), expected.random(3).astype(np.float32))
    np.testing.assert_array_equal(upper.numpy(), (expected.random(3) * 2.0 - 1.0).astype(np.float32))
    np.testing.assert_array_equal(ranged.numpy(), (expected.random(6) * 0.75 - 0.5).astype(np.float32))


def test_a_large_draw_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_BLOCK", 10)
    with PortableDraws(1):
        drawn = torch.empty(13, 4).normal_()
    np.testing.assert_array_equal(drawn.numpy(), generator(1).standard_normal((13, 4)).astype(np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)])
def test_scalars_and_empty_tensors_can_be_drawn(shape: tuple[int, ...]) -> None:
    with PortableDraws(2):
        drawn = torch.empty(shape).normal_()
    np.testing.assert_array_equal(drawn.numpy(), generator(2).standard_normal(shape).astype(np.float32))


def test_a_view_is_drawn_in_place() -> None:
    whole = torch.zeros(4, 6)
    with PortableDraws(5):
        whole[:, 1:3].normal_()
    expected = np.zeros((4, 6), np.float32)
    expected[:, 1:3] = generator(5).standard_normal((4, 2)).astype(np.float32)
    np.testing.assert_array_equal(whole.numpy(), expected)


def test_outside_of_the_block_torch_draws_as_ever() -> None:
    with PortableDraws(5):
        torch.empty(3).normal_()
    one, other = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    assert torch.equal(torch.empty(3).normal_(generator=one), torch.empty(3).normal_(generator=other))
    assert not torch.equal(torch.empty(3).normal_(generator=one), torch.from_numpy(generator(5).random(3)).float())
