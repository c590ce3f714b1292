"""peer simulate compare: a grid of simulations, one table. Its subprocesses are `peer simulate part`."""

from __future__ import annotations

import json as json_format
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.errors import ConfigError

from .help import Command, examples, option
from .main import INTERRUPTED
from .words import counted

if TYPE_CHECKING:
    import torch

    from peer.lab.bench import Place
    from peer.lab.grid import Grid
    from peer.lab.report import Row
    from peer.lab.results import Result

    Results = dict[tuple[str, int], Result]

WIDTH = 160
"""Columns, where no terminal says how many it has."""

NARROWEST = 116
"""Columns that the table takes at least; a terminal with fewer breaks its lines."""

FORMAT = """\b
The file:
  seeds = [0, 1, 2]              # each run is simulated with every one; left out: [0]
  reference = "DiLoCo"           # compare with this run; left out: the first; a run may name another for itself
  [common]                       # holds for every run, unless it says otherwise itself
  model = "gpt-nano"             # or run = "manifest.toml"; also tokenizer
  peers = 8                      # also rounds, local_steps, evaluations, graph, links, churn, non_iid
  config = { n_layer = 3 }       # laid over the model's
  exchange = { meetings = 4 }    # sections as in a manifest: data, inner, schedule, outer, exchange
  [[run]]
  label = "DiLoCo"
  algorithm = "diloco"
  [[run]]
  label = "after the round"
  spread = false                 # meetings wait until the round is over
  vary = { "exchange.codec" = ["rank4-int4", "none"] }    # a run of each, of all combinations

Relative paths start from the folder of the file.

"""


@click.command(
    name="compare",
    cls=Command,
    short_help="Simulate a grid of experiments; one table of all.",
    epilog=FORMAT
    + examples(
        "peer simulate compare grid.toml",
        'peer simulate compare grid.toml --out grid --jobs 8 --only DiLoCo --only "4 × rank 4" --seed 0',
    ),
)
@click.argument("file", metavar="FILE.toml", type=click.Path(path_type=Path))
@option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where results are kept.  [default: compare-FILE]",
)
@option("--jobs", type=int, metavar="N", help="Simulations at a time, each on one core.  [default: as many as cores]")
@option("--only", multiple=True, metavar="LABEL", help="Simulate these runs alone; may be given several times.")
@option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    metavar="S",
    help="Simulate these of the file's seeds alone; may be given several times.",
)
@option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")
@option("--json", is_flag=True, help="End with one JSON object on standard output.")
def command(
    file: Path,
    out: Path | None,
    jobs: int | None,
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    device: str,
    json: bool,
) -> None:
    """Simulate all experiments that FILE.toml describes, several at a time, and compare what comes of them.

    What is done already is not done again: after an interruption, or with more runs in the file, the same command goes
    on. The table of all that is done, whichever was asked for now, goes to standard output, and with plots into the
    folder, as compare.md and compare.json. Ctrl-C ends each simulation after its round; a second one kills them.
    """
    from peer.lab import bench
    from peer.lab.grid import Grid
    from peer.trainer import choose_device

    grid = Grid.load(file)
    chosen = grid.chosen(only, seeds)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; give 1 or more")
    sizes, where = _examine(grid), choose_device(device)
    folder = Path(f"compare-{file.stem}") if out is None else out
    with bench.held(folder):
        runs, times = counted(len(grid.labels), "run"), counted(len(grid.seeds), "seed")
        click.echo(f"{runs} × {times}; results are kept in '{folder}'", err=True)
        done = _kept(grid, folder, where)
        places = [bench.Place(cell, folder) for cell in chosen if (cell.label, cell.seed) not in done]
        interrupted = _fill(places, len(chosen), folder, jobs, where)
        results = _kept(grid, folder, where)
        rows = _rows(grid, results, sizes)
        record = _record(grid, results, rows, places)
        _write(folder, rows, grid, results, record)
    if rows:
        _print(rows, grid.reference, json)
    if json:
        click.echo(json_format.dumps(record, allow_nan=False))
    for failure in record["failures"]:
        click.echo(failure, err=True)
    if missing := sum((cell.label, cell.seed) not in results for cell in chosen):
        then = "once what failed is mended, the same command" if record["failures"] else "the same command"
        click.echo(f"{missing} of {len(chosen)} simulations are not done; {then} goes on", err=True)
    elif missing := len(record["missing"]):
        whole = f"the file's {len(grid.cells)} simulations"
        click.echo(f"{missing} of {whole} are not done; leave out --only and --seed to do the rest", err=True)
    if interrupted or record["failures"]:
        sys.exit(INTERRUPTED if interrupted else 1)


