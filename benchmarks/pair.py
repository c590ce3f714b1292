"""The two models that meet: the shapes of a preset, numbers that both sides can draw, and what a codec promises.

The models differ by a percent of their norm, as peers do late in training. In every matrix the difference has rank 3,
so that each codec of at least that rank should find all of it but for its rounding.
"""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from peer.core.codec import Codec
from peer.core.quantize import Format

Shapes = dict[str, tuple[int, ...]]
"""Parameter name → shape, in the model's own order."""

SCALE = 0.02
APART = 0.01
RANK = 3

_NO_ROOM = 0.1
_LEFT = {Format.FP32: 1e-3, Format.INT8: 0.04, Format.INT4: 0.5}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a preset's parameters, from transformers itself."""
    from peer.models.causal import outline
    from peer.models.presets import resolve

    return {name: tuple(weight.shape) for name, weight in outline(resolve(model)).named_parameters()}


def parameter_count(shapes: Shapes) -> int:
    """Count the numbers in a model."""
    return sum(prod(shape) for shape in shapes.values())


def draw(shape: tuple[int, ...], index: int) -> tuple[Tensor, Tensor]:
    """Return both sides' first values of the model's tensor number `index`; the same in every process."""
    generator = torch.Generator().manual_seed(index)
    middle = torch.randn(shape, generator=generator).mul_(SCALE)
    if len(shape) < 2:
        half = torch.randn(shape, generator=generator)
    else:
        half = torch.randn(shape[0], RANK, generator=generator) @ torch.randn(RANK, shape[1], generator=generator)
    half.mul_(APART / 2 * torch.linalg.vector_norm(middle) / torch.linalg.vector_norm(half))
    return middle + half, middle - half


def promise(codec: Codec) -> float:
    """Return what may be left of the difference, 0 to 1, once both sides applied ½ C.

    That is the rounding of the codec, and under a low-rank one a share of what such a meeting has no room for: some
    vectors, and a direction that is not known yet.
    """
    if not codec.low:
        return _LEFT[codec.form]
    return 1.0 if (codec.rank or 1) < RANK else math.hypot(_LEFT[codec.form], _NO_ROOM)
