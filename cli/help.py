"""Help that reads well: options in groups, examples as they are typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100


class Option(click.Option):
    """An option that stands under a heading of its own in --help; None: under click's "Options"."""

    def __init__(self, *args: Any, group: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


class Command(click.Command):
    """A command whose --help shows its options by group, in the order in which they were declared."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["context_settings"] = {"max_content_width": WIDTH} | settings.get("context_settings", {})
        super().__init__(*args, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, then what belongs to none (--help itself). Arguments are told of in the command's text."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", None) or "Options", []).append(record)
        rest = groups.pop("Options", [])
        for heading, records in [*groups.items(), ("Options", rest)]:
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Declare an option, as click.option does; group=HEADING puts it under a heading."""
    return click.option(*names, cls=Option, **settings)


def examples(*lines: str) -> str:
    """Return an epilog that shows command lines just as they are typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
