#!/usr/bin/env python3
"""Measure how long peers take to a held-out loss, on even lines and with one line that is much slower.

Four peers on an emulated internet: peerloom, and DiLoCo over hivemind's averager. How to read the table: README.md in
this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a file

import torch

from benchmarks.course import Course, began_s, check, course
from benchmarks.fleet import Fleet, Kind
from benchmarks.report import machine
from benchmarks.shelf import Shelf, weights
from benchmarks.table import table
from benchmarks.worker import Failed
from peer.core.state import Tensors
from peer.data import corpus
from peer.data.stream import heldout_batches
from peer.errors import ConfigError
from peer.heldout import mean_loss
from peer.manifest import Manifest
from peer.models import causal, tokenizer
from tests.wan import Line

MODEL = "gpt-nano"
PEERS = 4
EVEN_MBIT, SLOW_MBIT, QUICK_SLOW_MBIT = 20.0, 1.0, 4.0
LATENCY_MS = 15.0
SEED = 0

LOSS, ROUNDS = 2.55, 6
QUICK_LOSS, QUICK_ROUNDS = 2.9, 3
LR = 7e-4
"""A third of the preset's, so that some rounds go by before learning becomes slow."""

WINDOWS = 64
"""Of held-out text, for each loss; all that is held out has some 1000."""

NAMES: dict[Kind, str] = {"peerloom": "peerloom", "diloco": "DiLoCo, hivemind"}
LINES = ("even", "one slow")

Curve = list[tuple[float, float]]
"""Seconds since training began, and a value then, in this order."""


@dataclass(frozen=True)
class Row:
    """One kind of peers on one set of lines.

    mbit: of the last peer's line. reached_s: wall time to the loss. rounds_done: outer steps at that moment, the mean
    of all peers. losses: the mean of all peers, at each of their checkpoints. slow: what the last peer did; all: what
    all did. others: the share of the processor that other programs had meanwhile.
    """

    kind: Kind
    lines: str
    mbit: float
    reached_s: float
    rounds_done: float
    losses: Curve
    slow: Course
    all: Course
    others: float


class Judge:
    """Evaluates weights on the same held-out windows."""

    def __init__(self, run: Manifest) -> None:
        heldout = corpus.load(run.data.corpus, tokenizer.load(run.tokenizer), None).heldout
        self._windows = list(heldout_batches(heldout, run.data.sequence_length, run.data.batch, WINDOWS))
        self._model = causal.build(run.config, run.seed)
        self.start = mean_loss(self._model, self._windows, torch.device("cpu"))

    @torch.no_grad()
    def loss(self, weights: Tensors) -> float:
        """Return the mean loss, nats a token."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])
        return mean_loss(self._model, self._windows, torch.device("cpu"))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loss", type=float, help=f"held-out loss to reach (default: {LOSS}, quick: {QUICK_LOSS})")
    parser.add_argument("--rounds", type=int, help=f"train so many (default: {ROUNDS}, quick: {QUICK_ROUNDS})")
    parser.add_argument("--slow-mbit", type=float, help=f"(default: {SLOW_MBIT:g}, quick: {QUICK_SLOW_MBIT:g})")
    parser.add_argument("--local-steps", type=int, help="a round (default: the preset's)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, to a higher loss; about three minutes")
    parser.add_argument("--keep", type=Path, help="leave homes, checkpoints and logs in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    target = options.loss or (QUICK_LOSS if options.quick else LOSS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    slow_mbit = options.slow_mbit or (QUICK_SLOW_MBIT if options.quick else SLOW_MBIT)
    try:
        run = run_of(rounds, options.local_steps)
        if options.keep is not None:
            rows = measure(target, run, slow_mbit, options.keep)
        else:
            with tempfile.TemporaryDirectory(prefix="peer-loss-") as folder:
                rows = measure(target, run, slow_mbit, Path(folder))
    except (ConfigError, Failed) as error:
        sys.exit(f"benchmarks/time_to_loss.py: {error}")
    print(json.dumps(plain(rows, target), indent=2) if options.json else text(rows, target))


def measure(target: float, run: Manifest, slow_mbit: float, folder: Path) -> list[Row]:
    """Return all rows, for each kind even lines first; raises `Failed` where the loss was not reached."""
    torch.set_num_threads(1)
    judge = Judge(run)
    say(f"held-out loss before training: {judge.start:.3f}")
    return [
        row(kind, lines, run, target, judge, folder / f"{kind}-{lines.replace(' ', '-')}", mbit)
        for kind in NAMES
        for lines, mbit in zip(LINES, (EVEN_MBIT, slow_mbit), strict=True)
    ]


def row(kind: Kind, lines: str, run: Manifest, target: float, judge: Judge, place: Path, mbit: float) -> Row:
    """Train in a new folder, then evaluate what was kept; mbit: of the last peer's line."""
    rates = [*[EVEN_MBIT] * (PEERS - 1), mbit]
    each = [Line(up_mbit=rate, down_mbit=rate, latency_ms=LATENCY_MS) for rate in rates]
    say(f"{NAMES[kind]}, lines {lines}: {run.rounds} rounds")
    with Fleet(kind, run, place, each, latency_ms=LATENCY_MS) as fleet:
        shelf = Shelf(place / "kept", fleet.places)
        fleet.watch(run.rounds, within_s=120 + 60 * run.rounds, look=shelf.look)
    check(fleet.places)
    every, slow = course(kind, fleet.places, 1), course(kind, fleet.places[-1:], 1)
    began = [began_s(each) for each in fleet.places]
    curves = [
        [(0.0, judge.start), *((one.time_s - since, judge.loss(weights(one, run.run_id))) for one in kept)]
        for since, kept in zip(began, shelf.kept, strict=True)
    ]
    losses = averaged(curves)
    reached_s = crossing(losses, target)
    if reached_s is None:
        raise Failed(f"{NAMES[kind]} came to {losses[-1][1]:.3f} and not to {target:g}; give a --loss above that")
    done = mean(
        at([(0.0, 0.0), *((one.time_s - since, float(one.round)) for one in kept)], reached_s)
        for since, kept in zip(began, shelf.kept, strict=True)
    )
    say(f"  {target:g} after {reached_s:.1f} s, {done:.1f} rounds; {losses[-1][1]:.3f} in the end")
    say(f"  other programs had {fleet.others:.0%} of the processor")
    return Row(kind, lines, mbit, reached_s, done, losses, slow, every, fleet.others)