@click.command(name="part", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def part(folder: Path) -> None:
    """Do one simulation of a grid, whose plan is in FOLDER."""
    from peer.crew import Interrupts
    from peer.lab import bench

    # SIGTERM ends it at once, as it should when the leash breaks and nobody is left who could insist.
    with Interrupts(signals=(signal.SIGINT,)) as interrupts:
        bench.part(folder, lambda: interrupts.count > 0, click.echo)
    if interrupts.count:
        sys.exit(INTERRUPTED)


def _examine(grid: Grid) -> dict[str, int]:
    """Return the bytes of each run's model; raises `ConfigError` before anything is started, and warns once."""
    from peer.lab import bench

    sizes, cautions = dict[str, int](), dict[str, str]()
    for cell in grid.chosen(seeds=grid.seeds[:1]):
        try:
            sizes[cell.label] = bench.examine(cell.experiment)
        except ConfigError as error:
            raise ConfigError(f"run '{cell.label}': {error}") from error
        if (caution := bench.warning(cell.experiment)) is not None:
            cautions.setdefault(caution, cell.label)
    for caution, label in cautions.items():
        click.echo(f"peer: run '{label}': {caution}", err=True)
    return sizes


def _kept(grid: Grid, folder: Path, device: torch.device) -> Results:
    from peer.lab import bench

    sources = bench.Sources()
    found = {
        (cell.label, cell.seed): bench.kept(cell, folder, sources.recorded(cell.experiment, device))
        for cell in grid.cells
    }
    return {key: result for key, result in found.items() if result is not None}


def _fill(places: Sequence[Place], chosen: int, folder: Path, jobs: int | None, device: torch.device) -> bool:
    """Simulate what isn't done, with a progress display; return whether that was interrupted."""
    from rich.console import Console

    from peer.crew import Interrupts, cores
    from peer.lab import bench

    from .bar import Bar

    if not places:
        return False
    bench.fetch([place.cell.experiment for place in places], folder, lambda sentence: click.echo(sentence, err=True))
    before = chosen - len(places)
    rounds = sum(place.cell.experiment.run.rounds for place in places)
    errors = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    with Interrupts(_interrupted) as interrupts, Bar(errors, rounds) as bar:

        def watch() -> None:
            done = sum(place.round for place in places)
            ended = sum(place.ended for place in places)
            bar.show(done, f"{before + ended}/{chosen} simulations, {done}/{rounds} rounds")

        bench.fill(places, folder, jobs or cores(), device, interrupts, watch)
    return interrupts.count > 0


def _rows(grid: Grid, results: Results, sizes: Mapping[str, int]) -> list[Row]:
    from peer.lab import report

    kept = {
        label: {seed: results[label, seed] for seed in grid.seeds if (label, seed) in results} for label in grid.labels
    }
    return [
        report.row(label, done, len(grid.seeds), sizes[label], kept[grid.references[label]], grid.references[label])
        for label, done in kept.items()
        if done
    ]


def _record(grid: Grid, results: Results, rows: Sequence[Row], places: Sequence[Place]) -> dict[str, Any]:
    """Return the table as one JSON object, with what is missing in it and why."""
    from peer.lab import report

    missing = [cell for cell in grid.cells if (cell.label, cell.seed) not in results]
    return report.record(rows, grid.reference) | {
        "missing": [{"label": cell.label, "seed": cell.seed} for cell in missing],
        "failures": [place.failure for place in places if place.failure is not None],
    }


def _write(folder: Path, rows: Sequence[Row], grid: Grid, results: Results, record: Mapping[str, Any]) -> None:
    """Write table and plots of what is done."""
    from peer.lab import plots, report

    try:
        (folder / "compare.md").write_text(report.markdown(rows, grid.reference), encoding="utf-8")
        (folder / "compare.json").write_text(json_format.dumps(record, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write in '{folder}': {error.strerror}") from error
    series = {
        row.label: plots.mean_of(
            [results[row.label, seed].points for seed in grid.seeds if (row.label, seed) in results]
        )
        for row in rows
    }
    if series:
        plots.draw(series, folder)


def _interrupted(count: int) -> None:
    if count == 1:
        # Not through Python's standard error, which may be in the middle of a write.
        os.write(2, b"ending after the rounds under way; once more to end at once\n")


def _print(rows: Sequence[Row], reference: str, aside: bool) -> None:
    """Print the table; aside: on standard error."""
    from rich.console import Console
    from rich.table import Table

    from peer.lab.report import COLUMNS, LEGEND, named

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for number, (heading, _) in enumerate(COLUMNS):
        # Only labels may be wrapped where the terminal is narrow.
        broken = heading.replace(" ", "\n").replace("disagree", "disagree-\n").replace("differ", "differ-\n")
        table.add_column(broken, justify="right" if number else "left", no_wrap=number > 0)
    for row in named(rows, reference):
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    out = Console(stderr=aside, markup=False, highlight=False)
    out.width = max(out.width, NARROWEST) if out.is_terminal else WIDTH
    out.print(table)
    click.echo(LEGEND.format(reference=reference), err=aside)
