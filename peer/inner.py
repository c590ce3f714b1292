"""The inner optimizer as a manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from peer.core.lordo import Feedback, Mu, Projection, Rule
from peer.errors import ConfigError

LORDO = ("rank", "omega", "mu", "projection", "feedback")
"""Keys that count for lordo alone."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    """The section [inner]. lr: at the peak of the schedule. clip: the largest norm of a gradient.

    What follows clip is lordo's alone (see `peer.core.lordo`). rank: of every matrix inside a layer; 0 takes a twelfth
    of its shorter side, at least 1, and no rank is larger than that side. omega: share of the low-rank term; the rest
    is the full-rank term's. mu: what scales that one. projection: what a round's new basis is made from, the drift or a
    seed. feedback: how that which a basis leaves out of the gradients is kept.
    """

    optimizer: Literal["adamw", "lordo"] = "adamw"
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    rank: int = 0
    omega: float = 0.5
    mu: Mu = "unit"
    projection: Projection = "power"
    feedback: Feedback = "none"

    @property
    def rule(self) -> Rule:
        """What the low-rank optimizer goes by."""
        return Rule(**{field.name: getattr(self, field.name) for field in fields(Rule)})

    @property
    def unused(self) -> dict[str, Any]:
        """The keys that this optimizer does not go by, with their defaults."""
        return {f.name: f.default for f in fields(self) if f.name in LORDO and self.optimizer != "lordo"}

    def check(self) -> None:
        """Raise `ConfigError` for a key that has no effect: whoever set it expects one."""
        for key, default in self.unused.items():
            if getattr(self, key) != default:
                raise ConfigError(f'inner.{key} is for lordo; set optimizer = "lordo" under [inner], or remove {key}')
