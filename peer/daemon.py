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
from dataclasses import dataclass
from typing import Any

from torch import nn

from peer import __version__, checkpoint
from peer.account import Account
from peer.boundary import Boundary
from peer.catchup import Donor, catch_up
from peer.config import Config
from peer.core.members import Member, behind, donors
from peer.core.state import State
from peer.data import corpus
from peer.data.stream import Sequences, choose_shard
from peer.errors import Unreachable
from peer.events import CatchUp, Checkpoint, EventLog, Round, Skip, Start, Stop
from peer.home import Home
from peer.manifest import Manifest
from peer.meetings import Meetings
from peer.models import causal, tokenizer
from peer.net.base import Network, Stream
from peer.roster import Roster
from peer.trainer import Tally, Trainer, choose_device
from peer.wire.peer_pb2 import Abort, Message

FIRST_MESSAGE_S = 15.0
MEETING_GRACE_S = 1.5
STEP_GRACE_S = 3.0
FAREWELL_S = 4.0
CHECKPOINT_SHARE = 0.05
"""Saving takes at most this share of the time, so large models on slow disks are not saved every round."""

Say = Callable[[str], None]
"""Tells the user one line."""


@dataclass(frozen=True)
class Loaded:
    """What takes long to load and needs no network."""

    trainer: Trainer
    shapes: dict[str, tuple[int, ...]]
    origin: str
    parameters: int


