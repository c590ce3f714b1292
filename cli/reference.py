"""The manual page of all commands, made of their --help: `python -m peer.cli.reference > docs/cli.md`."""

from __future__ import annotations

import sys

import click

from .help import WIDTH
from .main import COMMANDS, group

HEAD = """# Command line

Made of `--help` by `make docs`; a test compares.

Exit status: 0 done, also after Ctrl-C; 1 an error, in one sentence on standard error; 2 a wrong command line; 130
interrupted before anything began, or before a simulation was over.
"""


def reference() -> str:
    """Return docs/cli.md."""
    root = click.Context(group, info_name="peer", terminal_width=WIDTH)
    pages = [_page("peer", group, root)]
    for name in COMMANDS:
        found = group.get_command(root, name)
        if found is not None:
            context = click.Context(found, info_name=name, parent=root, terminal_width=WIDTH)
            pages.append(_page(f"peer {name}", found, context))
            for below, each in _visible(found):
                context_below = click.Context(each, info_name=below, parent=context, terminal_width=WIDTH)
                pages.append(_page(f"peer {name} {below}", each, context_below))
    return "\n".join([HEAD, *pages])


def _visible(command: click.Command) -> list[tuple[str, click.Command]]:
    """Return a command's own subcommands by name, but the hidden ones."""
    below = command.commands if isinstance(command, click.Group) else {}
    return [(name, each) for name, each in below.items() if not each.hidden]


def _page(title: str, command: click.Command, context: click.Context) -> str:
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
