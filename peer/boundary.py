"""The step boundary: the one place where anything but training touches `State`.

Meetings and newcomers run on the event loop, training on a thread of its own. What they want of the live weights they
post here as a job; training runs the jobs between two inner steps. So weights never change under a reader or a writer,
training never waits for a network, and no copy of the model is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

from peer.core.state import State
from peer.errors import Unreachable

T = TypeVar("T")
Job = Callable[[State], T]


class Boundary:
    """Jobs from the event loop, run by training between two inner steps."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[State | None], None]] = SimpleQueue()
        self._lock = Lock()
        self._closed = False

    def post(self, job: Job[T]) -> Future[T]:
        """Queue a job; it runs at the next boundary even if nobody waits for its result any more.

        After `close` the result is `Unreachable`.
        """
        future: Future[T] = Future()

        def run(state: State | None) -> None:
            if state is None:
                future.set_exception(Unreachable("this peer is stopping"))
                return
            try:
                result = job(state)
            except Exception as error:  # noqa: BLE001  as in any executor: whoever waits gets it, training goes on
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                run(None)
            else:
                self._jobs.put(run)
        return future

    async def visit(self, job: Job[T], timeout_s: float) -> T:
        """Run a job at the next boundary and return its result; raises `Unreachable` after timeout_s or `close`."""
        future = asyncio.wrap_future(self.post(job))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(_forget)
            raise Unreachable(f"training reached no step boundary in {timeout_s:.0f} s") from None

    def serve(self, state: State) -> None:
        """Run every job that is queued; called by training between two inner steps."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()(state)

    def close(self, state: State | None) -> None:
        """Run what is queued on the state, or refuse it if there is none; refuse what comes later."""
        with self._lock:
            self._closed = True
        while True:
            try:
                self._jobs.get_nowait()(state)
            except Empty:
                return


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
