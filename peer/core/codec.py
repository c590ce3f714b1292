"""Difference ⇄ factors ⇄ bytes: what two peers send each other to learn C ≈ X_a − X_b, one tensor at a time.

A low-rank codec does one step of power iteration on the difference (PowerGossip: Vogels, Karimireddy, Jaggi 2020), for
a matrix X (m × n, m ≥ n, transposed if need be) and rank r:

    leg 1, a → b:   Q (n × r) and P_a = X_a Q (m × r), from which b learns P = P_a − X_b Q
    leg 2, b → a:   P̂ = orth(P) (m × r) and Z_b = X_bᵀ P̂ (n × r)
    leg 3, a → b:   W = Z (P̂ᵀ P̂)⁻¹ (n × r), where Z = X_aᵀ P̂ − Z_b
    both:           C = P̂ Wᵀ

A full codec, and the vectors under any codec, need two legs: x_a, then C = x_a − x_b.

P_a, Z_b and x_a describe a model, W and C a difference (`peer.core.half`). All arithmetic uses what was sent, one's own
included, so both sides hold the same C; only b orthogonalizes and only a solves, so nothing depends on QR's signs being
the same on different hardware. C is what the columns of P̂ span of the difference, which once rounded are no longer
orthogonal. P serves to find directions alone, and may be coarse, or even wrong: then C is small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from peer.core.change import Change
from peer.core.frame import Buffer
from peer.core.half import Rounding, difference, first_half, half_bytes, seen, steps_bytes
from peer.core.part import Part
from peer.core.prior import Guess, even, spread_of
from peer.core.quantize import Format, decode, encode, encoded_bytes
from peer.errors import ConfigError

_SPEC = re.compile(r"(?:(?P<low>rank)(?P<rank>[1-9][0-9]{0,3})?(?:-int(?P<thin>[48]))?|none|int(?P<whole>[48]))")
SPECS = "none, int8, int4, rank-int8, rank-int4, or rankR, alone or with -int8 or -int4, such as rank4-int4"

SLICE = 2**18
"""Numbers in a part that travels whole, at most, but for a longer row: what fits a cache, and a frame."""

OUTSIDE = 2.0
"""How much larger than what P shows of them Z's columns are taken to be: P sees no further than Q."""

RIDGE = 1e-4
"""Beside P̂ᵀ P̂, which is about 1: what keeps columns that say the same from counting manifold."""


@dataclass(frozen=True)
class Codec:
    """How differences travel: some directions of each matrix (low), or whole tensors.

    rank: as many directions of every matrix are what a meeting may cost; None: that is said from meeting to meeting.
    form: of Q, P̂ and differences. probe, fine: how P_a, and what answers it or is whole, are rounded; None: not at all.
    """

    spec: str
    low: bool
    rank: int | None
    form: Format
    probe: Rounding | None
    fine: Rounding | None


_ROUNDED = {
    "4": (Format.INT4, Rounding(4, 0.9), Rounding(8, 0.125)),
    "8": (Format.INT8, Rounding(8, 0.06), Rounding(16, 2**-6)),
}
"""Digits of a spec → format, and the roundings: a remainder of what answers has twice the bits of the answer."""


def parse(spec: str) -> Codec:
    """Return the codec that a spec names; raises `ConfigError` with the valid forms."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ConfigError(f"unknown codec {spec!r}: use {SPECS}")
    rank = int(match["rank"]) if match["rank"] else None
    digits = match["thin"] or match["whole"]
    form, probe, fine = _ROUNDED[digits] if digits else (Format.FP32, None, None)
    return Codec(spec, bool(match["low"]), rank, form, probe, fine)


def parts(shapes: Mapping[str, tuple[int, ...]], codec: Codec) -> list[Part]:
    """Cut a model evenly, each matrix to the codec's rank, in canonical order: that of the mapping."""
    evenly = [part(name, tuple(shape), codec, codec.rank or 1) for name, shape in shapes.items()]
    return [piece for each in evenly for piece in slices(each, codec)]


