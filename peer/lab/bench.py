"""A bench for simulations: one in this process, or those of a grid side by side, each in a process of its own."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from peer.core import stability
from peer.crew import Child, Crew, Interrupts
from peer.data import corpus, texts
from peer.data.corpus import Corpus
from peer.errors import ConfigError
from peer.lab import churn
from peer.lab.experiment import Experiment
from peer.lab.grid import Cell
from peer.lab.links import Links
from peer.lab.results import FILE, Point, Recorder, Result, read
from peer.lab.settings import experiment as experiment_of
from peer.lab.simulation import Simulation, Watch
from peer.lab.world import PARAMETER_BYTES
from peer.models import causal, tokenizer

TICK_S = 0.2
PLAN = "plan.json"
LOG = "log.txt"
TOKENS = "tokens"
RUNS = "runs"
MOST_DIFFERENCES = 3
"""Named to the user, where settings are others than before."""

_ROUND = re.compile(rb"^round (\d+) of ", re.MULTILINE)
_LAST_BYTES = 256

Say = Callable[[str], None]


# ---------------------------------------------------------------- one simulation


def examine(experiment: Experiment) -> int:
    """Return the bytes of the model in float32; raises `ConfigError` for what can be found wrong in a moment."""
    run = experiment.run
    if run.data.corpus != corpus.BUILT_IN:
        texts.find(run.data.corpus)
    if experiment.links is not None:
        Links.load(experiment.links, experiment.peers)
    if experiment.churn is not None:
        churn.parse(experiment.churn, experiment.peers, 1.0, 1, 0)
    return _model_bytes(json.dumps(run.config), run.tokenizer, run.data.sequence_length)


@functools.cache  # a grid asks again and again
def _model_bytes(config: str, words: str, sequence_length: int) -> int:
    causal.check_fit(json.loads(config), tokenizer.load(words).vocabulary_size, sequence_length)
    return PARAMETER_BYTES * causal.parameter_count(causal.outline(json.loads(config)))


def warning(experiment: Experiment) -> str | None:
    """Return a sentence about an outer optimizer that no daemon would run with."""
    decision = stability.check(experiment.run.outer)
    return None if decision else f"no daemon would take these outer constants: {decision.detail}"


def load(experiment: Experiment, cache: Path | None, say: Say) -> Corpus:
    """Read the data; cache: a folder that keeps tokens. Raises `ConfigError`."""
    return corpus.load(experiment.run.data.corpus, tokenizer.load(experiment.run.tokenizer), cache, say)


class Sources:
    """What the files say that experiments name, as hashes; each is read once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], str] = {}

    def recorded(self, experiment: Experiment, device: torch.device) -> dict[str, Any]:
        """Return all that the result depends on, as a file of results begins; plain values as JSON gives them back.

        Files are known by what they say, wherever they lie.
        """
        contents = {"corpus": self._hash("corpus", experiment.run.data.corpus)}
        if experiment.links is not None:
            contents["links"] = self._hash("file", str(experiment.links))
        if experiment.churn is not None and os.path.exists(experiment.churn):
            contents["churn"] = self._hash("file", experiment.churn)
        values = experiment.settings() | {"device": device.type, "contents": contents}
        for place, key in ((values, "links"), (values, "churn"), (values["run"]["data"], "corpus")):
            if key in contents and place[key] != corpus.BUILT_IN:
                place[key] = Path(place[key]).name
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    def _hash(self, kind: str, source: str) -> str:
        if (kind, source) not in self._found:
            if kind == "file":
                digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
            else:
                digest = source if source == corpus.BUILT_IN else texts.fingerprint(texts.find(source), lambda _: None)
            self._found[kind, source] = digest
        return self._found[kind, source]


def simulate(simulation: Simulation, recorder: Recorder, asked: Callable[[], bool], watch: Watch) -> Result:
    """Simulate to the end, recording points and outcome; once it is asked to end before, it does so after the round."""
    points: list[Point] = []

    def measure() -> None:
        points.append(simulation.point())
        recorder.point(points[-1])

    measure()
    while not (simulation.over or asked()):
        loss = simulation.advance()
        watch(simulation.round, loss)
        if simulation.due():
            measure()
    if points[-1].round < simulation.round:
        measure()
    outcome = simulation.outcome(points[-1])
    recorder.outcome(outcome)
    return Result(tuple(points), outcome)


# ---------------------------------------------------------------- many, side by side


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Make a grid's folder and hold it for this process; raises `ConfigError` if it is another's, or not a grid's."""
    try:
        if out.is_dir() and any(out.iterdir()) and not (out / RUNS).is_dir():
            raise ConfigError(f"folder '{out}' holds other things; give --out a new one, or that of the same grid")
        (out / RUNS).mkdir(parents=True, exist_ok=True)
        lock = os.open(out / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write in '{out}': {error.strerror}; give another folder with --out") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is filling '{out}'; wait for it, or give another folder") from error
        yield
    finally:
        os.close(lock)


