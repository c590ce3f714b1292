"""peer pause: have the peer of a home wait."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path

import click

from peer.config import HOME
from peer.errors import ConfigError
from peer.home import Home

from .help import Command, examples, option


@click.command(
    name="pause",
    cls=Command,
    short_help="Have this machine's peer wait.",
    epilog=examples("peer pause", "peer pause --home ~/second-peer"),
)
@option("--home", metavar="FOLDER", help=f"The home folder of the peer that is to wait.  [default: {HOME}]")
def command(home: str | None) -> None:
    """Have this machine's peer leave the swarm and wait without training, until peer resume.

    The daemon keeps running, and stops computing within seconds. One that is started later waits as well.
    """
    owner = trained(home)
    word = "Paused"
    if not owner.pause() and (since := owner.paused_s) is not None:
        word = f"Paused already, since {datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S}"
    holder = owner.holder()
    if holder is not None and holder.live:
        then = "the peer saves, leaves the swarm and waits without training"
    else:
        then = "no daemon runs now; one that is started waits without training"
    click.echo(f"{word}: {then}, until: peer resume{named(home)}")


def trained(home: str | None) -> Home:
    """Return the home of a peer; raises `ConfigError` if none was ever started there."""
    owner = Home(Path(home) if home else HOME)
    if not os.path.exists(owner.manifest):  # not exists() of Path, which raises for a folder that may not be entered
        raise ConfigError(
            f"no peer was ever started in home '{owner.path}'; start one with: peer join, "
            "or name its folder with --home"
        )
    return owner


def named(home: str | None) -> str:
    """Return what follows a command that is to mean the same home."""
    return f" --home {shlex.quote(home)}" if home else ""
