"""One experiment from its first weights to its outcome."""

from __future__ import annotations

from collections.abc import Callable

import torch

from peer.data.corpus import Corpus
from peer.data.stream import heldout_batches
from peer.heldout import Survey
from peer.lab import churn
from peer.lab.algorithms import Mixing
from peer.lab.beside import Beside
from peer.lab.experiment import Experiment
from peer.lab.links import Links
from peer.lab.lockstep import Lockstep
from peer.lab.results import Outcome, Point
from peer.lab.world import World
from peer.lordo import state_bytes

HELDOUT_TOKENS = 32768
"""Read for a held-out loss, in windows spread over all that is held out."""

Watch = Callable[[int, float | None], None]
"""Told after every round how many are done, and their mean training loss."""


class Simulation:
    """An experiment under way. `advance` goes on by one round, `point` measures, `outcome` concludes at any time."""

    def __init__(self, experiment: Experiment, corpus: Corpus, device: torch.device) -> None:
        run = experiment.run
        self.experiment, self.round = experiment, 0
        links = Links.load(experiment.links, experiment.peers) if experiment.links else Links.ideal(experiment.peers)
        self._world = World(experiment, corpus.train, links, (), device)
        if experiment.churn is not None:
            changes = churn.parse(experiment.churn, experiment.peers, self._world.round_s, run.rounds, run.seed)
            self._world = World(experiment, corpus.train, links, changes, device)
        meets = experiment.method.mixing is Mixing.MEETINGS
        self._course = Beside(self._world) if meets else Lockstep(self._world)
        self._train_loss: float | None = None
        self._optimizer_bytes = 0
        self._heldout = list(
            heldout_batches(
                corpus.heldout, run.data.sequence_length, run.data.batch, HELDOUT_TOKENS // run.data.sequence_length
            )
        )

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.experiment.run.rounds

    def advance(self) -> float | None:
        """Simulate one round, and after the last one the landing; return its mean training loss."""
        self._train_loss = self._course.period(self.round)
        self.round += 1
        if self.over:
            self._course.land(self.round)
        return self._train_loss

    def due(self) -> bool:
        """Whether this is a round after which the experiment wants to be measured."""
        done, rounds, times = self.round, self.experiment.run.rounds, self.experiment.evaluations
        return done * times // rounds > (done - 1) * times // rounds

    def point(self) -> Point:
        """Measure where the swarm stands: the held-out loss of each peer that is there, and of their average."""
        world, model = self._world, self._world.population.model
        survey = Survey(model, self._heldout, world.population.device)
        losses = tuple(survey.add(world.population.states[peer].weights) for peer in world.present)
        average = survey.average()
        model.train()
        return Point(
            round=self.round,
            seconds=world.now_s,
            bytes=sum(world.sent) / len(world.sent),
            train_loss=self._train_loss,
            heldout_average=average,
            heldout_peers=losses,
            disagreement=survey.spread.disagreement or 0.0,
        )

    def outcome(self, last: Point) -> Outcome:
        """Sum up, given the last point."""
        return Outcome(
            algorithm=self.experiment.algorithm,
            peers=self.experiment.peers,
            rounds=last.round,
            heldout_average=last.heldout_average,
            heldout_peers=last.heldout_peers,
            disagreement=last.disagreement,
            bytes_per_round=last.bytes / max(1, last.round),
            seconds_simulated=last.seconds,
            optimizer_bytes=max(map(state_bytes, self._world.population.optimizers)),
        )
