"""The daemon as a process: one home, one lock, signals, and a log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from peer.config import Config
from peer.daemon import Daemon, Say
from peer.errors import ConfigError, PeerError
from peer.events import EventLog, Stop
from peer.home import Home
from peer.identity import Identity
from peer.manifest import Manifest
from peer.models import presets
from peer.net.internet import Internet
from peer.net.throttle import Throttle
from peer.tail import Record

MODEL_FILE = "model.json"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(config: Config, say: Say, echo: Callable[[Record], None]) -> Stop:
    """Live one peer's life; raises `PeerError` with what to do.

    say hears lines for the user, echo every event.
    """
    home = Home(config.home)
    home.create()
    run = Manifest.choose(config.run, config.model, config.inner)
    identity = Identity.load(home.path)
    with home.lock(run.run_id, identity.peer_id):
        _settle_in(home, run)
        events = EventLog(home.events, echo)
        throttle = Throttle(config.max_upload, config.max_download)
        network = Internet(identity, home.path, config.bootstraps, config.port, config.announce, throttle=throttle)
        daemon = Daemon(config, run, home, identity.peer_id, network, events, say, throttle)
        try:
            stop = asyncio.run(_live(daemon, say))
        except PeerError as error:
            events.write(Stop(0, "error", str(error)))
            raise
        finally:
            events.close()
    return stop


def depart() -> None:
    """End the process with status 0 if a step that was abandoned is still computing; Python would wait for it."""
    if any(thread.name.startswith(("training", "loading")) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _live(daemon: Daemon, say: Say) -> Stop:
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def ask() -> None:
        if asked:
            os._exit(130)  # p2pd notices and ends too; the last checkpoint stands
        asked.append(1)
        say("leaving the swarm: finishing the step, saving, withdrawing; once more to force")
        daemon.stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, ask)
    try:
        return await daemon.live()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _settle_in(home: Home, run: Manifest) -> None:
    """Keep the run's manifest in the home; raises `ConfigError` if the home belongs to another run."""
    if not home.manifest.exists():
        if run.model not in presets.names():
            # the home has to be readable when the file that the model came from is gone
            _write(home.path / MODEL_FILE, json.dumps(run.config, indent=2))
            run = replace(run, model=MODEL_FILE)  # beside the manifest, wherever the home is moved to
        _write(home.manifest, run.to_toml())
        return
    try:
        owner = Manifest.load(home.manifest)
    except ConfigError as error:
        raise ConfigError(f"{error}; move that file away, and it is written again from --model or --run") from error
    if owner.run_id != run.run_id:
        raise ConfigError(
            f"home '{home.path}' belongs to run {owner.run_id} ({owner.name}), this is run {run.run_id} ({run.name}); "
            "give this one a folder of its own with --home"
        )
