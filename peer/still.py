"""Who may touch the weights when: training changes them, meetings read them beside it.

Forward and backward pass leave the weights alone, so for most of a step others can read them and nobody waits. Only
where training is about to change them (an update, a correction, the outer step) does it wait for a reader to finish,
which is what `take_waited_s` counts. Whoever reads holds on for some milliseconds at most, and lets training go first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

POLITE_S = 0.0005


class Still:
    """A lock with two sides. Whoever holds it may enter it again, on either side."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._holder: int | None = None
        self._wanted = 0
        self._waited_s = 0.0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold it to change the weights; training's side, which goes first."""
        began = time.perf_counter()
        self._wanted += 1
        with self._lock:
            self._wanted -= 1
            self._waited_s += time.perf_counter() - began
            with self._holding():
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it to read the weights, or to touch what training only looks at between two steps."""
        # whoever holds it already is the one that training waits for
        while self._wanted > 0 and self._holder != get_ident():
            time.sleep(POLITE_S)
        with self._lock, self._holding():
            yield

    def take_waited_s(self) -> float:
        """Return the seconds that training waited for readers since this was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @contextmanager
    def _holding(self) -> Iterator[None]:
        before, self._holder = self._holder, get_ident()
        try:
            yield
        finally:
            self._holder = before
