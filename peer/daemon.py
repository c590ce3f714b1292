"""A peer's life, readable top to bottom.

Config ─► Identity ─► Network ─► State ─► [ stay ─► pause ─► catch up ] …      until the run is over

A stay in the swarm is `peer.stay`: training in a thread, meetings beside it. Between two stays the peer is a guest who
has to wait (`peer.guest`): paused, outside its hours, out of its quota, or because its GPU is in use.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from peer import __version__, checkpoint, gpu
from peer.account import Account
from peer.aside import aside, compute_with_one_core
from peer.catchup import Newcomer
from peer.config import Config
from peer.core.decision import ALLOWED
from peer.core.frame import Frame
from peer.core.members import Member, behind, rejoining
from peer.data.stream import choose_shard
from peer.endings import Endings, told
from peer.errors import PeerError, Unreachable
from peer.events import EventLog, Pause, Resume, Start, Stop
from peer.guest import Guest
from peer.home import Home
from peer.loading import Loaded, load
from peer.manifest import Manifest
from peer.net.base import Network, Stream
from peer.net.throttle import Throttle
from peer.planner import Planner
from peer.quota import Quota
from peer.roster import Roster
from peer.stay import Say as Say
from peer.stay import Stay
from peer.trainer import COASTED
from peer.wire.peer_pb2 import Abort, Message

FIRST_MESSAGE_S = 15.0
TEND_S = 1.0
FLUSH_S = 10.0

T = TypeVar("T")


class Daemon:
    """One peer of one run. `live` is its whole life; `stop` ends it early and politely."""

    def __init__(
        self,
        config: Config,
        run: Manifest,
        home: Home,
        peer_id: str,
        network: Network,
        events: EventLog,
        say: Say,
        throttle: Throttle | None = None,
    ) -> None:
        self._config, self._run, self._home = config, run, home
        self._peer_id, self._network, self._events, self._say = peer_id, network, events, say
        self._throttle = throttle or Throttle()
        self._quota = Quota(home.traffic, say)
        self._guest = Guest(config, home, self._quota)
        self._why_not = ALLOWED
        self._roster = Roster(network, Member(run.run_id, peer_id, (), 0, 0, 0.0))
        self._account = Account(events)
        self._endings = Endings()
        self._stay: Stay | None = None
        self._fetching: asyncio.Future[Any] | None = None
        self._stopping = asyncio.Event()
        self._last_round = run.rounds

    def stop(self) -> None:
        """Ask the peer to leave; call it on the event loop."""
        self._stopping.set()
        if self._stay is not None:
            self._stay.leave()

    async def live(self) -> Stop:
        """Join the run, train until it is over or `stop` is called, and leave nothing behind."""
        end = Stop(0, "error", "ended by a fault; the log above says which")
        compute_with_one_core(asyncio.get_running_loop())
        tending = asyncio.create_task(self._tend())
        tending.add_done_callback(lambda _: self.stop())  # a guest who no longer watches must not stay
        try:
            end = await self._life()
        except PeerError as error:
            end = Stop(0, "error", str(error))
            raise
        finally:
            tending.cancel()
            await asyncio.wait({tending})
            await self._network.close()
            self._events.write(end)
        if not tending.cancelled():
            tending.result()
        return end

    async def _life(self) -> Stop:
        too_early = Stop(0, "signal", "asked to stop before training began")
        if not await self._may_go_on(0):
            return too_early
        loaded = await self._unless_stopped(self._begin())
        if loaded is None:
            return too_early
        planner = Planner(self._run.exchange, loaded.shapes, loaded.trainer, self._config.share, _least(self._config))
        while True:
            stay = await self._take_part(loaded, planner)
            round = loaded.trainer.round
            if round >= self._last_round or self._stopping.is_set():
                reason = "finished" if round >= self._last_round else "signal"
                return Stop(round, reason, f"at round {round} of {self._run.rounds}")
            if not await self._pause(loaded, stay):
                return Stop(round, "signal", f"asked to stop while it waited, at round {round} of {self._run.rounds}")

    async def _begin(self) -> Loaded:
        loaded = await aside("loading", lambda: load(self._config, self._run, self._home, self._say))
        self._guest = Guest(self._config, self._home, self._quota, gpu.watch(str(loaded.trainer.device)))
        await self._network.start(self._serve)
        self._greet()
        how = await self._find_state(loaded)
        self._events.write(self._start(loaded, how))
        return loaded

    async def _take_part(self, loaded: Loaded, planner: Planner) -> Stay:
        """Train and meet until the run is over, we are asked to stop, or have to wait."""
        stay = self._stay = Stay(
            self._run,
            self._home,
            self._peer_id,
            self._network,
            self._roster,
            planner,
            self._account,
            self._events,
            self._say,
            loaded,
            self._last_round,
            self._endings,
        )
        try:
            if self._stopping.is_set() or not self._why_not:
                stay.leave()
            await stay.last()
        finally:
            self._stay = None
        return stay

    # ------------------------------------------------------------------ as a guest

    async def _tend(self) -> None:
        """Count what was sent and received, and leave for a while when we have to."""
        counted, flushed_s = 0, time.monotonic()
        try:
            while True:
                await asyncio.sleep(TEND_S)
                now, total = datetime.now().astimezone(), self._throttle.sent_bytes + self._throttle.received_bytes
                self._quota.add(total - counted, now.date())
                counted = total
                if time.monotonic() - flushed_s >= FLUSH_S:
                    flushed_s = time.monotonic()
                    await asyncio.to_thread(self._quota.flush)
                self._why_not = self._guest.why_not(now)
                if not self._why_not and self._stay is not None:
                    self._stay.leave()
                if not self._why_not and self._fetching is not None:
                    self._fetching.cancel()
        finally:
            self._quota.flush()

    async def _pause(self, loaded: Loaded, stay: Stay) -> bool:
        """Wait until we may take part again, and catch up; False if we are asked to stop meanwhile."""
        began_s, trainer = time.monotonic(), loaded.trainer
        if not await self._may_go_on(trainer.round):
            return False
        # a step that was abandoned may still have been computing
        if await self._unless_stopped(asyncio.wait({stay.training})) is None:
            return False
        if await self._unless_stopped(self._return(loaded)) is None:
            return False
        self._events.write(Resume(trainer.round, time.monotonic() - began_s))
        return True

    async def _return(self, loaded: Loaded) -> bool:
        members = await self._roster.refresh()
        if behind(members, loaded.trainer.round, self._run.exchange.max_lag):
            await self._catch_up(loaded, members, loaded.trainer.state.origin)
        return True

    async def _may_go_on(self, round: int) -> bool:
        """Wait until we may take part; False if we are asked to stop before."""
        told = ALLOWED
        while not self._stopping.is_set():
            self._why_not = self._guest.why_not(datetime.now().astimezone())
            if self._why_not:
                if not told:
                    self._say("going on")
                return True
            if self._why_not.detail != told.detail:
                told = self._why_not
                self._events.write(Pause(round, told.reason, told.detail))
                self._say(f"waiting, without training: {told.detail}")
            with suppress(TimeoutError):
                async with asyncio.timeout(TEND_S):
                    await self._stopping.wait()
        return False

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Await some work; None if we are asked to stop before it is done."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            return task.result()
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
            if await self._catch_up(loaded, members, origin):
                how = "caught-up"
            elif not members and resumed is None:
                how = "fresh-alone"
        if resumed is None:
            taken = {member.shard for member in members}
            trainer.claim(choose_shard(self._peer_id, self._run.data.shards, taken))
        if self._config.rounds:
            self._last_round = min(self._run.rounds, trainer.round + self._config.rounds)
        return how

    async def _catch_up(self, loaded: Loaded, members: list[Member], origin: str | None) -> bool:
        """Go on from another peer's State; False if nobody gave one, or we are asked to stop. A pause breaks it off."""
        newcomer = Newcomer(self._network, self._run, loaded.shapes, self._peer_id, self._events, self._say)
        trainer = loaded.trainer
        while True:
            fetching = self._fetching = asyncio.ensure_future(newcomer.fetch(members, trainer.round, origin))
            try:
                await asyncio.wait({fetching})
            finally:
                self._fetching = None
                fetching.cancel()
            if not fetching.cancelled():
                break
            if not await self._may_go_on(trainer.round):
                return False
            members = await self._roster.refresh()
        found = fetching.result()
        if found is None:
            return False
        state, donor = found
        newest = await self._roster.refresh()
        round = rejoining(newest, donor, state.round, trainer.round, COASTED)
        await aside("catching up", lambda: trainer.catch_up(state, round))
        return True

    # ------------------------------------------------------------------ words

    async def _serve(self, stream: Stream) -> None:
        """Answer a stream that another peer opened, by its first message."""
        with suppress(Unreachable):
            message = await stream.receive(FIRST_MESSAGE_S)
            if message is None:
                return
            stay = self._stay
            if stay is None and isinstance(message, Message) and message.HasField("inquiry"):
                await stream.send(told(self._endings.of(message.inquiry.meeting_id)), FIRST_MESSAGE_S)
            elif stay is None:
                await stream.send(self._absent(), FIRST_MESSAGE_S)
            elif isinstance(message, Frame):
                await stream.send(_refusal("malformed", "a stream begins with an offer or a request"), FIRST_MESSAGE_S)
            elif message.HasField("offer"):
                await stay.meetings.invited(stream, message.offer)
            elif message.HasField("inquiry"):
                await stay.meetings.inquired(stream, message.inquiry)
            elif message.HasField("state_request"):
                await stay.donor.serve(stream, message.state_request)
            else:
                await stream.send(_refusal("malformed", "a stream begins with an offer or a request"), FIRST_MESSAGE_S)

    def _absent(self) -> Message:
        """Return why nobody can be served now."""
        if not self._why_not:
            return _refusal(self._why_not.reason, "this peer has left the swarm for a while; ask someone else")
        return _refusal("starting", "this peer is not ready yet; ask someone else")

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


def _refusal(reason: str, detail: str) -> Message:
    return Message(abort=Abort(reason=reason, detail=detail))


def _least(config: Config) -> float | None:
    """Return the bits a second that the user allows either way; None without a limit."""
    return min((limit for limit in (config.max_upload, config.max_download) if limit is not None), default=None)