def run_of(rounds: int, local_steps: int | None) -> Manifest:
    """Return what all peers train: the preset with codec auto, and a learning rate that is low and stays."""
    run = Manifest.preset(MODEL)
    return replace(
        run,
        seed=SEED,
        rounds=rounds,
        local_steps=local_steps or run.local_steps,
        inner=replace(run.inner, lr=LR),
        schedule=replace(run.schedule, kind="constant"),
        exchange=replace(run.exchange, codec="auto"),
    ).check()


# ------------------------------------------------------------------ losses over time


def averaged(curves: Sequence[Curve]) -> Curve:
    """Return the mean of several, at the times of all; between two times a curve is a straight line."""
    times = sorted({time_s for each in curves for time_s, _ in each})
    last_s = min(each[-1][0] for each in curves)
    return [(time_s, mean(at(each, time_s) for each in curves)) for time_s in times if time_s <= last_s]


def at(points: Curve, time_s: float) -> float:
    """Return the value at a time, on a straight line between the points around it, flat before and after all."""
    before = [point for point in points if point[0] <= time_s]
    after = [point for point in points if point[0] > time_s]
    if not before or not after:
        return (after or before[-1:])[0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (time_s - x0) / (x1 - x0)


def crossing(points: Curve, target: float) -> float | None:
    """Return when the values first come down to the target; None if they never do."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= target:
            return x0 if y0 <= target else x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


# ------------------------------------------------------------------ what is printed

HEAD = ("what", "lines", "seconds", "× even", "rounds", "s a round", "steps/s", "waited %", "slow up MB", "down MB")


def text(rows: Sequence[Row], target: float) -> str:
    """Return the table, and what has to be known to read it."""
    lines: list[tuple[str, ...]] = []
    for each in rows:
        if lines and each.lines == LINES[0]:
            lines.append(())
        lines.append(_cells(each, rows))
    here = machine()
    return "\n".join(
        [
            f"Time of {PEERS} peers of {MODEL} to a held-out loss of {target:g}; lines of {EVEN_MBIT:g} Mbit/s, "
            f"one slow: of {rows[-1].mbit:g}",
            f"{here['cores']} cores, torch {here['torch']}, one torch thread a process",
            "",
            table(HEAD, lines, 2),
            "",
            f"Other programs had up to {max(each.others for each in rows):.0%} of the processor.",
        ]
    )


def plain(rows: Sequence[Row], target: float) -> dict[str, Any]:
    """Return everything as plain values, ratios too."""
    return {
        "model": MODEL,
        "peers": PEERS,
        "seed": SEED,
        "loss": target,
        "even_mbit": EVEN_MBIT,
        "machine": machine(),
        "rows": [asdict(each) | {"times_even": each.reached_s / _even(each, rows).reached_s} for each in rows],
    }


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    return (
        NAMES[row.kind],
        row.lines,
        f"{row.reached_s:.1f}",
        f"{row.reached_s / _even(row, rows).reached_s:.2f}",
        f"{row.rounds_done:.1f}",
        f"{row.all.seconds / row.all.rounds:.1f}",
        f"{row.all.steps_per_s:.2f}",
        f"{100 * row.all.waited:.2f}",
        f"{row.slow.sent_bytes / row.slow.rounds / 1e6:.2f}",
        f"{row.slow.received_bytes / row.slow.rounds / 1e6:.2f}",
    )


def _even(row: Row, rows: Sequence[Row]) -> Row:
    return next(each for each in rows if each.kind == row.kind and each.lines == LINES[0])


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