def kept(cell: Cell, out: Path, recorded: dict[str, Any]) -> Result | None:
    """Return what a folder has of a simulation that came to its end; raises `ConfigError` if it was another one."""
    folder = cell.folder(out)
    if not (folder / FILE).exists() or b"\n" not in (folder / FILE).read_bytes():
        return None  # not begun, or killed while it wrote the first line
    try:
        before, points, outcome = read(folder / FILE)
    except ConfigError as error:
        raise ConfigError(f"run '{cell.label}', seed {cell.seed}: {error}, or delete '{folder}'") from error
    if outcome is None:
        return None
    if before != recorded:
        raise ConfigError(
            f"run '{cell.label}', seed {cell.seed}, has results of other settings in '{folder}' "
            f"({_some(_differences(before, recorded))}); give another folder with --out, or delete that one"
        )
    return Result(tuple(points), outcome) if outcome.rounds >= cell.experiment.run.rounds else None


def _some(differences: Sequence[str]) -> str:
    more = len(differences) - MOST_DIFFERENCES
    return "; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        each = [_differences(before.get(key), now.get(key), f"{path}.{key}" if path else key) for key in keys]
        return [difference for differences in each for difference in differences]
    return [] if before == now else [f"{path} was {json.dumps(before)}, is {json.dumps(now)}"]


class Place:
    """One simulation's place on the bench: its process once there is one, and the rounds that it has done."""

    def __init__(self, cell: Cell, out: Path) -> None:
        self.cell = cell
        self.round = 0
        self.failure: str | None = None
        self.ended = False
        self._out = out
        self._child: Child | None = None

    def start(self, crew: Crew, device: torch.device) -> None:
        """Start the process; what an earlier one left half done is done again."""
        folder = self.cell.folder(self._out)
        plan = {"label": self.cell.label, "seed": self.cell.seed, "device": str(device)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).unlink(missing_ok=True)
            text = json.dumps(
                plan | {"tokens": str((self._out / TOKENS).absolute()), "settings": self.cell.settings}, indent=2
            )
            (folder / PLAN).write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write in '{folder}': {error.strerror}") from error
        self._child = crew.launch(folder / LOG, "simulate", "part", str(folder))

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal, if there is one."""
        if self._child is not None:
            self._child.process.send_signal(number)

    def look(self, asked: bool) -> None:
        """Take in what happened; asked: whether it was told to end."""
        if self._child is None or self.ended:
            return
        status = self._child.process.poll()  # first: then the log is complete
        with self._child.log.open("rb") as file:
            file.seek(max(0, self._child.log.stat().st_size - _LAST_BYTES))
            if rounds := _ROUND.findall(file.read()):
                self.round = int(rounds[-1])
        self.ended = status is not None
        if status and not asked:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            words = self._child.last_words()
            self.failure = f"run '{self.cell.label}', seed {self.cell.seed}, {how}{words}"


def fill(
    places: Sequence[Place],
    out: Path,
    jobs: int,
    device: torch.device,
    interrupts: Interrupts,
    watch: Callable[[], None],
) -> None:
    """Simulate all, some at a time; an interrupt asks those under way to end after their round, a second kills them."""
    waiting, running = deque(places), list[Place]()
    with Crew(out, 1) as crew:
        while running or (waiting and not interrupts.count):
            asked = interrupts.count > 0
            if asked:
                # Again and again: one that is only starting may have been deaf to it.
                _signal(running, signal.SIGKILL if interrupts.count > 1 else signal.SIGINT)
            while waiting and len(running) < jobs and not asked:
                running.append(waiting.popleft())
                running[-1].start(crew, device)
            for place in running:
                place.look(asked)
            running = [place for place in running if not place.ended]
            watch()
            time.sleep(TICK_S)


def fetch(experiments: Iterable[Experiment], out: Path, say: Say) -> None:
    """Read all data once and keep the tokens, so that the processes need not each do it at the same time."""
    for experiment in {(each.run.data.corpus, each.run.tokenizer): each for each in experiments}.values():
        load(experiment, out / TOKENS, say)


def _signal(places: Sequence[Place], number: signal.Signals) -> None:
    for place in places:
        place.signal(number)


def part(folder: Path, asked: Callable[[], bool], say: Say) -> None:
    """Do one place's simulation in this process, as its plan says."""
    plan = json.loads((folder / PLAN).read_text())
    experiment = experiment_of(plan["label"], plan["seed"], plan["settings"])
    device = torch.device(plan["device"])
    simulation = Simulation(experiment, load(experiment, Path(plan["tokens"]), say), device)
    rounds = experiment.run.rounds

    def watch(done: int, loss: float | None) -> None:
        say(f"round {done} of {rounds}" + ("" if loss is None else f": training loss {loss:.4f}"))

    with Recorder(folder / FILE, Sources().recorded(experiment, device)) as recorder:
        simulate(simulation, recorder, asked, watch)
