"""The other side's numbers in few bits, to be read beside one's own: modulo quantization.

After Moniqua (Lu, De Sa, ICML 2020). Two models differ by little; to tell one from the other it is enough to send where
on a grid of step s, as wide as the difference, a number lies, and of that only the remainder modulo L = 2^bits:

    k = ⌊x / s + ½⌋         sent: k mod L
    c = (k_theirs − k_ours) mod L, taken from −L/2 to L/2 − 1
    d = β s c               the difference, theirs minus ours

While the difference stays within s (L/2 − 1), s c is off by less than s, and right on average over where x lies between
two grid points. A larger difference wraps around: d then has nothing to do with it, but is no larger than s L/2.

Where s is far wider than the difference, most of s c is chance, and c itself shows it. With q the mean of c², normally
distributed differences of standard deviation τ s have q ≈ τ² + 1/6 for large τ and q ≈ √(2/π) τ for small ones;
`trust` takes τ² = π q² / 2 below q = 1/π, from there on its tangent q − 1/2π, and β = τ² / q, the factor of the best
linear estimate (Wiener's), which leaves out what is mostly chance.

Numbers come in groups, each with a step of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.errors import ProtocolError

BITS = (4, 8, 16)

_CHUNK = 2**18
"""Numbers that are rounded at once: what fits a cache."""

_FURTHEST = 2.0**22
"""Steps from zero; no honest step leads further, and float32 knows half a step up to there."""


def packed_bytes(bits: int, count: int) -> int:
    """Return how many bytes `count` remainders take."""
    return -(-bits * count // 8)


def encode(x: Tensor, steps: Tensor, bits: int) -> bytearray:
    """Return the packed remainders of x (groups × size), group by group; steps (groups,): above 0.

    Raises `ProtocolError` when x is not finite.
    """
    rests, size = np.empty(x.numel(), np.uint16), x.shape[1]
    for first, last in _spans(x):
        rest = _rounded(x[first:last], steps[first:last]) & (2**bits - 1)
        rests[first * size : last * size] = rest.reshape(-1).numpy()
    return bytearray(_pack(rests, bits))


def difference(packed: bytearray | memoryview, own: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return d, theirs minus one's own (groups × size), float32 on the CPU.

    Raises `ProtocolError` on a wrong size, and when one's own numbers are not finite.
    """
    if len(packed) != packed_bytes(bits, own.numel()):
        shape = tuple(own.shape)
        raise ProtocolError("malformed", f"{len(packed)} bytes where {packed_bytes(bits, own.numel())} encode {shape}")
    half, size = 2 ** (bits - 1), own.shape[1]
    rests, out = _unpack(packed, bits, own.numel()), torch.empty(own.shape)
    for first, last in _spans(own):
        ours = _rounded(own[first:last], steps[first:last])
        theirs = torch.from_numpy(rests[first * size : last * size].astype(np.int32)).view_as(ours)
        c = theirs.sub_(ours).add_(half).bitwise_and_(2 * half - 1).sub_(half).float()
        out[first:last] = c.mul_((trust(c) * steps[first:last])[:, None])
    return out


def trust(c: Tensor) -> Tensor:
    """Return β of every group of c (groups × size), float32 (groups,)."""
    squares = c.float().square().mean(1)
    variance = torch.where(squares < 1 / math.pi, squares**2 * (math.pi / 2), squares - 1 / (2 * math.pi))
    return torch.where(squares > 0, variance / squares, squares)


def _spans(x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield first and last plus one of as many groups as fit a cache."""
    groups, size = x.shape
    high = max(1, _CHUNK // max(1, size))
    return ((first, min(first + high, groups)) for first in range(0, groups, high))


def _rounded(x: Tensor, steps: Tensor) -> Tensor:
    """Return k, int32 (groups × size)."""
    numbers = x.detach().float().cpu()
    if not bool(torch.isfinite(numbers.sum())):
        raise ProtocolError("non-finite", "this peer's own weights are not finite")
    whole = (numbers / steps[:, None]).clamp_(-_FURTHEST, _FURTHEST).add_(0.5).floor_()
    return whole.to(torch.int32)


def _pack(rests: NDArray[np.uint16], bits: int) -> bytes:
    if bits == 4:
        pairs = np.pad(rests.astype(np.uint8), (0, len(rests) % 2)).reshape(-1, 2)
        return (pairs[:, 0] | (pairs[:, 1] << np.uint8(4))).tobytes()
    return rests.astype("<u2" if bits == 16 else np.uint8).tobytes()


def _unpack(packed: bytearray | memoryview, bits: int, count: int) -> NDArray[np.uint8] | NDArray[np.uint16]:
    if bits == 16:
        return np.frombuffer(packed, "<u2")
    raw = np.frombuffer(packed, np.uint8)
    return raw if bits == 8 else np.stack((raw & np.uint8(15), raw >> np.uint8(4)), 1).reshape(-1)[:count]
