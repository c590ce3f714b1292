"""Numbers ⇄ bytes: five formats, one block scale each for the integer ones.

An integer format cuts the numbers into blocks of 64 and stores each as round(x / scale) with one bfloat16 scale a
block, chosen so that nothing is clipped. Rounding errors, relative to the root mean square of a normally distributed
block: int16 2.4e-5, int8 0.6 %, int4 11 %. int16 costs the bytes of fp16 and is six times finer, which is why what is
sent first (a factor of a model, not of a difference) goes in int16.

Decoding is one multiplication of an integer by a scale, exact in IEEE arithmetic, so every machine decodes the same.
"""

from __future__ import annotations

from enum import Enum
from math import prod

import torch
from torch import Tensor

from peer.errors import ProtocolError

BLOCK = 64


class Format(Enum):
    """How numbers travel."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT16 = "int16"
    INT8 = "int8"
    INT4 = "int4"


_LEVELS = {Format.INT16: 32767, Format.INT8: 127, Format.INT4: 7}


def encoded_bytes(form: Format, count: int) -> int:
    """Return how many bytes `count` numbers take."""
    if form is Format.FP32:
        return 4 * count
    if form is Format.BF16:
        return 2 * count
    scales = 2 * -(-count // BLOCK)
    if form is Format.INT16:
        return scales + 2 * count
    return scales + (count if form is Format.INT8 else -(-count // 2))


def encode(x: Tensor, form: Format) -> bytes:
    """Encode a tensor of any shape, dtype and device, row by row; raises `ProtocolError` when it is not finite."""
    flat = x.detach().reshape(-1).float()
    if form in (Format.FP32, Format.BF16):
        if not bool(torch.isfinite(flat).all()):
            raise ProtocolError("non-finite", "this peer's own weights are not finite")
        return _raw(flat if form is Format.FP32 else flat.bfloat16())
    levels, count = _LEVELS[form], flat.numel()
    blocks = torch.nn.functional.pad(flat, (0, -count % BLOCK)).view(-1, BLOCK)
    # one part in 128 above what is needed, so that rounding the scale to bfloat16 never clips the largest number
    scales = (blocks.abs().amax(1, keepdim=True) * ((1 + 2**-7) / levels)).bfloat16()
    wide = scales.float()
    if not bool(torch.isfinite(wide).all()):
        raise ProtocolError("non-finite", "this peer's own weights are not finite")
    steps = torch.where(wide > 0, blocks / wide, 0).round_().clamp_(-levels, levels).view(-1)[:count]
    if form is Format.INT4:
        nibbles = torch.nn.functional.pad((steps + 8).to(torch.uint8), (0, count % 2))
        return _raw(scales) + _raw(nibbles[0::2] | (nibbles[1::2] << 4))
    return _raw(scales) + _raw(steps.to(torch.int16 if form is Format.INT16 else torch.int8))


def decode(payload: bytearray | memoryview, form: Format, shape: tuple[int, ...]) -> Tensor:
    """Decode float32 numbers of a given shape, on the CPU; raises `ProtocolError` on a wrong size or non-finite ones.

    The result may share memory with the payload.
    """
    count = prod(shape)
    if len(payload) != encoded_bytes(form, count):
        raise ProtocolError("malformed", f"{len(payload)} bytes where {encoded_bytes(form, count)} encode {shape}")
    if form in (Format.FP32, Format.BF16):
        numbers = torch.frombuffer(payload, dtype=torch.float32 if form is Format.FP32 else torch.bfloat16).float()
        _check_finite(numbers)
        return numbers.view(shape)
    split = 2 * -(-count // BLOCK)
    scales = torch.frombuffer(payload, dtype=torch.bfloat16, count=split // 2).float()
    _check_finite(scales)
    if form is Format.INT4:
        packed = torch.frombuffer(payload, dtype=torch.uint8, offset=split)
        steps = torch.stack((packed & 15, packed >> 4), 1).view(-1)[:count].float() - 8
    else:
        dtype = torch.int16 if form is Format.INT16 else torch.int8
        steps = torch.frombuffer(payload, dtype=dtype, offset=split).float()
    padded = torch.nn.functional.pad(steps, (0, -count % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).view(-1)[:count].view(shape)


def _raw(x: Tensor) -> bytes:
    flat = x.contiguous().cpu()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _check_finite(numbers: Tensor) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise ProtocolError("non-finite", "the partner sent numbers that are not finite")
