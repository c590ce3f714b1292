"""Difference ⇄ factors: what two peers send each other to learn C ≈ X_a − X_b, one tensor at a time.

A low-rank codec does one step of power iteration on the difference (PowerGossip: Vogels, Karimireddy, Jaggi 2020), for
a matrix X (m × n, m ≥ n, transposed if need be) and rank r:

    leg 1, a → b:   Q (n × r, coarse) and P_a = X_a Q (m × r, fine)
    leg 2, b → a:   P̂ = orth(P_a − X_b Q) (m × r, coarse) and q_b = X_bᵀ P̂ (n × r, fine)
    leg 3, a → b:   δ = X_aᵀ P̂ − q_b (n × r, coarse)
    both:           C = P̂ δᵀ

A full codec, and the vectors under any codec, need two legs: x_a (fine), then C = x_a − x_b (coarse).

Fine numbers describe a model, coarse ones a difference. Late in training two peers differ by a percent or less, and a
coarse model would drown that. All arithmetic uses the decoded wire values, one's own included, so both sides hold the
same C; only b orthogonalizes, so nothing depends on QR's signs being the same on different hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from peer.core.quantize import CHUNK, Format, decode, encode, encoded_bytes
from peer.core.state import Tensors
from peer.errors import ConfigError

_SPEC = re.compile(r"(?:rank(?P<rank>[1-9][0-9]{0,3})(?:-(?P<coarse>int4|int8|bf16))?|(?P<full>none|bf16|int8|int4))")
SPECS = "none, bf16, int8, int4, or rankR with -bf16, -int8 or -int4, such as rank4-int8"


@dataclass(frozen=True)
class Codec:
    """How differences travel. rank None sends whole tensors.

    fine: format of what describes a model; basis: of Q and P̂; coarse: of what describes a difference.
    """

    spec: str
    rank: int | None
    fine: Format
    basis: Format
    coarse: Format


def parse(spec: str) -> Codec:
    """Return the codec that a spec names; raises `ConfigError` with the valid forms."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ConfigError(f"unknown codec {spec!r}: use {SPECS}")
    rank = int(match["rank"]) if match["rank"] else None
    coarse = match["coarse"] or match["full"] or "none"
    if coarse == "none":
        return Codec(spec, rank, Format.FP32, Format.FP32, Format.FP32)
    # a basis in 4 bits would leave P̂ far from orthonormal
    basis = Format.INT8 if coarse == "int4" else Format(coarse)
    return Codec(spec, rank, Format.INT16, basis, Format(coarse))


@dataclass(frozen=True)
class Part:
    """One tensor's share of an exchange: how it is cut, and how many bytes it takes in each leg.

    The tensor is seen as a matrix of `rows` × `columns`, rows ≥ columns (turned if the tensor is wider than high);
    rank 0 means that it travels whole.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    turned: bool
    rank: int
    leg_bytes: tuple[int, int, int]

    def times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return X thin (rows × rank) for thin (columns × rank), in float32."""
        return _left(x, thin) if self.turned else _right(x, thin)

    def transposed_times(self, x: Tensor, thin: Tensor) -> Tensor:
        """Return Xᵀ thin (columns × rank) for thin (rows × rank), in float32."""
        return _right(x, thin) if self.turned else _left(x, thin)


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(x.shape[0], -1).float()


def _right(x: Tensor, thin: Tensor) -> Tensor:
    return _flat(x) @ thin


def _left(x: Tensor, thin: Tensor) -> Tensor:
    # never a product with a transposed view of the large matrix: for small ranks that is over ten times slower
    return (thin.T @ _flat(x)).T


def parts(shapes: Mapping[str, tuple[int, ...]], codec: Codec) -> list[Part]:
    """Cut a model into parts, in canonical order: that of the mapping."""
    return [_part(name, tuple(shape), codec) for name, shape in shapes.items()]


def _part(name: str, shape: tuple[int, ...], codec: Codec) -> Part:
    count = prod(shape)
    whole = (encoded_bytes(codec.fine, count), encoded_bytes(codec.coarse, count), 0)
    if codec.rank is None or len(shape) < 2 or count == 0:
        return Part(name, shape, count, 1, False, 0, whole)
    high, wide = shape[0], count // shape[0]
    rows, columns = max(high, wide), min(high, wide)
    rank = min(codec.rank, columns)
    left, right = rows * rank, columns * rank
    thin = (
        encoded_bytes(codec.basis, right) + encoded_bytes(codec.fine, left),
        encoded_bytes(codec.basis, left) + encoded_bytes(codec.fine, right),
        encoded_bytes(codec.coarse, right),
    )
    if sum(thin) >= sum(whole):
        return Part(name, shape, count, 1, False, 0, whole)
    return Part(name, shape, rows, columns, wide > high, rank, thin)


