"""The two halves of a difference: the first describes one side's numbers, the second, in return, the difference itself.

What describes a model must be fine, what describes a difference may be coarse: late in training two peers differ by a
percent or less, and a coarse model would drown that. An exact codec sends float32 both times. The others send the first
half as remainders on a grid as wide as the difference (`peer.core.residue`), and the second in a coarse format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peer.core import residue
from peer.core.frame import Buffer
from peer.core.quantize import Format, decode, encode, encoded_bytes
from peer.errors import ProtocolError

COLD = 8.0
"""How far apart, in their own size, two models are taken to be at most by a peer that has met nobody."""

WRAPPED = 0.85
WIDER = 4.0
"""A difference of more than WRAPPED of what wrapped ones have is taken to be WIDER times as large."""

FINEST = 2.0**-21
"""The least step, as a share of the largest number: float32 knows where a number lies between two grid points."""


@dataclass(frozen=True)
class Rounding:
    """How the first half of a difference is rounded. bits: of a remainder; step: in expected standard deviations."""

    bits: int
    step: float


def half_bytes(rounding: Rounding | None, count: int) -> int:
    """Return how many bytes the first half of `count` numbers takes; None: in float32."""
    return encoded_bytes(Format.FP32, count) if rounding is None else residue.packed_bytes(rounding.bits, count)


def steps_bytes(rounding: Rounding | None, groups: int) -> int:
    """Return how many bytes the steps of `groups` groups take."""
    return 0 if rounding is None else encoded_bytes(Format.BF16, groups)


def first_half(own: Tensor, spread: Tensor | None, rounding: Rounding | None, cold: float = COLD) -> Buffer:
    """Encode one's own numbers (groups × size), their steps first; raises `ProtocolError` when they are not finite.

    spread (groups,): the standard deviation of the difference that is expected; where it is unknown (None, 0) the grid
    covers differences of `cold` times the numbers' own size.
    """
    if rounding is None:
        return encode(own, Format.FP32)
    sent = encode(_steps(own, spread, rounding, cold), Format.BF16)
    return b"".join((sent, residue.encode(own, _decoded_steps(sent, own.shape[0]), rounding.bits)))


def difference(first: memoryview, own: Tensor, rounding: Rounding | None) -> Tensor:
    """Return theirs minus one's own (groups × size), float32 on the CPU, from the half that the other side sent."""
    if rounding is None:
        return decode(first, Format.FP32, (own.shape[0], own.shape[1])) - own.detach().float().cpu()
    size = steps_bytes(rounding, own.shape[0])
    return residue.difference(first[size:], own, _decoded_steps(first[:size], own.shape[0]), rounding.bits)


def seen(difference: Tensor, first: memoryview, rounding: Rounding | None) -> Tensor:
    """Return the standard deviation of every group of a difference that was read from a first half (groups,).

    Much more than that where it looks as if numbers wrapped around: then the grid was too narrow to tell.
    """
    spread: Tensor = torch.linalg.vector_norm(difference, dim=1) / max(1, difference.shape[1]) ** 0.5
    if rounding is None:
        return spread
    steps = _decoded_steps(first[: steps_bytes(rounding, len(spread))], len(spread))
    uniform = steps * 2**rounding.bits / 12**0.5
    return torch.where(spread > WRAPPED * uniform, WIDER * uniform, spread)


def _steps(own: Tensor, spread: Tensor | None, rounding: Rounding, cold: float) -> Tensor:
    if not own.numel():
        return torch.ones(own.shape[0])
    numbers = own.detach().float()
    least = FINEST * numbers.abs().amax(1).cpu()
    steps = cold * numbers.square().mean(1).sqrt().cpu() / 2 ** (rounding.bits - 1)
    if spread is not None:
        steps = torch.where(spread > 0, rounding.step * spread, steps)
    return torch.where(least > 0, torch.maximum(steps, least), 1.0)


def _decoded_steps(payload: Buffer, groups: int) -> Tensor:
    steps = decode(payload, Format.BF16, (groups,))
    if not bool((steps > 0).all()):
        raise ProtocolError("malformed", "the partner sent a step that is not above zero")
    return steps
