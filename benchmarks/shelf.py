"""All checkpoints that peers write, kept while they run and read when all is over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.course import unix_s
from benchmarks.fleet import Place
from peer import checkpoint
from peer.core.state import Tensors


@dataclass(frozen=True)
class Kept:
    """A checkpoint of one peer. time_s: Unix time at which it was there."""

    round: int
    time_s: float
    home: Path


class Shelf:
    """Keeps them by hard links, which takes no time from who is measured; a daemon itself removes all but two."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self._folder, self._places = folder, places
        self._kept: list[list[Kept]] = [[] for _ in places]
        self._seen = [0 for _ in places]

    def look(self) -> None:
        """Keep what came since the last time, as the peers' records say."""
        for number, place in enumerate(self._places):
            for record in place.records[self._seen[number] :]:
                if record["event"] == "checkpoint":
                    home = self._folder / str(number) / str(record["round"])
                    if _link(Path(record["path"]), home / "checkpoints"):
                        self._kept[number].append(Kept(record["round"], unix_s(record["time"]), home))
            self._seen[number] = len(place.records)

    @property
    def kept(self) -> list[list[Kept]]:
        """Every peer's, the oldest first."""
        return self._kept


def weights(kept: Kept, run_id: str) -> Tensors:
    """Return the weights of one."""
    loaded = checkpoint.load(kept.home, run_id, ("weights",))
    assert loaded is not None
    return loaded.state.weights


def _link(source: Path, folder: Path) -> bool:
    """Put a checkpoint into a folder; False when it is gone already."""
    target = folder / source.name
    target.mkdir(parents=True)
    try:
        for file in source.iterdir():
            os.link(file, target / file.name)
    except FileNotFoundError:
        return False
    return True
