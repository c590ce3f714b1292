"""How far something is that takes long, and how much time is left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .words import duration

STEPS = 10
"""Lines in all, where there is no terminal to draw on."""


class Bar:
    """Shows how much of a total is done: a bar on a terminal, elsewhere a line for every tenth of it."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self._console, self._total, self._first = console, total, done
        self._began_s = time.monotonic()
        self._told = done * STEPS // max(1, total)
        self._live: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
            self._live = Progress(*columns, console=console)
            self._task = self._live.add_task("starting", total=total, completed=done, left="")

    def __enter__(self) -> Bar:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: int, words: str) -> None:
        """Show that so much is done, with some words about it."""
        left = self._left(done)
        if self._live is not None:
            self._live.update(self._task, completed=done, description=words, left=left)
            return
        step = done * STEPS // max(1, self._total)
        if step > self._told:
            self._told = step
            self._console.print(f"{words}{', ' if left else ''}{left}", highlight=False, soft_wrap=True)

    def _left(self, done: int) -> str:
        if done <= self._first or done >= self._total:
            return ""
        seconds = (time.monotonic() - self._began_s) * (self._total - done) / (done - self._first)
        return f"{duration(seconds)} left"
