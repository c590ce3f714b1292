"""peer join: train with the others."""

from __future__ import annotations

import sys
from typing import Any

import click

from peer.config import HOME, MODEL, Config
from peer.models import presets

from .help import Command, examples, option
from .printer import Printer


@click.command(
    name="join",
    cls=Command,
    short_help="Join a swarm and train with it.",
    epilog=examples(
        "peer join --model gpt-125m",
        "peer join --model gpt-125m --bootstrap /ip4/203.0.113.5/tcp/7700/p2p/12D3KooW...",
        "peer join --model gpt-125m --inner lordo",
        "peer join --run our-run.toml --data ~/texts --device cuda:1",
    ),
)
@option(
    "--model",
    group="What is trained",
    metavar="NAME|FILE",
    help=f"{', '.join(presets.names())}, or the path of a transformers config.json of a causal language model. "
    f"Without --run, its preset says everything else.  [default: {MODEL}]",
)
@option("--run", group="What is trained", metavar="FILE", help="The run's manifest (TOML), as its organizer gave it.")
@option(
    "--inner",
    group="What is trained",
    metavar="adamw|lordo",
    help="The inner optimizer, in place of the preset's; that makes another run, in which all give the same. lordo's "
    "memory of the layers is an eighth of AdamW's or less.  [default: the run's]",
)
@option(
    "--data",
    group="What is trained",
    metavar="PATH",
    help="Read this text instead of the run's corpus: a file, a folder or a glob of .txt and .jsonl files, also .gz.",
)
@option(
    "--rounds",
    group="What is trained",
    type=int,
    metavar="N",
    help="Leave after N rounds from now.  [default: when the run is over]",
)
@option(
    "--bootstrap",
    group="With whom",
    multiple=True,
    metavar="MULTIADDR",
    help="Find the swarm through this node; may be given several times. Without one that answers, a new swarm begins, "
    "and the command with which others join it is printed.",
)
@option(
    "--port",
    group="With whom",
    type=int,
    metavar="N",
    help="The TCP port on which others call. Forward it if your router lets you.  [default: any free one]",
)
@option(
    "--announce",
    group="With whom",
    metavar="HOST[:PORT]",
    help="Where others are to call, if that isn't what this machine sees: a router's outer address, or a name.",
)
@option(
    "--max-upload",
    group="As a guest",
    metavar="RATE",
    help="Send at most this much, in bits a second: 20Mbit, 800kbit.  [default: no limit]",
)
@option("--max-download", group="As a guest", metavar="RATE", help="Receive at most this much.  [default: no limit]")
@option(
    "--share",
    group="As a guest",
    type=float,
    metavar="PART",
    help=f"Meetings may use this part of what the link was measured to carry, 0.01 to 1.  [default: {Config.share}]",
)
@option(
    "--quota",
    group="As a guest",
    metavar="SIZE",
    help="Send and receive at most this much in a calendar month, then wait for the next: 200GB.  [default: no limit]",
)
@option(
    "--hours",
    group="As a guest",
    metavar="FROM-TO[,...]",
    help="Take part at these hours only, by this machine's clock: 22:00-07:00.  [default: always]",
)
@option("--device", group="On this machine", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.  [default: auto]")
@option(
    "--home",
    group="On this machine",
    metavar="FOLDER",
    help="Where this peer's key, checkpoints and log are kept; each daemon has its own. Options can stand in "
    f'config.toml there, such as: bootstrap = ["/ip4/..."]  [default: {HOME}]',
)
@option(
    "--json", is_flag=True, default=None, group="On this machine", help="Print events as JSON, one object to a line."
)
def command(**flags: Any) -> None:
    """Join a swarm and train one model with it, until the run is over or Ctrl-C.

    Training goes on whether or not anybody else can be reached. Ctrl-C saves and leaves; the same command goes on from
    there. A newcomer fetches the current state from another peer first.
    """
    config = Config.load(flags)
    from peer.process import depart, main  # torch and all: only now, so that --help and mistakes are quick

    if config.json:
        main(config, say=Printer(sys.stderr).say, echo=Printer(sys.stdout).json)
    else:
        printer = Printer(sys.stdout)
        main(config, say=printer.say, echo=printer.event)
    depart()
