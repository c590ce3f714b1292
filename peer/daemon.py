"""A peer's life, readable top to bottom.

Config ─► Identity ─► Network ─► State ─► [ inner steps ─► outer step ─► checkpoint ] …      a thread, never waits
                                  ▲ └────► [ partner ─► exchange ─► correction ] …           the event loop, beside it
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from peer import __version__, checkpoint
from peer.account import Account
from peer.boundary import Boundary
from peer.catchup import Newcomer
from peer.config import Config
from peer.core.frame import Frame
from peer.core.members import Member, behind
from peer.core.state import State
from peer.data.stream import choose_shard
from peer.donor import Donor
from peer.errors import PeerError, Unreachable
from peer.events import Checkpoint, EventLog, Round, Start, Stop
from peer.home import Home
from peer.loading import Loaded, load
from peer.manifest import Manifest
from peer.meetings import Meetings
from peer.net.base import Network, Stream
from peer.planner import Planner
from peer.roster import Roster
from peer.trainer import Tally, Trainer
from peer.view import View
from peer.wire.peer_pb2 import Abort, Message

FIRST_MESSAGE_S = 15.0
MEETING_GRACE_S = 1.5
STEP_GRACE_S = 1.0
FAREWELL_S = 4.0
LANDING_TICK_S = 0.01
BOUNDARY_S = 600.0
CHECKPOINT_SHARE = 0.05
"""Saving takes at most this share of the time, so large models on slow disks are not saved every round."""

T = TypeVar("T")

Say = Callable[[str], None]
"""Tells the user one line."""


class Daemon:
    """One peer of one run. `live` is its whole life; `stop` ends it early and politely."""

    def __init__(
        self, config: Config, run: Manifest, home: Home, peer_id: str, network: Network, events: EventLog, say: Say
    ) -> None:
        self._config, self._run, self._home = config, run, home
        self._peer_id, self._network, self._events, self._say = peer_id, network, events, say
        self._boundary = Boundary()
        self._roster = Roster(network, Member(run.run_id, peer_id, (), 0, 0, 0.0))
        self._donor = Donor(run, self._boundary)
        self._account = Account(events)
        self._meetings: Meetings | None = None
        self._planner: Planner | None = None
        self._stopping = asyncio.Event()
        self._last_round = run.rounds
        self._saved_at_s, self._save_s = time.monotonic(), 0.0

    def stop(self) -> None:
        """Ask the peer to leave; call it on the event loop."""
        self._stopping.set()

    async def live(self) -> Stop:
        """Join the run, train until it is over or `stop` is called, and leave nothing behind."""
        end = Stop(0, "error", "ended by a fault; the log above says which")
        try:
            loaded = await self._unless_stopped(self._begin())
            end = await self._train(loaded) if loaded else Stop(0, "signal", "asked to stop before training began")
        except PeerError as error:
            end = Stop(0, "error", str(error))
            raise
        finally:
            await self._network.close()
            self._events.write(end)
        return end

    async def _begin(self) -> Loaded:
        loaded = await _aside("loading", lambda: load(self._config, self._run, self._home, self._say))
        await self._network.start(self._serve)
        self._greet()
        how = await self._find_state(loaded)
        self._events.write(self._start(loaded, how))
        return loaded

    async def _train(self, loaded: Loaded) -> Stop:
        """Train in a thread of its own, meet beside it, until one of them ends or we are asked to stop."""
        trainer = loaded.trainer
        planner = self._planner = Planner(self._run.exchange, loaded.shapes, trainer, self._config.share)
        meetings = self._meetings = Meetings(
            self._peer_id,
            self._run,
            loaded.shapes,
            trainer.state.origin,
            self._network,
            self._roster,
            self._boundary,
            View(self._run.outer, trainer.state, trainer.still),
            trainer,
            planner,
            self._account,
        )
        training = _aside("training", lambda: self._work(trainer))
        beside: list[asyncio.Future[Any]] = [
            asyncio.create_task(self._roster.run(lambda: (trainer.round, trainer.state.cursor.shard))),
            asyncio.create_task(meetings.run()),
            asyncio.create_task(self._keep_up(trainer, self._newcomer(loaded))),
            asyncio.create_task(self._stopping.wait()),
        ]
        try:
            await asyncio.wait([training, *beside], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._leave(trainer, meetings)
            for task in beside:
                task.cancel()
            await asyncio.wait([training, *beside], timeout=STEP_GRACE_S)
            await self._save_and_withdraw(trainer.state)
        for task in (training, *beside):
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it, if that was a fault
        reason = "finished" if trainer.round >= self._last_round else "signal"
        return Stop(trainer.round, reason, f"at round {trainer.round} of {self._run.rounds}")

    def _work(self, trainer: Trainer) -> None:
        """Train: what the training thread does."""
        trainer.begin_round()
        while trainer.round < self._last_round and trainer.step():
            with trainer.still.changing():
                self._boundary.serve(trainer.state)
            if trainer.round_is_over:
                tally = trainer.end_round()
                self._events.write(self._round(trainer, tally))
                if (time.monotonic() - self._saved_at_s) * CHECKPOINT_SHARE >= self._save_s:
                    self._save(trainer.state)
        if trainer.round >= self._run.rounds and self._run.exchange.meetings and self._roster.members:
            self._land(trainer)

    def _land(self, trainer: Trainer) -> None:
        """Go on meeting without training, for as long as a round took: most of what peers still differ in goes."""
        self._say("all rounds are done; meeting a last few times")
        trainer.land()
        while trainer.fraction < 1.0 and not self._stopping.is_set():
            with trainer.still.changing():
                self._boundary.serve(trainer.state)
            time.sleep(LANDING_TICK_S)

    async def _leave(self, trainer: Trainer, meetings: Meetings) -> None:
        """Abandon the step that is under way, and finish or abandon the meeting.

        A step can last longer than anybody wants to wait, so from here on the boundary is served on the event loop.
        """
        trainer.abandon()
        closing = asyncio.create_task(meetings.close(MEETING_GRACE_S))
        while not closing.done():
            with trainer.still.changing():
                self._boundary.serve(trainer.state)
            await asyncio.wait({closing}, timeout=0.05)

    async def _save_and_withdraw(self, state: State) -> None:
        self._boundary.close(state)

        async def withdraw() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._roster.withdraw()

        await asyncio.gather(asyncio.to_thread(self._save, state), withdraw())

    async def _unless_stopped(self, beginning: Any) -> Loaded | None:
        """Await the beginning of training; None if we are asked to stop before."""
        task = asyncio.ensure_future(beginning)
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            loaded: Loaded = task.result()
            return loaded
        task.cancel()
        await asyncio.wait({task})
        return None

    # ------------------------------------------------------------------ State

    async def _find_state(self, loaded: Loaded) -> str:
        """Resume, catch up, or begin with the run's first weights; return which."""
        trainer = loaded.trainer
        trainer.state.origin, how = loaded.origin, "fresh"
        resumed = await asyncio.to_thread(checkpoint.load, self._home.path, self._run.run_id)
        if resumed is not None:
            for warning in resumed.warnings:
                self._say(warning)
            trainer.adopt(resumed.state)
            how = "resumed"
            self._say(f"resuming at round {trainer.round} from a checkpoint that is {resumed.age_s:.0f} s old")
        members = await self._roster.refresh()
        if resumed is None or behind(members, trainer.round, self._run.exchange.max_lag):
            origin = None if resumed is None else trainer.state.origin
            if await self._catch_up(trainer, self._newcomer(loaded), members, origin):
                how = "caught-up"
            elif not members and resumed is None:
                how = "fresh-alone"
        if resumed is None:
            taken = {member.shard for member in members}
            trainer.claim(choose_shard(self._peer_id, self._run.data.shards, taken))
        if self._config.rounds:
            self._last_round = min(self._run.rounds, trainer.round + self._config.rounds)
        return how

    def _newcomer(self, loaded: Loaded) -> Newcomer:
        return Newcomer(self._network, self._run, loaded.shapes, self._peer_id, self._events, self._say)

    async def _catch_up(self, trainer: Trainer, newcomer: Newcomer, members: list[Member], origin: str | None) -> bool:
        state = await newcomer.fetch(members, trainer.round, origin)
        if state is None:
            return False

        def adopt(mine: State) -> None:
            state.cursor, state.step = mine.cursor, mine.step
            trainer.adopt(state)

        if self._meetings is None:
            adopt(trainer.state)
        else:
            await self._boundary.visit(adopt, BOUNDARY_S)
        return True

    async def _keep_up(self, trainer: Trainer, newcomer: Newcomer) -> None:
        """While training goes on: leave a shard that another peer holds too, catch up when too far behind."""
        while True:
            await asyncio.sleep(1.0)
            self._donor.drop_unused()
            members = self._roster.members
            mine, taken = trainer.state.cursor.shard, {member.shard for member in members}
            if any(member.shard == mine and member.peer_id < self._peer_id for member in members):
                shard = choose_shard(self._peer_id, self._run.data.shards, taken)
                if shard not in taken:
                    trainer.claim(shard)
            if behind(members, trainer.round, self._run.exchange.max_lag):
                await self._catch_up(trainer, newcomer, members, trainer.state.origin)

    def _save(self, state: State) -> None:
        try:
            saved = checkpoint.save(self._home.path, state, self._run.run_id)
        except OSError as error:
            self._say(f"could not save a checkpoint ({error.strerror}); training goes on, the one before it stands")
            return
        self._saved_at_s, self._save_s = time.monotonic(), saved.seconds
        self._events.write(Checkpoint(state.round, str(saved.path), saved.size_bytes, saved.seconds))

    # ------------------------------------------------------------------ words

    async def _serve(self, stream: Stream) -> None:
        """Answer a stream that another peer opened, by its first message."""
        with suppress(Unreachable):
            message = await stream.receive(FIRST_MESSAGE_S)
            if message is None:
                return
            if self._meetings is None:
                await stream.send(_refusal("starting", "this peer is not ready yet; ask someone else"), FIRST_MESSAGE_S)
            elif isinstance(message, Frame):
                await stream.send(_refusal("malformed", "a stream begins with an offer or a request"), FIRST_MESSAGE_S)
            elif message.HasField("offer"):
                await self._meetings.invited(stream, message.offer)
            elif message.HasField("inquiry"):
                await self._meetings.inquired(stream, message.inquiry)
            elif message.HasField("state_request"):
                await self._donor.serve(stream, message.state_request)
            else:
                await stream.send(_refusal("malformed", "a stream begins with an offer or a request"), FIRST_MESSAGE_S)

    def _greet(self) -> None:
        """Say how others find this peer."""
        if self._config.bootstraps and not self._network.lonely:
            return
        what = self._run.flags or f"--run {self._config.run or self._home.manifest}"
        where = " ".join(f"--bootstrap {address}" for address in self._network.bootstraps[:1])
        why = (
            "No bootstrap could be reached (it is tried again and again)"
            if self._config.bootstraps
            else "No bootstrap was given"
        )
        self._say(f"{why}, so this peer starts a swarm of its own; others join it with:\n  peer join {what} {where}")

    def _start(self, loaded: Loaded, how: str) -> Start:
        trainer = loaded.trainer
        return Start(
            peer_id=self._peer_id,
            run_id=self._run.run_id,
            name=self._run.name,
            model=self._run.model,
            parameters=loaded.parameters,
            device=str(trainer.device),
            dtype=str(trainer.dtype).removeprefix("torch."),
            round=trainer.round,
            rounds=self._run.rounds,
            how=how,
            addresses=self._network.addresses,
            bootstraps=self._network.bootstraps,
            pid=os.getpid(),
            version=__version__,
        )

    def _round(self, trainer: Trainer, tally: Tally) -> Round:
        stall_s = self._boundary.take_stall_s() + trainer.still.take_waited_s()
        if self._planner is not None:
            self._planner.stalled(stall_s, self._account.take_held())
        return Round(
            round=trainer.round,
            **asdict(tally),
            peers=len(self._roster.members),
            **asdict(self._account.counts),
            stall_s=stall_s,
        )


def _aside(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a thread of its own, which nobody waits for when the loop ends."""
    executor = ThreadPoolExecutor(1, name)
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    executor.shutdown(wait=False)
    return future


def _refusal(reason: str, detail: str) -> Message:
    return Message(abort=Abort(reason=reason, detail=detail))
