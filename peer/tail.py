"""Read the event log that `peer.events.EventLog` writes, from the start or as it grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
"""One event as it stands in the log."""

KEPT = 3


def generations(path: Path) -> list[Path]:
    """Return the log's files, newest first: PATH, PATH.1, ... PATH.3."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT + 1))]


class Tail:
    """Read a log as it grows, through its rotations, each event once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._next: list[BinaryIO] = []
        self._begun = False

    def new(self) -> list[Record]:
        """Return the events that were written since the last call; at first, all that the log holds."""
        return list(self.each())

    def each(self) -> Iterator[Record]:
        """Yield what `new` returns, one by one."""
        # Which files there are is asked before the current one is read to its end: once a newer one exists, the
        # current one grows no more, and its end is final.
        if not self._next:
            self._next = self._newer()
        yield from self._rest()
        while self._next:
            if self._file is not None:
                self._file.close()
            self._file = self._next.pop(0)
            yield from self._rest()

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in [self._file, *self._next]:
            if file is not None:
                file.close()
        self._file, self._next = None, []

    def _newer(self) -> list[BinaryIO]:
        """Open the files that came after the current one, oldest first."""
        found: dict[int, BinaryIO] = {}
        current = None if self._file is None else os.fstat(self._file.fileno()).st_ino
        # From the newest back, so that a rotation meanwhile shows a file twice rather than never.
        for path in generations(self._path):
            try:
                file = path.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            inode = os.fstat(file.fileno()).st_ino
            if inode in found or inode == current:
                file.close()
            else:
                found[inode] = file
            if inode == current:
                break
        return list(reversed(found.values()))

    def _rest(self) -> Iterator[Record]:
        if self._file is None:
            return
        for line in self._file:
            if not line.endswith(b"\n"):  # being written, or torn: look at it again next time
                self._file.seek(-len(line), os.SEEK_CUR)
                return
            entry = _parse(line)
            if entry is None or (entry.pop("copy", False) and self._begun):
                continue
            self._begun = True
            yield entry


def read(path: Path) -> Iterator[Record]:
    """Yield all events of a log, oldest first, rotated files included; a line that is torn is passed over."""
    tail = Tail(path)
    try:
        yield from tail.each()
    finally:
        tail.close()


def _parse(line: bytes) -> Record | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and {"event", "time"} <= entry.keys() else None
