"""peer swarm: several peers on this machine train one model."""

from __future__ import annotations

import json as json_format
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from peer.models import presets

from .help import Command, examples, option

INNER = "The inner optimizer; lordo's memory of the layers is an eighth of AdamW's or less.  [default: the preset's]"
PEERS = 4
MODEL = "gpt-nano"


@click.command(
    name="swarm",
    cls=Command,
    short_help="Try it all out: a whole swarm on this machine.",
    epilog=examples(
        "peer swarm",
        "peer swarm --peers 8 --rounds 20 --codec int4",
        "peer swarm --model gpt-10m --data ~/texts --home swarm --json",
        "peer swarm --run our-run.toml --rounds 2",
    ),
)
@option(
    "--peers",
    group="The swarm",
    type=int,
    default=PEERS,
    metavar="N",
    show_default=True,
    help="How many daemons train.",
)
@option(
    "--model",
    group="What is trained",
    metavar="NAME|FILE",
    help=f"{', '.join(presets.names())}, or the path of a transformers config.json of a causal language model. Its "
    f"preset says what the other options don't.  [default: {MODEL}]",
)
@option(
    "--run",
    "file",
    group="What is trained",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A run's manifest (TOML) in place of a preset, to try it out before others join.",
)
@option("--rounds", group="What is trained", type=int, metavar="T", help="How many rounds.  [default: the preset's]")
@option(
    "--data",
    group="What is trained",
    metavar="PATH",
    help="Text to read: a file, a folder or a glob of .txt and .jsonl files, also .gz.  [default: the preset's]",
)
@option(
    "--codec",
    group="What is trained",
    metavar="CODEC",
    help="How differences travel: none, int4, rank4-int4 and the like.  [default: the preset's]",
)
@option("--inner", group="What is trained", metavar="adamw|lordo", help=INNER)
@option("--seed", group="What is trained", type=int, metavar="S", help="Of all chance.  [default: the run's]")
@option(
    "--home",
    group="The swarm",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="A new folder that keeps the run's manifest, and each peer's checkpoints and log.  [default: a temporary one, "
    "removed when all went well]",
)
@option(
    "--json", group="The swarm", is_flag=True, help="End with one JSON object on standard output instead of a table."
)
def command(
    peers: int,
    model: str | None,
    file: Path | None,
    rounds: int | None,
    data: str | None,
    codec: str | None,
    inner: str | None,
    seed: int | None,
    home: Path | None,
    json: bool,
) -> None:
    """Train one model with a whole swarm of daemons on this machine, and show what comes of it.

    A bootstrap node and the peers are started as processes of their own, find each other, train, and meet, just as they
    would over the internet. Progress is shown on standard error. The exit status is 0 only if every daemon did all
    rounds. Ctrl-C ends the training early; a second one kills the daemons.
    """
    from rich.console import Console

    from peer.swarm import plan, swarm

    from .rows import WIDTH, Progress, outcome, summary
    from .words import counted

    named = model or ("" if file else MODEL)
    run = plan(named, peers, rounds, data, codec, seed, inner, file)
    errors = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    with ExitStack() as stack:
        if home is None:
            home = Path(tempfile.mkdtemp(prefix="peer-swarm-"))
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        who, length = counted(peers, "peer"), counted(run.rounds, "round")
        click.echo(f"training {run.model} with {who} for {length}; their homes are in {home}", err=True)
        with Progress(errors, run.rounds) as shown:
            report = swarm(run, peers, home.absolute(), shown.show)
        if not report.well:
            stack.pop_all()  # what is there may tell why
    if json:
        click.echo(json_format.dumps(report.record(), allow_nan=False))
    else:
        out = Console(width=None if sys.stdout.isatty() else WIDTH)
        out.print(outcome(report))
        click.echo(summary(report))
    for failure in report.failures:
        click.echo(failure, err=True)
    if not report.well:
        click.echo(f"not every daemon came to its end; all that they left is in {home}", err=True)
        sys.exit(1)
