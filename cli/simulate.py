"""peer simulate: many virtual peers in one process, by one algorithm."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from peer.errors import ConfigError
from peer.lab.graphs import GRAPHS
from peer.models import presets
from peer.tables import nearest

from .compare import WIDTH, part
from .compare import command as compare
from .help import Command, examples, option
from .main import INTERRUPTED

if TYPE_CHECKING:
    from peer.lab.results import Result

ALGORITHMS = {
    "gasloc": "GASLoC with own momentum, the daemon's default",
    "gasloc-mixed": "GASLoC with mixed momentum, γ 0.7, α 0.5",
    "gasloc-plain": "GASLoC as printed, momentum unmixed, γ 0.7, α 0.5",
    "diloco": "DiLoCo: all-reduce of drifts, Nesterov momentum, η 0.7, γ 0.9",
    "ddp": "data-parallel training: gradients averaged every step",
    "lordo": "LoRDO: all-reduce of drifts, low-rank inside, bases from their mean",
    "lordo-local": "the same with bases from each peer's own drift",
    "lordo-ddp": "low-rank data-parallel training",
    "noloco": "NoLoCo: random pairs, μ 0.5, η 0.7",
    "pair-average": "pair averaging without outer momentum",
    "alone": "no communication: each peer's outer momentum alone",
}
"""What `peer.lab.algorithms` says of each; here too, since that loads torch, and --help should be quick."""


class Simulate(Command, click.Group):
    """A command that simulates by itself, and has subcommands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the algorithms below the options, then the subcommands."""
        super().format_options(ctx, formatter)
        with formatter.section("Algorithms"):
            formatter.write_dl(list(ALGORITHMS.items()))
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand that was typed; name the nearest for one that doesn't exist."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            near = nearest(args[0], [compare.name or ""])
            raise click.UsageError(f"There is no command '{args[0]}' here; did you mean '{near}'?", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    name="simulate",
    cls=Simulate,
    invoke_without_command=True,
    subcommand_metavar="| compare FILE.toml",
    short_help="Try algorithms on virtual peers in one process.",
    epilog=examples(
        "peer simulate",
        "peer simulate --algorithm diloco --peers 16 --rounds 40 --out diloco",
        "peer simulate --codec rank4-int4 --meetings 8 --links links.toml --churn 0.05 --json",
        "peer simulate compare grid.toml --out grid",
    ),
)
@option(
    "--algorithm",
    group="The swarm",
    type=click.Choice(list(ALGORITHMS)),
    default="gasloc",
    metavar="NAME",
    show_default=True,
    help="How peers agree; all are listed below.",
)
@option("--peers", group="The swarm", type=int, default=8, metavar="N", show_default=True, help="How many peers train.")
@option("--meetings", group="The swarm", type=int, metavar="M", help="Aimed at, a round.  [default: the run's]")
@option(
    "--codec",
    group="The swarm",
    metavar="CODEC",
    help="How differences travel: none, int4, rank4-int4 and the like.  [default: the run's]",
)
@option(
    "--graph",
    group="The swarm",
    type=click.Choice(GRAPHS),
    metavar="NAME",
    help=f"Who may meet whom, and with how many at once: {', '.join(GRAPHS)}.  [default: one-peer]",
)
@option(
    "--model",
    group="What is trained",
    metavar="NAME|FILE",
    help=f"{', '.join(presets.names())}, or the path of a transformers config.json of a causal language model. Its "
    "preset is the run: it says what the other options don't.  [default: gpt-nano]",
)
@option("--run", group="What is trained", metavar="FILE", help="A run's manifest (TOML) in place of a preset.")
@option(
    "--data",
    group="What is trained",
    metavar="PATH",
    help="Text to read: a file, a folder or a glob of .txt and .jsonl files, also .gz.  [default: the run's]",
)
@option(
    "--tokenizer",
    group="What is trained",
    metavar="bytes|gpt2|FILE",
    help="In place of the preset's or the manifest's; a model of your own may need one that fits.",
)
@option("--inner", group="What is trained", metavar="adamw|lordo", help="The inner optimizer.  [default: the run's]")
@option("--rounds", group="What is trained", type=int, metavar="T", help="How many rounds.  [default: the run's]")
@option(
    "--local-steps",
    group="What is trained",
    type=int,
    metavar="H",
    help="Inner steps a round, of a peer of middling speed.  [default: the run's]",
)
@option("--seed", group="What is trained", type=int, metavar="S", help="Of all chance.  [default: the run's]")
@option(
    "--links",
    group="The world",
    metavar="FILE",
    help="The peers' access lines and speeds (TOML).  [default: nothing takes time but training]",
)
@option(
    "--churn",
    group="The world",
    metavar="RATE|FILE",
    help="The share of peers that leave in a round, such as 0.05, to come back later; or a trace, a line for each "
    "change: seconds, peer, leave or join.  [default: nobody leaves]",
)
@option(
    "--non-iid",
    group="The world",
    is_flag=True,
    help="Each peer reads a contiguous part of the text of its own, in place of pieces from all of it.",
)
@option(
    "--evaluations",
    group="On this machine",
    type=int,
    metavar="N",
    help="How many times held-out losses are measured, the end included.  [default: 10, or one for each round]",
)
@option("--device", group="On this machine", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")
@option(
    "--out",
    group="On this machine",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where results go, a new or empty folder.  [default: a new one, simulate-ALGORITHM-SEED]",
)
@option("--json", group="On this machine", is_flag=True, help="End with one JSON object on standard output.")
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> None:
    """Simulate a swarm of virtual peers in one process, with the code that the daemon runs, and a clock of its own.

    The folder gets results.jsonl, a line for each measurement as it is made, and plots; a table of the measurements
    goes to standard output. The same seed gives the same numbers. Ctrl-C ends the simulation after the round and keeps
    what is done; a second one ends it at once.
    """
    if ctx.invoked_subcommand is None:
        _simulate(**flags)
        return
    given = [name for name in flags if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise click.UsageError(f"'{flag}' says nothing to '{ctx.invoked_subcommand}'; leave it out", ctx)


command.add_command(compare)
command.add_command(part)


def _simulate(device: str, out: Path | None, json: bool, **flags: Any) -> None:
    from rich.console import Console

    from peer.crew import Interrupts
    from peer.lab import bench, plots, report, settings
    from peer.lab.results import FILE, Recorder
    from peer.lab.simulation import Simulation
    from peer.trainer import choose_device

    from .bar import Bar
    from .words import counted

    experiment = settings.experiment(flags["algorithm"], flags["seed"], settings.settled(_table(flags), Path()))
    out = _folder(out, f"simulate-{experiment.algorithm}-{experiment.run.seed}")
    model_bytes = bench.examine(experiment)
    if (caution := bench.warning(experiment)) is not None:
        click.echo(f"peer: {caution}", err=True)
    where, rounds = choose_device(device), experiment.run.rounds
    data = bench.load(experiment, None, lambda sentence: click.echo(sentence, err=True))
    simulation = Simulation(experiment, data, where)
    recorded = bench.Sources().recorded(experiment, where)
    _make(out)
    who, length = counted(experiment.peers, "peer"), counted(rounds, "round")
    click.echo(f"{who}, {experiment.algorithm}, {length}; results go to '{out}'", err=True)
    errors = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    with (
        Interrupts(_interrupted) as interrupts,
        Recorder(out / FILE, recorded) as recorder,
        Bar(errors, rounds) as bar,
    ):

        def watch(done: int, loss: float | None) -> None:
            bar.show(done, f"round {done}/{rounds}" + ("" if loss is None else f", loss {loss:.3f}"))

        result = bench.simulate(simulation, recorder, lambda: interrupts.count > 0, watch)
    _print(result, model_bytes, sys.stderr.isatty() if json else sys.stdout.isatty(), json)
    plots.draw({experiment.label: result.points}, out)
    if json:
        click.echo(json_format.dumps(report.outcome_record(result.outcome), allow_nan=False))
    if result.outcome.rounds < rounds:
        click.echo(f"interrupted after round {result.outcome.rounds} of {rounds}", err=True)
        sys.exit(INTERRUPTED)


def _table(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the options as the table that a file of experiments would have."""
    from peer.lab.settings import KINDS

    deep = {
        "data": {"corpus": flags["data"]},
        "inner": {"optimizer": flags["inner"]},
        "exchange": {"meetings": flags["meetings"], "codec": flags["codec"]},
    }
    given = {name: {key: value for key, value in keys.items() if value is not None} for name, keys in deep.items()}
    return {key: flags[key] for key in KINDS if flags.get(key) is not None} | given


