"""Methods in which everybody waits for everybody (all-reduce) or for a partner, at the end of each round or step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peer.core.noloco import noloco_step
from peer.core.state import Tensors
from peer.lab.algorithms import Mixing
from peer.lab.links import allreduce_bytes
from peer.lab.world import World


class Lockstep:
    """Rounds that begin and end together. A slow peer or link is waited for; a peer that is away is done without.

    Membership changes cost these methods nothing here but a newcomer's download, beside which the others go on: in
    reality an all-reduce that somebody leaves has to be noticed, and repeated.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._mixing = world.experiment.method.mixing
        self._joined = set(world.present)

    def period(self, number: int) -> float | None:
        """Simulate round `number` (from 0); return the mean training loss, None if nobody was there."""
        world = self._world
        present = self._welcome()
        steps = world.experiment.local_steps
        losses = []
        for step in range(steps):
            lrs = [world.lr(number + step / steps)] * len(present)
            averaged = self._mixing is Mixing.GRADIENTS
            losses += world.population.step(present, lrs, averaged)
            world.now_s += max((world.links.peers[peer].step_s for peer in present), default=0.0)
            if averaged:
                self._all_reduce(present)
        if self._mixing is Mixing.NOLOCO:
            self._meet_in_pairs(present)
        else:
            own = (
                [self._drift(peer) for peer in present] if world.experiment.method.own_bases else [None] * len(present)
            )
            if self._mixing is Mixing.DRIFTS:
                self._average_drifts(present)
                self._all_reduce(present)
            for peer, drift in zip(present, own, strict=True):
                world.population.end_round(peer, drift)
        return sum(losses) / len(losses) if losses else None

    def land(self, number: int) -> None:
        """Do nothing: peers that average everything at once have no differences left, and NoLoCo has no such phase."""

    def _welcome(self) -> list[int]:
        world = self._world
        present = world.present
        stayed = [peer for peer in present if peer in self._joined]
        for peer in set(present) - self._joined:
            world.welcome(peer, stayed)
        self._joined = set(present)
        return present

    def _all_reduce(self, present: Sequence[int]) -> None:
        """Let the links carry one model's worth of numbers around the ring."""
        world = self._world
        world.now_s += world.links.allreduce_s(present, world.model_bytes)
        for peer in present:
            world.sent[peer] += allreduce_bytes(len(present), world.model_bytes)

    def _drift(self, peer: int) -> Tensors:
        state = self._world.population.states[peer]
        return {name: weight - state.anchor[name] for name, weight in state.weights.items()}

    @torch.no_grad()
    def _average_drifts(self, present: Sequence[int]) -> None:
        """Replace each peer's drift by the mean over all, as it stands in their weights."""
        states = [self._world.population.states[peer] for peer in present]
        for name in states[0].weights if states else ():
            drift = torch.stack([state.weights[name] - state.anchor[name] for state in states]).mean(0)
            for state in states:
                torch.add(state.anchor[name], drift, out=state.weights[name])

    def _meet_in_pairs(self, present: Sequence[int]) -> None:
        world, outer = self._world, self._world.experiment.run.outer
        longest_s, size = 0.0, 2.0 * world.model_bytes
        for pair in world.in_pairs(present):
            noloco_step([world.population.states[peer] for peer in pair], outer.gamma, outer.eta)
            if len(pair) == 2:
                longest_s = max(longest_s, world.links.exchange_s(pair[0], pair[1], size, size, 1))
                for peer in pair:
                    world.sent[peer] += size
        world.now_s += longest_s
