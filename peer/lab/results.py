"""What a simulation writes while it runs, and how that is read again: JSON Lines, one object a line.

The first line is {"kind": "experiment", ...its settings}, then come {"kind": "point", ...} as they are measured, and
at the end {"kind": "outcome", ...}; a simulation that was ended early has none. A number that isn't finite, such as the
loss of a diverged model, is written as null, since JSON has no word for it; null is read as NaN, and as None where the
field may be None.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, get_type_hints

from peer.errors import ConfigError

FILE = "results.jsonl"


@dataclass(frozen=True)
class Point:
    """What was measured after a round.

    bytes: sent so far, mean per peer. seconds: simulated so far. train_loss: mean of the round, None before the first.
    heldout_average: loss of the peers' averaged weights; heldout_peers: of each one's own. Losses in nats per token.
    disagreement: how far the peers are apart.
    """

    round: int
    seconds: float
    bytes: float
    train_loss: float | None
    heldout_average: float
    heldout_peers: tuple[float, ...]
    disagreement: float


@dataclass(frozen=True)
class Outcome:
    """What came out in the end; fields as of `Point`. optimizer_bytes: memory that the optimizers of one peer take."""

    algorithm: str
    peers: int
    rounds: int
    heldout_average: float
    heldout_peers: tuple[float, ...]
    disagreement: float
    bytes_per_round: float
    seconds_simulated: float
    optimizer_bytes: int


@dataclass(frozen=True)
class Result:
    """What a simulation left."""

    points: tuple[Point, ...]
    outcome: Outcome


Row = TypeVar("Row", Point, Outcome)


class Recorder:
    """Write a new file of results, line by line; each is in the file when its call returns.

    Raises `ConfigError` where the file exists already or can't be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if "kind" in settings:
            raise ValueError("a setting can't be called kind")
        self._path = path
        try:
            # Unbuffered, so that a full disk says so in the call whose line it refuses.
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise ConfigError(f"'{path}' holds results already; give another folder, or move them away") from error
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error.strerror}") from error
        self._write({"kind": "experiment", **settings})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def point(self, point: Point) -> None:
        """Append a point."""
        self._write({"kind": "point", **_plain(point)})

    def outcome(self, outcome: Outcome) -> None:
        """Append the outcome, the last line, and close the file."""
        self._write({"kind": "outcome", **_plain(outcome)})
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        data = json.dumps(entry, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            raise ConfigError(f"cannot write '{self._path}': {error.strerror}") from error
        if written != len(data):
            raise ConfigError(f"cannot write '{self._path}' any further; is the disk full?")


def read(path: Path) -> tuple[dict[str, Any], list[Point], Outcome | None]:
    """Return settings, points, and the outcome if there is one.

    A last line that was torn, because the simulation was killed while it wrote, is left out. Raises `ConfigError` with
    file and line for anything else that a `Recorder` doesn't write.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    if rest and _json(rest) is not None:
        lines.append(rest)  # no beginning of an object is one, so this one lost its end of line alone
    settings: dict[str, Any] | None = None
    points: list[Point] = []
    outcome: Outcome | None = None
    for number, line in enumerate(lines, 1):
        try:
            entry = _json(line) or {}
            kind = entry.pop("kind", None)
            if outcome is not None or (kind == "experiment") != (settings is None):
                raise _Malformed("stands in the wrong place: an experiment comes first and only once, an outcome last")
            if kind == "experiment":
                settings = entry
            elif kind == "point":
                points.append(_row(Point, entry))
            elif kind == "outcome":
                outcome = _row(Outcome, entry)
            else:
                raise _Malformed("is no experiment, no point and no outcome")
        except _Malformed as error:
            raise ConfigError(f"'{path}', line {number}, {error}; give a file that peer simulate wrote") from error
    if settings is None:
        raise ConfigError(f"'{path}', line 1, has no experiment; the simulation ended before it began")
    return settings, points, outcome


class _Malformed(Exception):
    """A line that no Recorder wrote; the text goes on after "line 3, "."""


def _plain(row: Point | Outcome) -> dict[str, Any]:
    return {field.name: _finite(getattr(row, field.name)) for field in fields(row)}


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(line: bytes) -> dict[str, Any] | None:
    """Return a line's object; None when it is none."""
    try:
        entry = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _row(kind: type[Row], entry: dict[str, Any]) -> Row:
    hints = get_type_hints(kind)
    if entry.keys() != hints.keys():
        names = ", ".join(sorted(entry.keys() ^ hints.keys()))
        raise _Malformed(f"has not the fields of its kind: {names}")
    return kind(**{name: _convert(name, entry[name], hint) for name, hint in hints.items()})


def _convert(name: str, value: Any, hint: Any) -> Any:
    if hint == tuple[float, ...] and isinstance(value, list):
        return tuple(_convert(name, item, float) for item in value)
    if value is None and hint in (float, float | None):
        return math.nan if hint is float else None
    if hint in (int, str) and type(value) is hint:
        return value
    # What JSON calls a number may be larger than any float.
    if hint in (float, float | None) and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise _Malformed(f"has another type of {name}")
