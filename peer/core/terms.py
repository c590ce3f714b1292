"""What a meeting is held by: each side wishes for what its link affords, and the smaller wish holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.core.codec import Codec, parse

AUTO = "auto"
"""In a manifest: the codec follows the link."""

LADDER = ("none", "int8", "rank-int4")
"""What "auto" chooses from, the richest first."""


EFFORT = {"none": 0.3, "int8": 1.0, "rank-int4": 25.0}
"""What a byte of each is to compute, in relation to one another: benchmarks/exchange.py, CPU s by MB."""


@dataclass(frozen=True)
class Terms:
    """codec: a spec. budget_bytes: of all legs together. weight: w of X_a −= w C, X_b += w C."""

    codec: str
    budget_bytes: int
    weight: float


def ladder(codec: str) -> tuple[str, ...]:
    """Return the codecs that partners of a run may agree on, the richest first; raises `ConfigError`."""
    return LADDER if codec == AUTO else (parse(codec).spec,)


def codecs(codec: str) -> dict[str, Codec]:
    """Return the codecs of a run by their specs, the richest first; raises `ConfigError`."""
    return {spec: parse(spec) for spec in ladder(codec)}


def agree(one: Terms, other: Terms, ladder: Sequence[str]) -> Terms:
    """Return what holds for both: of everything the smaller wish."""
    poorer = max(one.codec, other.codec, key=list(ladder).index)
    return Terms(poorer, min(one.budget_bytes, other.budget_bytes), min(one.weight, other.weight))
