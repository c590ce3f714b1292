"""`peer`, but for one thing: it takes no inner step while a meeting is under way.

    python -m benchmarks.foreground join ...

From the moment an offer was accepted until the exchange has ended, training waits before its next step, on both sides.
All else is the daemon's: whom it meets when and how, and that corrections are added between two steps. How long each
wait took goes into HOME/waits.jsonl and not into the events, since a daemon that notices how much it loses meets less.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from threading import Condition

from peer import loading, meetings
from peer.conversation import Conversation
from peer.trainer import Trainer

FILE = "waits.jsonl"


class Meeting:
    """Whether any is under way; counted on the event loop, waited for by training."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition()

    def count(self, more: int) -> None:
        """Note that one began (1) or ended (-1)."""
        with self._changed:
            self._count += more
            self._changed.notify_all()

    def await_end(self) -> float:
        """Return once none is, with the seconds that it took."""
        began_s = time.perf_counter()
        with self._changed:
            if not self._count:
                return 0.0
            self._changed.wait_for(lambda: not self._count)
        return time.perf_counter() - began_s


UNDER_WAY = Meeting()


class Counted(Conversation):
    """An exchange that training knows of."""

    async def run(self) -> None:
        """Return when the exchange has ended."""
        UNDER_WAY.count(1)
        try:
            await super().run()
        finally:
            UNDER_WAY.count(-1)


class Waiting(Trainer):
    """Training that waits."""

    waits = Path(FILE)

    def step(self) -> bool:
        """Take one inner step, but not during a meeting."""
        seconds = UNDER_WAY.await_end()
        if seconds:
            with self.waits.open("a") as file:
                file.write(json.dumps({"time": time.time(), "seconds": seconds}) + "\n")
        return super().step()


def main() -> None:
    """Run `peer` with these two in place of what they are made of."""
    Waiting.waits = Path(sys.argv[sys.argv.index("--home") + 1]) / FILE
    loading.Trainer = Waiting  # type: ignore[attr-defined]
    meetings.Conversation = Counted  # type: ignore[attr-defined]
    from peer.cli.main import main as peer

    peer()


if __name__ == "__main__":
    main()
