"""The simulator's GASLoC against the daemon's own trainers and meetings, on the in-memory network, by one schedule."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peer.account import Account
from peer.boundary import Boundary
from peer.core.gauge import Line
from peer.core.gossip import Form, Outer
from peer.core.members import Member
from peer.endings import Endings
from peer.events import EventLog
from peer.lab.beside import Beside
from peer.lab.experiment import Experiment
from peer.lab.links import Links
from peer.lab.world import World
from peer.manifest import Manifest
from peer.meetings import Meetings
from peer.net.base import Stream
from peer.net.memory import Hub, MemoryNetwork
from peer.planner import Planner
from peer.roster import Roster
from peer.view import View
from peer.wire.peer_pb2 import Message

from .test_population import CPU, TOKENS, real_peer, tiny_run

DEADLINE_S = 60.0
PEERS, ROUNDS, STEPS = 4, 3, 3
SCHEDULE = [[(0, 1)], [], [(2, 3), (1, 0)], [(3, 1)], [(0, 2), (1, 3)], [], [(2, 0)], [(3, 0)], [(1, 2)]]
"""Callers and callees that meet after each inner step."""


class Daemon:
    """A daemon's parts without its own clock: training and meetings happen when the test says so."""

    def __init__(self, hub: Hub, number: int, run: Manifest, folder: Path) -> None:
        self.name, self.trainer, self.boundary = f"peer-{number}", real_peer(run, number), Boundary()
        self.network = MemoryNetwork(hub, self.name)
        shapes = {name: tuple(weight.shape) for name, weight in self.trainer.state.weights.items()}
        member = Member(run.run_id, self.name, (), 0, 0, 0.0)
        self.meetings = Meetings(
            self.name,
            run,
            "same",
            self.network,
            Roster(self.network, member),
            self.boundary,
            View(run.outer, self.trainer.state, self.trainer.still),
            self.trainer,
            Planner(run.exchange, shapes, self.trainer, 0.5, line=Line(1e12)),
            Account(EventLog(folder / f"{self.name}.jsonl")),
            Endings(),
        )

    async def serve(self, stream: Stream) -> None:
        message = await stream.receive(DEADLINE_S)
        assert isinstance(message, Message)
        await self.meetings.invited(stream, message.offer)

    async def stand_at_the_boundary(self) -> None:
        while True:
            self.boundary.serve(self.trainer.state)
            await asyncio.sleep(0)


async def live(daemons: list[Daemon], run: Manifest) -> list[bytes]:
    """Train all by the schedule, in lockstep; return the meetings' ids."""
    ids = []
    for daemon in daemons:
        await daemon.network.start(daemon.serve)
    standing = [asyncio.create_task(daemon.stand_at_the_boundary()) for daemon in daemons]
    for meetings in SCHEDULE:
        for daemon in daemons:
            assert daemon.trainer.step()
        for caller, callee in meetings:
            other = daemons[callee]
            member = Member(run.run_id, other.name, other.network.addresses, other.trainer.round, 0, 0.0)
            await daemons[caller].meetings.ask(member)
            while other.meetings._talks:
                await asyncio.sleep(0)
            ids.append(next(reversed(other.meetings._endings._applied)))
        for daemon in daemons:
            daemon.boundary.serve(daemon.trainer.state)
            if daemon.trainer.round_is_over:
                daemon.trainer.end_round()
    for task in standing:
        task.cancel()
    for daemon in daemons:
        await daemon.network.close()
    return ids


class Scheduled(Beside):
    """A simulation whose meetings are those of the schedule."""

    def __init__(self, world: World, ids: list[bytes]) -> None:
        super().__init__(world)
        self._schedule, self._ids = iter(SCHEDULE), iter(ids)

    def _meeting_id(self) -> bytes:
        return next(self._ids)

    def _meet_beside(self, who: list[int]) -> None:
        for pair in next(self._schedule):
            self._hold([pair], who)


@pytest.mark.parametrize(
    ("form", "codec"),
    [(Form.OWN, "none"), (Form.OWN, "rank2"), (Form.MIXED, "none"), (Form.PLAIN, "none")],
)
async def test_a_simulated_swarm_is_the_daemons_swarm(form: Form, codec: str, tmp_path: Path) -> None:
    run = tiny_run(outer=Outer(form, gamma=0.5, alpha=0.5))
    run = replace(run, exchange=replace(run.exchange, codec=codec, meetings=2))
    hub = Hub()
    daemons = [Daemon(hub, number, run, tmp_path) for number in range(PEERS)]
    one = Experiment(label="test", algorithm="gasloc", peers=PEERS, run=run, evaluations=1)
    world = World(one, TOKENS, Links.ideal(PEERS), (), CPU)
    async with asyncio.timeout(DEADLINE_S):
        course = Scheduled(world, await live(daemons, run))
    for number in range(ROUNDS):
        course.period(number)
    for daemon, state in zip(daemons, world.population.states, strict=True):
        assert daemon.trainer.round == state.round == ROUNDS
        for name, weight in daemon.trainer.state.weights.items():
            torch.testing.assert_close(state.weights[name], weight.detach(), rtol=0, atol=1e-5)
            torch.testing.assert_close(state.anchor[name], daemon.trainer.state.anchor[name], rtol=0, atol=1e-5)