def _folder(out: Path | None, name: str) -> Path:
    """Return the folder that was asked for, or the first free one of a name; raises `ConfigError` if it is in use."""
    if out is None:
        number = 1
        while os.path.lexists(name if number == 1 else f"{name}-{number}"):
            number += 1
        return Path(name if number == 1 else f"{name}-{number}")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"folder '{out}' is not empty; give --out a new one")
    return out


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make folder '{out}': {error.strerror}; give another with --out") from error


def _interrupted(count: int) -> None:
    if count > 1:
        raise KeyboardInterrupt
    # Not through Python's standard error, which may be in the middle of a write.
    os.write(2, b"ending after this round; once more to end at once\n")


def _print(result: Result, model_bytes: int, terminal: bool, aside: bool) -> None:
    """Print the measurements and what they come to; aside: on standard error."""
    from rich.console import Console
    from rich.table import Table

    from peer.lab.report import share

    from .words import size

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("round", "simulated", "sent", "training", "held-out", "single peers", "disagreement"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in result.points:
        losses = point.heldout_peers
        table.add_row(
            str(point.round),
            f"{point.seconds:,.0f} s",
            size(point.bytes),
            "-" if point.train_loss is None else f"{point.train_loss:.3f}",
            f"{point.heldout_average:.3f}",
            f"{min(losses):.3f} to {max(losses):.3f}",
            f"{point.disagreement:.2g}",
        )
    Console(stderr=aside, width=None if terminal else WIDTH).print(table)
    outcome = result.outcome
    click.echo(
        f"Losses in nats per token; held-out: of the average of all peers' weights, and of single peers, lowest to "
        f"highest.\nA peer sent {size(outcome.bytes_per_round)} a round "
        f"({share(outcome.bytes_per_round / model_bytes)} of the model in float32); its inner optimizer keeps "
        f"{size(outcome.optimizer_bytes)}.",
        err=aside,
    )
