"""Processes that do as they are told, one order after another, through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

DEADLINE_S = 180.0
FAREWELL_S = 15.0


class Failed(Exception):
    """A measurement that says nothing; the text is why."""


class Servant(Protocol):
    """What lives in a worker's process; orders are calls of its methods."""

    def close(self) -> None:
        """End in order."""


class Worker:
    """A new process (spawned, not forked) with a servant in it. It ends when this process does, however that is."""

    def __init__(self, name: str, build: Callable[..., Servant], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, build, args), name=name)
        self._process.start()
        theirs.close()

    def tell(self, word: str, *args: object) -> None:
        """Give an order; `hear` returns its result."""
        try:
            self._pipe.send((word, args))
        except OSError as error:
            raise Failed(f"{self._name} has ended; its last words stand above") from error

    def hear(self) -> Any:
        """Return the result of the oldest order that was not heard of; raises `Failed`."""
        try:
            if not self._pipe.poll(DEADLINE_S):
                raise Failed(f"{self._name} said nothing for {DEADLINE_S:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Failed(f"{self._name} ended before it was done; its last words stand above") from error

    def ask(self, word: str, *args: object) -> Any:
        """Give an order and return its result."""
        self.tell(word, *args)
        return self.hear()

    def close(self) -> None:
        """Let the process end, or kill it and all that it started."""
        self._pipe.close()
        self._process.join(FAREWELL_S)
        if self._process.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.join()


def _obey(pipe: Connection, build: Callable[..., Servant], args: tuple[object, ...]) -> None:
    os.setsid()  # so that it and its children can be killed as one; and Ctrl-C reaches the parent alone
    servant = build(*args)
    try:
        while True:
            word, given = pipe.recv()
            pipe.send(getattr(servant, word)(*given))
    except (EOFError, ConnectionError):
        return
    finally:
        servant.close()
