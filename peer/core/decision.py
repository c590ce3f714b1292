"""A decision that carries its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Yes or no, and why.

    allowed: what was decided; also the truth value.
    reason: one stable word, for counting and for the wire; empty when allowed.
    detail: one sentence for people, which says what to do; empty when allowed.
    """

    allowed: bool
    reason: str = ""
    detail: str = ""

    def __bool__(self) -> bool:
        return self.allowed


ALLOWED = Decision(True)
"""The plain yes, which needs no reason."""