def load(config: Config, run: Manifest, home: Home, say: Say) -> Loaded:
    """Build the model and read the data; raises `ConfigError`."""
    device = choose_device(config.device)
    words = tokenizer.load(run.tokenizer)
    texts = corpus.load(config.data or run.data.corpus, words, home.cache, say)
    sequences = Sequences(texts.train, run.data.sequence_length, run.data.shards, run.seed)
    model: nn.Module = causal.build(run.config, run.seed)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    origin = causal.origin_hash(weights)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return Loaded(Trainer(run, model, sequences, device), shapes, origin, causal.parameter_count(model))


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
        self._stopping = asyncio.Event()
        self._last_round = run.rounds
        self._saved_at, self._save_s, self._saved = time.monotonic(), 0.0, (-1, -1)

    def stop(self) -> None:
        """Ask the peer to leave; call it on the event loop."""
        self._stopping.set()

    async def live(self) -> Stop:
        """Join the run, train until it is over or `stop` is called, and leave nothing behind."""
        await self._network.start(self._serve)
        try:
            self._greet()
            beginning = asyncio.create_task(self._begin())
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({beginning, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not beginning.done():
                beginning.cancel()
                await asyncio.wait({beginning})
                return self._end(Stop(0, "signal", "asked to stop before training began"))
            return await self._train(*beginning.result())
        finally:
            await self._network.close()

    async def _begin(self) -> tuple[Loaded, str, str]:
        loaded = await asyncio.to_thread(load, self._config, self._run, self._home, self._say)
        return loaded, *await self._find_state(loaded)

    async def _train(self, loaded: Loaded, how: str, origin: str) -> Stop:
        trainer = loaded.trainer
        meetings = self._meetings = Meetings(
            self._peer_id,
            self._run,
            loaded.shapes,
            origin,
            self._network,
            self._roster,
            self._boundary,
            trainer,
            self._account,
        )
        self._events.write(self._start(loaded, how))
        # a thread of its own, so that whatever else runs in threads never waits for training
        training = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, "training"), self._work, trainer)
        beside = [
            asyncio.create_task(self._roster.run(lambda: (trainer.round, trainer.state.cursor.shard))),
            asyncio.create_task(meetings.run()),
            asyncio.create_task(self._keep_up(trainer, loaded.shapes)),
        ]
        stopping = asyncio.create_task(self._stopping.wait())
        events: list[asyncio.Future[Any]] = [stopping, training, *beside]
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            trainer.abandon()
            await meetings.close(MEETING_GRACE_S)
            for task in (stopping, *beside):
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
            await asyncio.wait([training], timeout=STEP_GRACE_S)
            await self._leave(trainer)
        results = [*ended, training.exception() if training.done() else None]
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            self._end(Stop(trainer.round, "error", f"{type(failures[0]).__name__}: {failures[0]}"))
            raise failures[0]
        reason = "finished" if trainer.round >= self._last_round else "signal"
        return self._end(Stop(trainer.round, reason, f"at round {trainer.round} of {self._run.rounds}"))

    def _work(self, trainer: Trainer) -> None:
        """Train: what the training thread does."""
        trainer.begin_round()
        while trainer.round < self._last_round and trainer.step():
            with trainer.still:
                self._boundary.serve(trainer.state)
            if trainer.round_is_over:
                tally = trainer.end_round()
                self._events.write(self._round(trainer, tally))
                self._save_if_due(trainer.state)

    async def _leave(self, trainer: Trainer) -> None:
        """Apply what is agreed, and save while the record is withdrawn."""
        with trainer.still:  # a step that is still under way finds itself abandoned before it touches the weights
            self._boundary.close(trainer.state)

        async def withdraw() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._roster.withdraw()

        await asyncio.gather(asyncio.to_thread(self._save, trainer.state), withdraw())

    # ------------------------------------------------------------------ State

    async def _find_state(self, loaded: Loaded) -> tuple[str, str]:
        """Resume, catch up, or begin; return which, and the origin of the weights."""
        trainer = loaded.trainer
        resumed = await asyncio.to_thread(checkpoint.load, self._home.path, self._run.run_id)
        members = await self._roster.refresh()
        if resumed is not None:
            for warning in resumed.warnings:
                self._say(warning)
            trainer.adopt(resumed.state)
            self._say(f"resuming at round {trainer.round} from a checkpoint that is {resumed.age_s:.0f} s old")
        how, origin = ("fresh", loaded.origin) if resumed is None else ("resumed", resumed.state.origin)
        late = resumed is None or behind(members, trainer.round, self._run.exchange.max_lag)
        if late and await self._catch_up(trainer, loaded.shapes, members, None if resumed is None else origin):
            how, origin = "caught-up", trainer.state.origin
        elif resumed is None:
            how = "fresh" if members else "fresh-alone"
        trainer.state.origin = origin
        if resumed is None:
            trainer.claim(choose_shard(self._peer_id, self._run.data.shards, [member.shard for member in members]))
        limit = trainer.round + self._config.rounds if self._config.rounds else self._run.rounds
        self._last_round = min(self._run.rounds, limit)
        return how, origin

    async def _catch_up(
        self, trainer: Trainer, shapes: dict[str, tuple[int, ...]], members: list[Member], origin: str | None
    ) -> bool:
        """Take over the State of the most advanced peer that gives it; False if there is none."""

        def refused(donor: Member, why: str) -> None:
            self._events.write(Skip(donor.peer_id, "failed", "catch-up", why))
            self._say(f"could not catch up from {donor.peer_id[:8]}: {why}")

        said = [0.0]

        def progress(donor: Member, done: int, size: int) -> None:
            if time.monotonic() - said[0] > 2.0:
                said[0] = time.monotonic()
                self._say(f"catching up from {donor.peer_id[:8]}: {done / 1e6:.0f} of {size / 1e6:.0f} MB")

        candidates = donors(members, self._peer_id, trainer.round)
        caught = await catch_up(self._network, candidates, self._run, shapes, origin, self._peer_id, progress, refused)
        if caught is None:
            return False
        caught.state.cursor, caught.state.step = trainer.state.cursor, trainer.state.step
        with trainer.still:
            trainer.adopt(caught.state)
        self._events.write(CatchUp(caught.donor, caught.state.round, caught.size_bytes, caught.seconds))
        return True

    async def _keep_up(self, trainer: Trainer, shapes: dict[str, tuple[int, ...]]) -> None:
        """While training goes on: move away from a shard that another peer holds, catch up when too far behind."""
        while True:
            await asyncio.sleep(1.0)
            self._donor.drop_unused()
            members = self._roster.members
            mine = trainer.state.cursor.shard
            if any(member.shard == mine and member.peer_id < self._peer_id for member in members):
                taken = {member.shard for member in members}
                shard = choose_shard(self._peer_id, self._run.data.shards, taken)
                if shard not in taken:
                    trainer.claim(shard)
            if behind(members, trainer.round, self._run.exchange.max_lag):
                await self._catch_up(trainer, shapes, members, trainer.state.origin)

    def _save_if_due(self, state: State) -> None:
        if (time.monotonic() - self._saved_at) * CHECKPOINT_SHARE >= self._save_s:
            self._save(state)

    def _save(self, state: State) -> None:
        if self._saved == (state.round, state.step):
            return
        try:
            saved = checkpoint.save(self._home.path, state, self._run.run_id)
        except OSError as error:
            self._say(f"could not save a checkpoint ({error.strerror}); training goes on, the one before it stands")
            return
        self._saved_at, self._save_s = time.monotonic(), saved.seconds
        self._saved = (state.round, state.step)
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
        command = self._join_command()
        if self._config.bootstraps and self._network.lonely:
            self._say(
                "No bootstrap could be reached, so this peer starts a swarm of its own and keeps trying; "
                f"others join it with:\n  {command}"
            )
        elif not self._config.bootstraps:
            self._say(
                f"No bootstrap was given, so this peer starts a swarm of its own; others join it with:\n  {command}"
            )

    def _join_command(self) -> str:
        what = f"--run {self._config.run}" if self._config.run else f"--model {self._config.model}"
        return f"peer join {what} " + " ".join(f"--bootstrap {address}" for address in self._network.bootstraps[:1])

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
            how=how,
            addresses=self._network.addresses,
            bootstraps=self._network.bootstraps,
            pid=os.getpid(),
            version=__version__,
        )

    def _round(self, trainer: Trainer, tally: Tally) -> Round:
        counts = self._account.counts
        return Round(
            round=trainer.round,
            steps=tally.steps,
            loss=tally.loss,
            lr=tally.lr,
            tokens=tally.tokens,
            seconds=tally.seconds,
            drift=tally.drift,
            peers=len(self._roster.members),
            meetings=counts.meetings,
            declined=counts.declined,
            failed=counts.failed,
            bytes_sent=counts.bytes_sent,
            bytes_received=counts.bytes_received,
            partner=counts.partner,
            stall_s=self._boundary.take_stall_s(),
        )

    def _end(self, stop: Stop) -> Stop:
        self._events.write(stop)
        return stop


def _refusal(reason: str, detail: str) -> Message:
    return Message(abort=Abort(reason=reason, detail=detail))
