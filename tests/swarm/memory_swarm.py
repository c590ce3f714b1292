"""A swarm of real daemons in one process, on the in-memory network, with a model of a few thousand parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer import tail
from peer.config import Config
from peer.daemon import Daemon
from peer.events import EventLog, Stop
from peer.home import Home
from peer.manifest import Manifest
from peer.net.memory import Hub, MemoryNetwork
from peer.stay import Stay

DEADLINE_S = 90.0


def tiny_run(**changes: Any) -> Manifest:
    """Return a run that takes seconds: one layer, 16 wide, three inner steps a round."""
    run = Manifest.preset("gpt-nano")
    run = replace(run, config=run.config | {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32})
    run = replace(run, rounds=6, local_steps=4, data=replace(run.data, sequence_length=32, batch=4))
    # its rounds are far shorter than the time for which a record is believed
    run = replace(run, exchange=replace(run.exchange, max_lag=1000))
    return replace(run, **changes)


class Swarm:
    """Daemons on one hub; each peer has a folder of its own."""

    def __init__(self, folder: Path, run: Manifest) -> None:
        self.folder, self.run, self.hub = folder, run, Hub()
        self.daemons: dict[str, Daemon] = {}
        self.lives: dict[str, asyncio.Task[Stop]] = {}
        self.words: list[str] = []

    def join(self, name: str, run: Manifest | None = None, **settings: Any) -> asyncio.Task[Stop]:
        """Start a daemon; the task returns how it ended."""
        home = Home(self.folder / name)
        home.create()
        config = Config(home=home.path, device="cpu", **settings)
        network = MemoryNetwork(self.hub, name)
        daemon = Daemon(config, run or self.run, home, name, network, EventLog(home.events), self.words.append)
        self.daemons[name] = daemon
        self.lives[name] = asyncio.create_task(daemon.live())
        return self.lives[name]

    def stay(self, name: str) -> Stay:
        """Return a daemon's present stay."""
        stay = self.daemons[name]._stay
        assert stay is not None
        return stay

    def events(self, name: str, kind: str | None = None) -> list[tail.Record]:
        """Return what a peer has logged so far, of one kind or all."""
        found = list(tail.read(self.folder / name / "events.jsonl"))
        return [event for event in found if kind in (None, event["event"])]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for life in self.lives.values():
                    if life.done() and not life.cancelled() and life.exception():
                        await life
                await asyncio.sleep(0.02)

    async def stop(self) -> dict[str, Stop]:
        """Ask everybody to leave, and wait for it."""
        for daemon in self.daemons.values():
            daemon.stop()
        return await self.end()

    async def end(self) -> dict[str, Stop]:
        """Wait for everybody who is not ended."""
        async with asyncio.timeout(DEADLINE_S):
            return {name: await life for name, life in self.lives.items() if not life.cancelled()}
