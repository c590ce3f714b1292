"""What the inner optimizer knows of the loss's curvature."""

from __future__ import annotations

import pytest
import torch

from peer.inner import Inner
from peer.sensitivity import sensitivity
from peer.trainer import optimizer_for


@pytest.mark.parametrize("name", ["adamw", "lordo"])
def test_it_is_the_root_of_the_mean_squared_gradient(name: str) -> None:
    weights = {"h.0.w.weight": torch.ones(24, 48), "bias": torch.ones(48)}
    optimizer = optimizer_for(Inner(optimizer=name, lr=1e-3, beta2=0.9, rank=24 if name == "lordo" else 0), weights)  # type: ignore[arg-type]
    assert len(set(sensitivity(optimizer, weights).values())) <= 1  # before the first step all are alike
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        for scale, weight in zip((0.1, 3.0), weights.values(), strict=True):
            weight.grad = scale * torch.randn(weight.shape, generator=draw)
        optimizer.step()
    found = sensitivity(optimizer, weights)
    assert found["h.0.w.weight"] == pytest.approx(0.1, rel=0.05)
    assert found["bias"] == pytest.approx(3.0, rel=0.25)


def test_without_gradients_it_is_next_to_nothing_and_with_broken_ones_unknown() -> None:
    weights = {"dead": torch.ones(3), "broken": torch.ones(3), "sound": torch.ones(3)}
    optimizer = optimizer_for(Inner(optimizer="adamw", lr=1e-3), weights)
    for name, weight in weights.items():
        weight.grad = torch.full((3,), {"dead": 0.0, "broken": torch.nan, "sound": 1.0}[name])
    optimizer.step()
    found = sensitivity(optimizer, weights)
    assert set(found) == {"dead", "sound"}
    assert 0 < found["dead"] < 1e-10 < found["sound"]
