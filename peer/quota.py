"""How much a home has sent and received in each month, kept in HOME/traffic.json.

    format   1
    months   {"2026-11": bytes, ...}, the last twelve that had any

The months are the local calendar's. Each has its own count, so that a clock which was wrong for a while loses none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

from peer.errors import ConfigError

FORMAT = 1
KEPT = 12


class Quota:
    """Counts what one home's peer sends and receives; only the daemon that holds the home's lock may make one.

    say hears of a file that cannot be read or written; neither stops the counting.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._months = self._load()
        self._changed = False
        self._writable = True
        self._flushing = Lock()

    def add(self, size_bytes: int, today: date) -> None:
        """Count bytes that were sent or received; `flush` keeps them."""
        if size_bytes:
            self._months[_month(today)] = self.used_bytes(today) + size_bytes
            self._changed = True

    def used_bytes(self, today: date) -> int:
        """Return what this month has had so far."""
        return self._months.get(_month(today), 0)

    def left_bytes(self, limit_bytes: int, today: date) -> int:
        """Return what is left of this month's limit; 0 when it is used up."""
        return max(0, limit_bytes - self.used_bytes(today))

    def flush(self) -> None:
        """Write what was counted since the last time, if anything; a process that is killed loses only what was not."""
        with self._flushing:
            self._flush()

    def _flush(self) -> None:
        if not self._changed:
            return
        self._months = dict(sorted(self._months.items())[-KEPT:])
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("w") as file:
                json.dump({"format": FORMAT, "months": self._months}, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError as error:
            if self._writable:
                self._say(f"cannot write '{self._path}' ({error.strerror}); the month's bytes are counted on in memory")
            self._writable = False
            return
        self._changed, self._writable = False, True

    def _load(self) -> dict[str, int]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(
                f"cannot read '{self._path}' ({error.strerror}); make it readable, or remove it"
            ) from error
        try:
            return _months(json.loads(text))
        except (ValueError, RecursionError) as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            self._say(f"'{self._path}' is damaged ({error}), so this month is counted anew; the old one is '{aside}'")
            return {}


def _months(content: Any) -> dict[str, int]:
    """Return the months of a file's content; raises ValueError."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it has no format {FORMAT}")
    months = content.get("months")
    if not isinstance(months, dict) or not all(type(used) is int and used >= 0 for used in months.values()):
        raise ValueError("its months are no numbers of bytes")
    return months


def _month(today: date) -> str:
    return f"{today:%Y-%m}"
