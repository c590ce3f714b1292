"""One stay in the swarm: train in a thread, meet and serve others beside it, until it is over or the peer has to leave.

[ inner steps ─► outer step ─► checkpoint ] …      a thread, never waits
[ partner ─► exchange ─► correction ] …            the event loop, beside it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from threading import RLock
from typing import Any

import torch

from peer import checkpoint
from peer.account import Account
from peer.aside import aside
from peer.boundary import Boundary
from peer.catchup import Newcomer
from peer.core.members import behind, rejoining
from peer.core.state import State
from peer.data.stream import choose_shard
from peer.donor import Donor
from peer.endings import Endings
from peer.events import Checkpoint, EventLog, Round
from peer.home import Home
from peer.loading import Loaded
from peer.manifest import Manifest
from peer.meetings import Meetings
from peer.net.base import Network
from peer.planner import Planner
from peer.roster import Roster
from peer.trainer import COASTED, Tally
from peer.view import View

MEETING_GRACE_S = 1.5
STEP_GRACE_S = 1.0
FAREWELL_S = 4.0
LANDING_TICK_S = 0.01
BOUNDARY_S = 600.0
TEND_S = 1.0
LONGEST_REST_S = 60.0
"""After donors that gave nothing somebody is asked again two seconds later, then four, and so on up to this."""

CHECKPOINT_SHARE = 0.05
"""Saving takes at most this share of the time, so large models on slow disks are not saved every round."""

Say = Callable[[str], None]
"""Tells the user one line."""


class Stay:
    """From joining the swarm to leaving it, once; trainer, roster and what was learned of the link outlive it."""

    def __init__(
        self,
        run: Manifest,
        home: Home,
        peer_id: str,
        network: Network,
        roster: Roster,
        planner: Planner,
        account: Account,
        events: EventLog,
        say: Say,
        loaded: Loaded,
        last_round: int,
        endings: Endings,
    ) -> None:
        self._run, self._home, self._peer_id = run, home, peer_id
        self._roster, self._planner, self._account = roster, planner, account
        self._events, self._say = events, say
        self._trainer, self._last_round = loaded.trainer, last_round
        self._boundary = Boundary()
        self._newcomer = Newcomer(network, run, loaded.shapes, peer_id, events, say)
        self._leaving = asyncio.Event()
        self._saved_at_s, self._save_s = time.monotonic(), 0.0
        self._saving = RLock()
        self.donor = Donor(run, self._boundary)
        self.meetings = Meetings(
            peer_id,
            run,
            self._trainer.state.origin,
            network,
            roster,
            self._boundary,
            View(run.outer, self._trainer.state, self._trainer.still),
            self._trainer,
            planner,
            account,
            endings,
        )

    def leave(self) -> None:
        """Ask it to end early and politely; call it on the event loop."""
        self._leaving.set()

    async def last(self) -> None:
        """Train and meet until one of them ends or we are to leave, then save and withdraw; raises what went wrong."""
        trainer = self._trainer
        trainer.begin()
        training = aside("training", self._work)
        beside: list[asyncio.Future[Any]] = [
            asyncio.create_task(self._roster.run(lambda: (trainer.round, trainer.state.cursor.shard))),
            asyncio.create_task(self.meetings.run()),
            asyncio.create_task(self._keep_up()),
            asyncio.create_task(self._leaving.wait()),
        ]
        try:
            await asyncio.wait([training, *beside], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._part()
            for task in beside:
                task.cancel()
            await asyncio.wait([training, *beside], timeout=STEP_GRACE_S)
            await self._save_and_withdraw()
        for task in (training, *beside):
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it, if that was a fault
        self.training = training

    # ------------------------------------------------------------------ the training thread

    def _work(self) -> None:
        trainer = self._trainer
        while trainer.round < self._last_round and not self._leaving.is_set() and trainer.step():
            with trainer.still.changing():
                self._boundary.serve(trainer.state)
            if trainer.round_is_over:
                tally = trainer.end_round()
                self._events.write(self._round(tally))
                if (time.monotonic() - self._saved_at_s) * CHECKPOINT_SHARE >= self._save_s:
                    self._save()
        if trainer.round >= self._run.rounds and self._run.exchange.meetings and self._roster.members:
            self._land()

    def _land(self) -> None:
        """Go on meeting without training, for as long as a round took: most of what peers still differ in goes."""
        trainer = self._trainer
        self._say("all rounds are done; meeting a last few times")
        trainer.land()
        while trainer.fraction < 1.0 and not self._leaving.is_set():
            with trainer.still.changing():
                self._boundary.serve(trainer.state)
            time.sleep(LANDING_TICK_S)

    def _round(self, tally: Tally) -> Round:
        stall_s = self.meetings.take_stall_s() + self._trainer.still.take_waited_s()
        self._planner.stalled(stall_s, self._account.take_held())
        return Round(
            round=self._trainer.round,
            **asdict(tally),
            peers=len(self._roster.members),
            **asdict(self._account.counts),
            stall_s=stall_s,
        )

    def _save(self) -> None:
        try:
            with self._saving:
                saved = checkpoint.save(self._home.path, self._trainer.state, self._run.run_id)
        except OSError as error:
            self._say(f"could not save a checkpoint ({error.strerror}); training goes on, the one before it stands")
            return
        self._saved_at_s, self._save_s = time.monotonic(), saved.seconds
        self._events.write(Checkpoint(self._trainer.round, str(saved.path), saved.size_bytes, saved.seconds))

    # ------------------------------------------------------------------ beside it

    async def _keep_up(self) -> None:
        """Leave a shard that another peer holds too, catch up when too far behind."""
        trainer, rest_s, next_s = self._trainer, TEND_S, 0.0
        while True:
            await asyncio.sleep(TEND_S)
            self.donor.drop_unused()
            members = self._roster.members
            mine, taken = trainer.state.cursor.shard, {member.shard for member in members}
            if any(member.shard == mine and member.peer_id < self._peer_id for member in members):
                shard = choose_shard(self._peer_id, self._run.data.shards, taken)
                if shard not in taken:
                    trainer.claim(shard)
            if time.monotonic() >= next_s and behind(members, trainer.round, self._run.exchange.max_lag):
                found = await self._newcomer.fetch(members, trainer.round, trainer.state.origin)
                rest_s = TEND_S if found is not None else min(2 * rest_s, LONGEST_REST_S)
                next_s = time.monotonic() + rest_s
                if found is not None:
                    await self._adopt(*found)

    async def _adopt(self, state: State, donor: str) -> None:
        """Go on from a donor's State, if training beside the download has not come as far meanwhile."""
        trainer, newest = self._trainer, await self._roster.refresh()
        if not behind(newest, trainer.round, self._run.exchange.max_lag):
            return
        self.meetings.abandon()  # what they find is about weights that are soon gone

        def adopt(_: State) -> None:
            trainer.catch_up(state, rejoining(newest, donor, state.round, trainer.round, COASTED))

        await self._boundary.visit(adopt, BOUNDARY_S)

    # ------------------------------------------------------------------ leaving

    async def _part(self) -> None:
        """Abandon the step that is under way, and finish or abandon the meetings.

        A step can last longer than anybody wants to wait, so from here on the boundary is served on the event loop.
        """
        trainer = self._trainer
        self._leaving.set()
        trainer.abandon()
        self.donor.close()
        closing = asyncio.create_task(self.meetings.close(MEETING_GRACE_S))
        while not closing.done():
            if self._saving.acquire(blocking=False):  # what is being saved stays as it is
                try:
                    with trainer.still.changing():
                        self._boundary.serve(trainer.state)
                finally:
                    self._saving.release()
            await asyncio.wait({closing}, timeout=0.05)

    def _finish(self) -> None:
        """Add the last corrections and save, once training has let go of the weights."""
        with self._saving, self._trainer.still.changing():
            self._boundary.close(self._trainer.state)
            self._save()

    async def _save_and_withdraw(self) -> None:
        async def withdraw() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._roster.withdraw()

        await asyncio.gather(asyncio.to_thread(self._finish), withdraw())
        if self._trainer.device.type == "cuda":
            torch.cuda.empty_cache()
