"""What all virtual peers share: the run, the population, the links, the clock, and how many bytes each has sent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from peer.core.schedule import factor
from peer.data.corpus import Tokens
from peer.donor import layout
from peer.lab.churn import Change, Presence
from peer.lab.experiment import Experiment
from peer.lab.links import Links
from peer.lab.population import Population

PARAMETER_BYTES = 4


class World:
    """The state of a simulation.

    now_s: simulated seconds since the start. sent: bytes that each peer has sent so far. draw: all chance but that of
    data and first weights.
    """

    def __init__(
        self, experiment: Experiment, tokens: Tokens, links: Links, changes: Sequence[Change], device: torch.device
    ) -> None:
        self.experiment, self.links = experiment, links
        self.presence = Presence(changes, experiment.peers)
        self.population = Population(experiment.run, tokens, experiment.peers, device, experiment.non_iid)
        self.draw = random.Random(experiment.run.seed)
        self.now_s = 0.0
        self.sent = [0.0] * experiment.peers
        self.model_bytes = PARAMETER_BYTES * sum(
            weight.numel() for weight in self.population.states[0].weights.values()
        )

    @property
    def present(self) -> list[int]:
        """Who takes part now."""
        return sorted(self.presence.at(self.now_s))

    @property
    def round_s(self) -> float:
        """How long a round takes: its inner steps, at a peer of middling speed."""
        steps_s = sorted(link.step_s for link in self.links.peers)
        return self.experiment.local_steps * steps_s[len(steps_s) // 2]

    def lr(self, progress: float) -> float:
        """Return the inner learning rate; progress in rounds, with a fraction."""
        run = self.experiment.run
        return run.inner.lr * factor(run.schedule, run.rounds, progress)

    def welcome(self, newcomer: int, donors: Sequence[int]) -> float:
        """Give a newcomer a random donor's State; return how many seconds the download takes. Without donors none."""
        if not donors:
            return 0.0
        donor = self.draw.choice(list(donors))
        self.population.copy(donor, newcomer)
        shapes = {name: tuple(weight.shape) for name, weight in self.population.states[donor].weights.items()}
        size = PARAMETER_BYTES * sum(map(math.prod, layout(self.experiment.run, shapes).values()))
        self.sent[donor] += size
        return self.links.transfer_s(donor, newcomer, size)

    def in_pairs(self, peers: Sequence[int]) -> list[tuple[int, ...]]:
        """Pair peers at random; one that is left over is alone."""
        order = self.draw.sample(list(peers), len(peers))
        pairs: list[tuple[int, ...]] = [pair for at, pair in enumerate(pairwise(order)) if at % 2 == 0]
        return [*pairs, (order[-1],)] if len(order) % 2 else pairs
