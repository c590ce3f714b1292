"""Numbers ⇄ bytes: four formats, one block scale each for the integer ones.

An integer format cuts the numbers into blocks of 64 and stores each as round(x / scale) with one bfloat16 scale a
block, chosen so that nothing is clipped. Rounding errors, relative to the root mean square of a normally distributed
block: int8 0.6 %, int4 11 %.

Decoding is one multiplication of an integer by a scale, exact in IEEE arithmetic, so every machine decodes the same.
"""

from __future__ import annotations

import math
import warnings
from enum import Enum
from math import prod

import torch
from torch import Tensor

from peer.core.frame import Buffer
from peer.errors import ProtocolError

BLOCK = 64


class Format(Enum):
    """How numbers travel."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


CHUNK = 2**18
"""Numbers that are encoded or decoded at once; a multiple of `BLOCK`."""

_DTYPE = {
    Format.FP32: torch.float32,
    Format.BF16: torch.bfloat16,
    Format.INT8: torch.int8,
}
_WIDTH = {Format.FP32: 4, Format.BF16: 2, Format.INT8: 1}
_LEVELS = {Format.INT8: 127, Format.INT4: 7}

with warnings.catch_warnings():
    # torch says once that memory is not to be written to; what is decoded here never is
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def encoded_bytes(form: Format, count: int) -> int:
    """Return how many bytes `count` numbers take."""
    if form is Format.FP32:
        return 4 * count
    if form is Format.BF16:
        return 2 * count
    scales = 2 * -(-count // BLOCK)
    return scales + (count if form is Format.INT8 else -(-count // 2))


def encode(x: Tensor, form: Format) -> Buffer:
    """Encode a tensor of any shape, dtype and device, row by row; raises `ProtocolError` when it is not finite.

    Needs little memory beside the result: the numbers are taken a chunk at a time, which is also what fits a cache. The
    result may share memory with x, which is not to change any more.
    """
    if form is Format.FP32:
        return _raw(x)
    flat, out = x.detach().reshape(-1), bytearray(encoded_bytes(form, x.numel()))
    for first in range(0, flat.numel(), CHUNK):
        chunk = flat[first : first + CHUNK].float()
        if form in _LEVELS:
            _encode_blocks(chunk, form, out, first, flat.numel())
        else:
            _check_finite(chunk, "this peer's own weights are not finite")
            _place(out, first * _WIDTH[form], chunk, _DTYPE[form])
    return out


def decode(payload: Buffer, form: Format, shape: tuple[int, ...]) -> Tensor:
    """Decode float32 numbers of a given shape, on the CPU; raises `ProtocolError` on a wrong size or non-finite ones.

    The result may share memory with the payload.
    """
    count = prod(shape)
    if len(payload) != encoded_bytes(form, count):
        raise ProtocolError("malformed", f"{len(payload)} bytes where {encoded_bytes(form, count)} encode {shape}")
    if not count:
        return torch.zeros(shape)
    if form not in _LEVELS:
        numbers = torch.frombuffer(payload, dtype=_DTYPE[form]).float()
        _check_finite(numbers, "the partner sent numbers that are not finite")
        return numbers.view(shape)
    scales = torch.frombuffer(payload, dtype=torch.bfloat16, count=-(-count // BLOCK)).float()
    _check_finite(scales * 2 * _LEVELS[form], "the partner sent numbers that are not finite")
    out = torch.empty(count)
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        steps = torch.nn.functional.pad(_steps(payload, form, first, size, count), (0, -size % BLOCK)).view(-1, BLOCK)
        steps.mul_(scales[first // BLOCK : first // BLOCK + len(steps), None])
        out[first : first + size] = steps.view(-1)[:size]
    return out.view(shape)


def _encode_blocks(chunk: Tensor, form: Format, out: bytearray, first: int, count: int) -> None:
    levels, size, split = _LEVELS[form], chunk.numel(), 2 * -(-count // BLOCK)
    blocks = torch.nn.functional.pad(chunk, (0, -size % BLOCK)).view(-1, BLOCK)
    # one part in 128 above what is needed, so that rounding the scale to bfloat16 never clips the largest number
    scales = (blocks.abs().amax(1) * ((1 + 2**-7) / levels)).bfloat16()
    wide = scales.float()[:, None]
    _check_finite(wide, "this peer's own weights are not finite")
    steps = torch.where(wide > 0, blocks / wide, 0).round_().clamp_(-levels, levels).view(-1)[:size]
    _place(out, 2 * (first // BLOCK), scales, torch.bfloat16)
    if form is Format.INT4:
        nibbles = torch.nn.functional.pad((steps + 8).to(torch.uint8), (0, size % 2))
        _place(out, split + first // 2, nibbles[0::2] | (nibbles[1::2] << 4), torch.uint8)
    else:
        _place(out, split + first * _WIDTH[form], steps, _DTYPE[form])


def _raw(x: Tensor) -> Buffer:
    numbers = x.detach().float().cpu().contiguous().view(-1)
    if not len(numbers):
        return b""
    for chunk in torch.split(numbers, CHUNK):
        _check_finite(chunk, "this peer's own weights are not finite")
    return numbers.numpy().data.cast("B")


def _steps(payload: Buffer, form: Format, first: int, size: int, count: int) -> Tensor:
    """Return the integers from `first` on, as float32."""
    split = 2 * -(-count // BLOCK)
    if form is Format.INT4:
        packed = torch.frombuffer(payload, dtype=torch.uint8, offset=split + first // 2, count=-(-size // 2))
        return torch.stack((packed & 15, packed >> 4), 1).view(-1)[:size].float() - 8
    offset = split + first * _WIDTH[form]
    return torch.frombuffer(payload, dtype=_DTYPE[form], offset=offset, count=size).float()


def _place(out: bytearray, offset: int, numbers: Tensor, dtype: torch.dtype) -> None:
    torch.frombuffer(out, dtype=dtype, offset=offset, count=numbers.numel()).copy_(numbers)


def _check_finite(numbers: Tensor, complaint: str) -> None:
    if not math.isfinite(float(numbers.sum())) and not bool(torch.isfinite(numbers).all()):
        raise ProtocolError("non-finite", complaint)
