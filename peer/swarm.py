"""A whole swarm on one machine: a bootstrap node and several daemons, each a process of its own, and what they achieve.

Nothing of it is simulated: these are the commands that volunteers type, and all that is known of the daemons is what
their event logs and checkpoints say.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from peer import checkpoint
from peer.core.state import Tensors
from peer.crew import GRACE_S, Child, Crew, Interrupts, cores
from peer.data import corpus
from peer.data.stream import Sequences
from peer.errors import ConfigError, PeerError, Unreachable
from peer.heldout import assess
from peer.home import Home
from peer.manifest import Manifest
from peer.models import tokenizer
from peer.swarm_report import Report, Row
from peer.tail import Tail
from peer.trainer import choose_device

MOST_PEERS = 256
LOOPBACK = "127.0.0.1"
BOOTSTRAP_S = 60.0
TICK_S = 0.2
STARTING_PER_CORE = 4
"""Daemons that may come up at once. Fewer would let the first ones finish a short run before the last ones begin; more
would keep their DHT nodes waiting for a core until they time out."""

_ADDRESS = re.compile(r"--bootstrap (/\S+)")

Watch = Callable[[Sequence[Row]], None]
"""Shown all rows, again and again, while the swarm trains."""


def plan(
    model: str,
    peers: int,
    rounds: int | None = None,
    data: str | None = None,
    codec: str | None = None,
    seed: int | None = None,
    inner: str | None = None,
    file: Path | None = None,
) -> Manifest:
    """Return the run of a manifest's file, or a model's preset, with what was given instead, for so many peers.

    Raises `ConfigError`. model: may be empty beside a file. data: a path, made absolute, so that it means the same to
    every daemon. There are at least as many shards as peers.
    """
    if not 1 <= peers <= MOST_PEERS:
        raise ConfigError(f"peers is {peers}; give a number from 1 to {MOST_PEERS}")
    run = Manifest.choose(file, model, inner)
    length = rounds or run.rounds
    share = length / run.rounds  # a shorter run has a shorter warm-up and decay
    timing = {key: share * getattr(run.schedule, key) for key in ("warmup_rounds", "decay_rounds")}
    source = data or run.data.corpus
    source = source if source == corpus.BUILT_IN else os.path.abspath(os.path.expanduser(source))
    return replace(
        run,
        name=f"swarm-{run.name}"[:64],
        rounds=run.rounds if rounds is None else rounds,
        schedule=replace(run.schedule, **timing),
        seed=run.seed if seed is None else seed,
        data=replace(run.data, corpus=source, shards=max(run.data.shards, peers)),
        exchange=replace(run.exchange, codec=run.exchange.codec if codec is None else codec),
    ).check()


def swarm(run: Manifest, peers: int, folder: Path, watch: Watch) -> Report:
    """Train a run with so many peers on this machine and evaluate what comes of it; Ctrl-C ends the training early.

    folder: empty or not there yet; takes the run's manifest, and a home for each process with its log. Raises
    `ConfigError` for what can't work before any process is started, and `Unreachable` when the bootstrap node doesn't
    come up. No process is left behind, also when this one is killed.
    """
    texts = corpus.load(run.data.corpus, tokenizer.load(run.tokenizer), None)
    Sequences(texts.train, run.data.sequence_length, run.data.shards, run.seed)  # raises when there is too little text
    _prepare(folder, run)
    began = time.monotonic()
    places = [Place(number, folder) for number in range(1, peers + 1)]
    threads = max(1, cores() // peers)
    with Interrupts() as interrupts, Crew(folder, threads) as crew:
        bootstrap = crew.start("bootstrap", "bootstrap", "--port", "0", "--announce", LOOPBACK)
        address = _address(bootstrap, interrupts)
        _train(crew, places, address, interrupts, watch)
        failures = [failure for failure in (*map(_failure, places), _end(crew, bootstrap)) if failure]
    torch.set_num_threads(threads)  # more may be in the way of other programs, and then take many times as long
    found = assess(run, texts.heldout, _weights(run, places), choose_device("auto"))
    rows = tuple(place.row for place in places)
    return Report(run.rounds, rows, found, time.monotonic() - began, tuple(failures))


class Place:
    """One peer's place in the swarm: its home, its process once there is one, and its row."""

    def __init__(self, number: int, folder: Path) -> None:
        self.row = Row(number)
        self.home = Home(folder / f"peer-{number}")
        self.child: Child | None = None
        self._folder = folder
        self._tail = Tail(self.home.events)

    def start(self, crew: Crew, address: str) -> None:
        """Start the daemon, as a volunteer would."""
        run_file = str(self._folder / "run.toml")
        where = ("--bootstrap", address, "--announce", LOOPBACK)
        self.child = crew.start(self.home.path.name, "join", "--run", run_file, *where)
        self.row.stage = "starting"

    def look(self, asked: bool) -> None:
        """Take in what happened since the last time; asked: whether the peer was told to end."""
        if self.row.ended:
            return
        if self.child is None:
            self.row.stage = "stopped" if asked else "waiting"
            return
        status = self.child.process.poll()  # first: then the log is complete
        for record in self._tail.new():
            self.row.take(record)
        if status is not None:
            self.row.end(status, asked)
            self._tail.close()


