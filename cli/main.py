"""The command `peer`. A subcommand is imported when it is called for, so that each loads only what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module

import click
from click.exceptions import NoArgsIsHelpError

from peer import __version__
from peer.errors import PeerError
from peer.tables import nearest

from .help import WIDTH

COMMANDS = ("join", "status", "pause", "resume", "export", "bootstrap", "swarm", "simulate")
"""Each is a module of this package, with a click command named `command`."""

INTERRUPTED = 130

SPINS = 5000
"""How often one of torch's threads looks whether the others are done before it sleeps; with
OpenMP's own number, 60 times as many, an idle machine is hardly faster, and one whose cores others want far slower."""


class Commands(click.Group):
    """The subcommands, in the order of `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{cmd_name}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand that was typed; name the nearest for one that doesn't exist."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-"):
            raise click.UsageError(f"There is no command '{word}'; did you mean '{nearest(word, COMMANDS)}'?", ctx)
        return super().resolve_command(ctx, args)


@click.group(name="peer", cls=Commands, context_settings={"max_content_width": WIDTH})
@click.version_option(__version__, prog_name="peer", message="%(prog)s %(version)s")
def group() -> None:
    """Train one language model together with people you don't know, over ordinary internet links."""


def main(arguments: list[str] | None = None) -> None:
    """Run `peer` and exit: 0, 1 for an error of ours, 2 for a wrong command line, 130 when interrupted."""
    spin_briefly(os.environ)
    try:
        sys.exit(group.main(arguments, prog_name="peer", standalone_mode=False))
    except PeerError as error:
        _fail(str(error), 1)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        hint = f" ('{error.ctx.command_path} --help' shows the right form.)" if error.ctx else ""
        _fail(error.format_message() + hint, error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set `SPINS` for OpenMP's threads, before torch is imported, unless the user has said how they are to wait."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = str(SPINS)


def _fail(sentence: str, status: int) -> None:
    click.echo(f"peer: {sentence}", err=True)
    sys.exit(status)
