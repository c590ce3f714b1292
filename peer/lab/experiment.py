"""One experiment: a run's manifest, an algorithm, and the world in which virtual peers train by them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer.errors import ConfigError
from peer.lab.algorithms import ALGORITHMS, Algorithm
from peer.lab.graphs import Graph
from peer.manifest import Manifest

MOST_PEERS = 1024


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is simulated.

    run: model, data, optimizers, schedule, seed; its local_steps are those of a peer of middling speed.
    graph: who may meet whom. spread: meetings beside training, all through the round; otherwise all after it.
    links: a TOML file (`peer.lab.links`), None: nothing takes time but training. churn: a rate or a file
    (`peer.lab.churn`), None: nobody leaves. evaluations: how many times held-out loss is measured, the end included.
    """

    label: str
    algorithm: str
    peers: int
    run: Manifest
    graph: Graph = "one-peer"
    spread: bool = True
    links: Path | None = None
    churn: str | None = None
    non_iid: bool = False
    evaluations: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.peers <= MOST_PEERS:
            raise ConfigError(f"peers is {self.peers}; give a number from 1 to {MOST_PEERS}")
        if self.run.local_steps is None:
            raise ConfigError("the lab counts a round in inner steps; give local_steps in place of round_seconds")
        if not 1 <= self.evaluations <= self.run.rounds:
            raise ConfigError(
                f"evaluations is {self.evaluations}; give a number from 1 to {self.run.rounds}, the rounds"
            )

    @property
    def method(self) -> Algorithm:
        """The algorithm by its name."""
        return ALGORITHMS[self.algorithm]

    @property
    def meetings(self) -> int:
        """How many meetings a peer aims at in a round."""
        return self.run.exchange.meetings if self.method.meetings is None else self.method.meetings

    @property
    def local_steps(self) -> int:
        """Inner steps a round, of a peer of middling speed."""
        return self.run.local_steps or 1

    def settings(self) -> dict[str, Any]:
        """Return everything that the result depends on, as plain values."""
        values = asdict(self) | {"run": {**asdict(self.run), "outer": {**asdict(self.run.outer)}}}
        values["run"]["outer"]["form"] = self.run.outer.form.value
        values["links"] = None if self.links is None else str(self.links)
        return values