def slices(whole: Part, codec: Codec) -> list[Part]:
    """Cut a part that travels whole, and is large, into several; return any other as it is."""
    if whole.rank or whole.rows * whole.columns <= SLICE:
        return [whole]
    high = max(1, SLICE // whole.columns)
    spans = [(first, min(high, whole.rows - first)) for first in range(0, whole.rows, high)]
    return [
        replace(whole, first=first, rows=rows, leg_bytes=_whole_bytes(codec, rows, whole.columns))
        for first, rows in spans
    ]


def part(name: str, shape: tuple[int, ...], codec: Codec, rank: int) -> Part:
    """Cut one tensor: `rank` directions of a matrix under a low-rank codec, all of any other tensor.

    All of a matrix too where that takes fewer bytes.
    """
    count = prod(shape)
    high = shape[0] if len(shape) > 1 and count else 1
    wide = count // high
    legs = _whole_bytes(codec, high, wide)
    whole = Part(name, shape, high, wide, False, 0, legs)
    if not codec.low or len(shape) < 2 or count == 0:
        return whole
    rows, columns = max(high, wide), min(high, wide)
    rank = min(rank, columns)
    long, short = rows * rank, columns * rank
    thin = (
        encoded_bytes(codec.form, short) + steps_bytes(codec.probe, rank) + half_bytes(codec.probe, long),
        encoded_bytes(codec.form, long)
        + encoded_bytes(Format.BF16, rank)
        + steps_bytes(codec.fine, rank)
        + half_bytes(codec.fine, short),
        encoded_bytes(codec.form, short),
    )
    return whole if sum(thin) >= sum(legs) else Part(name, shape, rows, columns, wide > high, rank, thin)


Look = Callable[[Callable[[Tensor], Tensor]], Tensor]
"""Apply a function to a parameter's live tensor, which stands still meanwhile, and return what comes of it."""


def probe(part: Part, codec: Codec, look: Look, guess: Guess) -> Buffer:
    """Leg 1, caller: encode Q and P_a = X_a Q, or x_a."""
    if guess.basis is None:
        return first_half(look(part.copy), guess.spread, codec.fine, guess.cold)
    sent = encode(guess.basis.T, codec.form)
    q = decode(sent, codec.form, (part.rank, part.columns)).T
    p = look(lambda x: part.times(x, q)).T.contiguous()
    return b"".join((sent, first_half(p, guess.spread, codec.probe, guess.cold)))


@dataclass(frozen=True)
class Found:
    """What the callee has of C after leg 2, as the caller will decode it: P̂ and P's spread by columns, or all of C."""

    left: Tensor
    spread: Tensor | None = None


def reply(part: Part, codec: Codec, look: Look, payload: Buffer) -> tuple[Buffer, Found]:
    """Leg 2, callee: encode P̂, how large P is, and Z_b = X_bᵀ P̂; or all of C."""
    view = memoryview(payload)
    if not part.rank:
        sent = encode(difference(view, look(part.copy), codec.fine), codec.form)
        return sent, Found(decode(sent, codec.form, (part.rows, part.columns)))
    size = encoded_bytes(codec.form, part.columns * part.rank)
    q = decode(view[:size], codec.form, (part.rank, part.columns)).T
    p = difference(view[size:], look(lambda x: part.times(x, q)).T.contiguous(), codec.probe)  # rank × rows
    left, mixed = torch.linalg.qr(p.T)
    sent = b"".join((encode(left.T, codec.form), encode(seen(p, view[size:], codec.probe), Format.BF16)))
    found = _found(part, codec, memoryview(sent))
    expected = OUTSIDE * even(spread_of(mixed, part.columns))
    z = look(lambda x: part.transposed_times(x, found.left)).T
    return b"".join((sent, first_half(z, expected, codec.fine))), found


def answer(part: Part, codec: Codec, look: Look, payload: Buffer) -> tuple[Buffer, Change]:
    """Leg 3, caller: encode W (nothing of a whole tensor); also return C as the callee will hold it."""
    if not part.rank:
        return b"", Change(part, decode(payload, codec.form, (part.rows, part.columns)), None)
    view = memoryview(payload)
    found = _found(part, codec, view)
    own = look(lambda x: part.transposed_times(x, found.left)).T  # rank × columns
    rest = view[encoded_bytes(codec.form, part.rows * part.rank) + encoded_bytes(Format.BF16, part.rank) :]
    z = -difference(rest, own, codec.fine)
    if codec.form is not Format.FP32:
        z = _projected(found.left, z)
    sent = encode(z, codec.form)
    return sent, settle(part, codec, found, sent)


def settle(part: Part, codec: Codec, found: Found, payload: Buffer) -> Change:
    """After leg 3, callee: return C from what it sent in leg 2 and the W that it received."""
    if not part.rank:
        return Change(part, found.left, None)
    return Change(part, found.left, decode(payload, codec.form, (part.rank, part.columns)).T, found.spread)


def _projected(left: Tensor, z: Tensor) -> Tensor:
    """Return Wᵀ (rank × columns), of which P̂ Wᵀ comes closest to the difference, from Z (rank × columns)."""
    gram = left.T @ left + RIDGE * torch.eye(left.shape[1])
    solution: Tensor = torch.linalg.solve_ex(gram, z)[0]
    return solution


def _found(part: Part, codec: Codec, view: memoryview) -> Found:
    """Decode what leg 2 begins with."""
    size, more = encoded_bytes(codec.form, part.rows * part.rank), encoded_bytes(Format.BF16, part.rank)
    left = decode(view[:size], codec.form, (part.rank, part.rows)).T
    return Found(left, decode(view[size : size + more], Format.BF16, (part.rank,)).abs())


def _whole_bytes(codec: Codec, rows: int, columns: int) -> tuple[int, int, int]:
    count = rows * columns
    return steps_bytes(codec.fine, rows) + half_bytes(codec.fine, count), encoded_bytes(codec.form, count), 0