def _prepare(folder: Path, run: Manifest) -> None:
    """Make the folder and write the run's manifest into it; raises `ConfigError`."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"folder '{folder}' is not empty; give --home a new one for this swarm")
    Home(folder).create()
    (folder / "run.toml").write_text(run.to_toml(), encoding="utf-8")


def _address(bootstrap: Child, interrupts: Interrupts) -> str:
    """Return where the bootstrap node is called, once it says so; raises `Unreachable`. Empty when interrupted."""
    deadline = time.monotonic() + BOOTSTRAP_S
    while not interrupts.count:
        ended = bootstrap.process.poll() is not None
        if found := _ADDRESS.search(bootstrap.log.read_text(errors="replace")):
            return found[1]
        if ended or time.monotonic() > deadline:
            raise Unreachable(f"the bootstrap node did not come up{bootstrap.last_words()}")
        time.sleep(TICK_S)
    return ""


def _train(crew: Crew, places: Sequence[Place], address: str, interrupts: Interrupts, watch: Watch) -> None:
    """Start the peers and look on until all have ended; an interrupt asks them to end, a second one kills them."""
    deadline = float("inf")
    while True:
        asked = interrupts.count > 0
        if asked and deadline == float("inf"):
            _signal(places, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
        if interrupts.count > 1 or time.monotonic() > deadline:
            _signal(places, signal.SIGKILL)
        if not asked:
            _start_some(crew, places, address)
        for place in places:
            place.look(asked)
        watch([place.row for place in places])
        if all(place.row.ended for place in places):
            return
        time.sleep(TICK_S)


def _start_some(crew: Crew, places: Sequence[Place], address: str) -> None:
    """Start as many of the waiting peers as may come up at once."""
    starting = sum(place.row.stage == "starting" for place in places)
    waiting = [place for place in places if place.row.stage == "waiting"]
    for place in waiting[: max(0, STARTING_PER_CORE * cores() - starting)]:
        place.start(crew, address)


def _signal(places: Sequence[Place], number: signal.Signals) -> None:
    for place in places:
        if place.child is not None:
            place.child.process.send_signal(number)  # does nothing once the process has ended


def _failure(place: Place) -> str | None:
    """Return a sentence about a peer that failed."""
    if place.row.stage != "failed" or place.child is None:
        return None
    return f"peer {place.row.number} failed at round {place.row.round}: {place.row.why}{place.child.last_words()}"


def _end(crew: Crew, bootstrap: Child) -> str | None:
    """End the bootstrap node; return a sentence if it did not live to the end or did not end well."""
    early = bootstrap.process.poll() is not None
    crew.end([bootstrap])
    status = bootstrap.process.returncode
    if status in (0, -signal.SIGTERM) and not early:
        return None
    how = "ended before the peers did" if early else "did not end well"
    return f"the bootstrap node {how}, with exit status {status}{bootstrap.last_words()}"


def _weights(run: Manifest, places: Sequence[Place]) -> Iterator[Tensors | None]:
    """Yield each peer's weights from its newest checkpoint; None if it left none that can be read."""
    for place in places:
        try:
            loaded = checkpoint.load(place.home.path, run.run_id, ("weights",))
        except PeerError:
            loaded = None
        yield loaded.state.weights if loaded else None
