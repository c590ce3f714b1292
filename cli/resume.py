"""peer resume: have the peer of a home go on."""

from __future__ import annotations

import click

from peer.config import HOME

from .help import Command, examples, option
from .pause import named, trained


@click.command(
    name="resume",
    cls=Command,
    short_help="Have a peer that was paused go on.",
    epilog=examples("peer resume", "peer resume --home ~/second-peer"),
)
@option("--home", metavar="FOLDER", help=f"The home folder of the peer that is to go on.  [default: {HOME}]")
def command(home: str | None) -> None:
    """Have this machine's peer go on after peer pause: it catches up with the swarm and trains.

    Whatever else keeps it waiting (hours, the month's quota, another program on its GPU) still does.
    """
    owner = trained(home)
    word = "Resumed" if owner.resume() else "It was not paused"
    holder = owner.holder()
    if holder is not None and holder.live:
        click.echo(f"{word}: the peer trains, unless peer status says what else it waits for")
    else:
        click.echo(f"{word}: no daemon runs now; start it with: peer join{named(home)}")