@dataclass(frozen=True)
class Change:
    """C of one tensor: `left` (rows × rank) times `right` (columns × rank) transposed; `left` alone if it is whole."""

    part: Part
    left: Tensor
    right: Tensor | None

    def add_(self, x: Tensor, weight: float) -> None:
        """Add weight × C to a tensor in place, on the tensor's own device and in its dtype."""
        if self.right is None:
            x.add_(self.left.to(x.device, x.dtype).view(x.shape), alpha=weight)
            return
        left, right = self.left.to(x.device), self.right.to(x.device)
        if self.part.turned:
            left, right = right, left
        flat = x.view(x.shape[0], -1)
        if x.dtype == torch.float32:
            flat.addmm_(left, right.T, alpha=weight)
        else:
            flat.add_((left @ right.T).mul_(weight).to(x.dtype))

    def squared_norm(self) -> float:
        """Return ‖C‖²; for factors tr((PᵀP)(δᵀδ)), without forming C."""
        if self.right is None:
            # in pieces: one sum of so many squares in float32 is off by a third of a percent
            pieces = torch.split(self.left.reshape(-1), CHUNK)
            return math.fsum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in pieces)
        left, right = self.left.double(), self.right.double()
        return float(((left.T @ left) * (right.T @ right)).sum().clamp(min=0))


@dataclass(frozen=True)
class Correction:
    """C of a whole model. The caller adds −w C, the callee +w C: equal and opposite, so the swarm's mean stays."""

    changes: tuple[Change, ...]

    @torch.no_grad()
    def add_(self, tensors: Tensors, weight: float) -> None:
        """Add weight × C to every tensor in place."""
        for change in self.changes:
            change.add_(tensors[change.part.name], weight)

    def norm(self) -> float:
        """Return the L2 norm of C over all tensors."""
        return math.sqrt(sum(change.squared_norm() for change in self.changes))


Basis = dict[str, Tensor]
"""Parameter name → Q (columns × rank, orthonormal): where the last exchange found the difference."""


def start_basis(parts: list[Part], generator: torch.Generator) -> Basis:
    """Return a random orthonormal Q for every low-rank part, for a peer that has met nobody yet."""
    return {
        part.name: torch.linalg.qr(torch.randn(part.columns, part.rank, generator=generator))[0]
        for part in parts
        if part.rank
    }


def next_basis(correction: Correction, old: Basis) -> Basis:
    """Return Q for the next exchange, with anybody: the directions of δ; the old ones where δ is zero."""
    found = {
        change.part.name: torch.linalg.qr(change.right)[0]
        for change in correction.changes
        if change.right is not None and bool(change.right.any())
    }
    return old | found


def probe(part: Part, codec: Codec, x: Tensor, basis: Basis) -> bytearray:
    """Leg 1, caller: encode Q and P_a = X_a Q, or all of x_a."""
    if not part.rank:
        return encode(x, codec.fine)
    sent = encode(basis[part.name], codec.basis)
    q = decode(sent, codec.basis, (part.columns, part.rank)).to(x.device)
    return sent + encode(part.times(x, q), codec.fine)


def reply(part: Part, codec: Codec, x: Tensor, payload: bytearray) -> tuple[bytearray, Tensor]:
    """Leg 2, callee: encode P̂ and q_b = X_bᵀ P̂, or all of C; also return P̂ (or C) as the caller will decode it."""
    if not part.rank:
        theirs = decode(payload, codec.fine, part.shape).to(x.device)
        sent = encode(theirs - x.detach().float(), codec.coarse)
        return sent, decode(sent, codec.coarse, part.shape)
    split = encoded_bytes(codec.basis, part.columns * part.rank)
    view = memoryview(payload)
    q = decode(view[:split], codec.basis, (part.columns, part.rank)).to(x.device)
    p = decode(view[split:], codec.fine, (part.rows, part.rank)).to(x.device)
    sent = encode(torch.linalg.qr(p - part.times(x, q))[0], codec.basis)
    left = decode(sent, codec.basis, (part.rows, part.rank))
    return sent + encode(part.transposed_times(x, left.to(x.device)), codec.fine), left


def answer(part: Part, codec: Codec, x: Tensor, payload: bytearray) -> tuple[bytearray, Change]:
    """Leg 3, caller: encode δ = X_aᵀ P̂ − q_b (nothing for a whole tensor); also return C as the callee will hold it."""
    if not part.rank:
        return bytearray(), Change(part, decode(payload, codec.coarse, part.shape), None)
    split = encoded_bytes(codec.basis, part.rows * part.rank)
    view = memoryview(payload)
    left = decode(view[:split], codec.basis, (part.rows, part.rank))
    theirs = decode(view[split:], codec.fine, (part.columns, part.rank)).to(x.device)
    sent = encode(part.transposed_times(x, left.to(x.device)) - theirs, codec.coarse)
    return sent, Change(part, left, decode(sent, codec.coarse, (part.columns, part.rank)))


def settle(part: Part, codec: Codec, left: Tensor, payload: bytearray) -> Change:
    """After leg 3, callee: return C from the P̂ (or whole C) that it sent and the δ that it received."""
    if not part.rank:
        return Change(part, left, None)
    return Change(part, left, decode(payload, codec.coarse, (part.columns, part.rank)))
