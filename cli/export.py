"""peer export: take the model out."""

from __future__ import annotations

import os
from pathlib import Path

import click

from peer.config import HOME
from peer.errors import ConfigError
from peer.home import Home

from .help import Command, examples, option


@click.command(
    name="export",
    cls=Command,
    short_help="Write the model as a folder that transformers loads.",
    epilog=examples("peer export my-model", "peer export my-model --home ~/second-peer"),
)
@click.argument("out", type=click.Path(path_type=Path))
@option("--home", metavar="FOLDER", help=f"The home folder of the peer whose model it is.  [default: {HOME}]")
def command(out: Path, home: str | None) -> None:
    """Write this peer's model to OUT, a new folder, from its newest checkpoint.

    The folder holds weights, configuration and tokenizer; transformers loads it without a network. The daemon may be
    running meanwhile.
    """
    owner = Home(Path(home) if home else HOME)
    if not os.path.exists(owner.manifest):  # not exists() of Path, which raises for a folder that may not be entered
        raise ConfigError(
            f"no peer has trained in home '{owner.path}' yet; start one with: peer join, or name its folder with --home"
        )
    from peer import checkpoint, export  # torch and all: only now, so that --help and mistakes are quick
    from peer.manifest import Manifest
    from peer.models import tokenizer

    run = Manifest.load(owner.manifest)
    found = checkpoint.load(owner.path, run.run_id, ["weights"])
    if found is None:
        raise ConfigError(f"there is no checkpoint in home '{owner.path}' yet; wait until the peer has saved one")
    for warning in found.warnings:
        click.echo(f"peer: {warning}", err=True)
    export.export(found.state.weights, run.config, tokenizer.load(run.tokenizer), out)
    click.echo(f"Wrote '{out}': run {run.name} at round {found.state.round}, as it was {found.age_s:.0f} s ago.")
    click.echo("Load it with:")
    click.echo("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    click.echo(f"  model = AutoModelForCausalLM.from_pretrained({str(out)!r})")
    click.echo(f"  tokenizer = AutoTokenizer.from_pretrained({str(out)!r})")
