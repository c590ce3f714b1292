"""What happened, one documented JSON object each: the log that `peer status`, `peer swarm` and any tool read.

A line is {"time": ISO-8601 in UTC with milliseconds, "event": kind, ...the fields below}. A number that isn't finite
is written as null. `"lost": n` is added when the n events before this one could not be written (a full disk).
docs/events.md prints the same tables.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from peer.tail import Record as Record
from peer.tail import Tail as Tail
from peer.tail import generations
from peer.tail import read as read

LIMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class Start:
    """A daemon has its State and begins to train.

    peer_id: this peer, as others see it
    run_id: hash of the run's manifest
    name: the run's name, for people
    model: the preset or configuration file that was asked for
    parameters: numbers in the model
    device: what it trains on, as torch calls it
    dtype: what it computes in, as torch calls it
    round: outer steps done
    rounds: of the whole run
    how: where the State came from: "fresh" (the run's first weights), "resumed" (a checkpoint), "caught-up" (another
        peer), "fresh-alone" (first weights, because no other peer could be found)
    addresses: "host:port" under which others reach this peer, best first
    bootstraps: what others give to --bootstrap to find the swarm through this peer
    pid: process id
    version: of peerloom
    """

    kind: ClassVar[str] = "start"
    peer_id: str
    run_id: str
    name: str
    model: str
    parameters: int
    device: str
    dtype: str
    round: int
    rounds: int
    how: str
    addresses: tuple[str, ...]
    bootstraps: tuple[str, ...]
    pid: int
    version: str


@dataclass(frozen=True)
class Round:
    """An outer step was taken.

    round: outer steps done
    steps: inner steps done in this round
    loss: mean training loss of the round (nats a token)
    lr: inner learning rate at the end of the round
    tokens: read in this round
    seconds: wall time of the round
    drift: L2 norm of weights minus anchor, before the outer step
    peers: live peers known, without this one
    meetings: done since the start
    declined: offers declined since the start, by either side
    failed: meetings failed since the start
    bytes_sent: since the start
    bytes_received: since the start
    partner: peer id of the last partner, null before the first meeting
    stall_s: seconds that training lost to meetings in this round: it waited for a reader, or added corrections
    micro_batch: sequences that go through the model at once; a batch is made up of as many as it takes
    optimizer_bytes: memory of the inner optimizer, measured
    feedback: L2 norm of what the low-rank bases have left out so far, null without error feedback
    """

    kind: ClassVar[str] = "round"
    round: int
    steps: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    drift: float
    peers: int
    meetings: int
    declined: int
    failed: int
    bytes_sent: int
    bytes_received: int
    partner: str | None
    stall_s: float
    micro_batch: int
    optimizer_bytes: int
    feedback: float | None


@dataclass(frozen=True)
class Meeting:
    """A meeting was done: the correction is agreed, and added to weights and anchor at the next step boundary.

    partner: peer id
    role: of this peer: "caller" or "callee"
    round: outer steps done by this peer
    partner_round: outer steps done by the partner
    codec: how the difference travelled, e.g. "rank-int4", as both sides agreed
    budget_bytes: what it might cost, both ways together, as both sides agreed
    weight: w of X -= w C, as both sides agreed
    bytes_sent: in this meeting
    bytes_received: in this meeting
    seconds: wall time from the offer to the end
    rtt_s: round trip of the invitation, seconds; null for the callee
    up_bits_per_s: how fast this peer's bytes arrived, at the best; null if that could not be told
    correction: L2 norm of C
    """

    kind: ClassVar[str] = "meeting"
    partner: str
    role: str
    round: int
    partner_round: int
    codec: str
    budget_bytes: int
    weight: float
    bytes_sent: int
    bytes_received: int
    seconds: float
    rtt_s: float | None
    up_bits_per_s: float | None
    correction: float


@dataclass(frozen=True)
class Choice:
    """A peer chose how it means to meet others from now on, or chose noticeably otherwise.

    round: outer steps done
    meetings: a round; less than 1 for one in several rounds
    codec: the richest that it wishes for
    budget_bytes: what a meeting may cost, both ways together; a partner with less to spend makes it less
    up_bits_per_s: what this peer's link sends, as far as meetings have shown
    rtt_s: the median of the round trips to its partners, seconds
    why: one sentence for people
    """

    kind: ClassVar[str] = "choice"
    round: int
    meetings: float
    codec: str
    budget_bytes: int
    up_bits_per_s: float
    rtt_s: float
    why: str


@dataclass(frozen=True)
class Skip:
    """A meeting did not come about, or broke; nothing was applied.

    partner: peer id, null when it isn't known
    outcome: "declined" or "failed"
    reason: one stable word, listed in docs/protocol.md
    detail: one sentence for people: why, and what to do about it
    """

    kind: ClassVar[str] = "skip"
    partner: str | None
    outcome: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Checkpoint:
    """State was written to disk.

    round: outer steps done
    path: the checkpoint's folder
    size_bytes: of its tensors
    seconds: wall time that it took
    """

    kind: ClassVar[str] = "checkpoint"
    round: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class CatchUp:
    """State was fetched from another peer.

    donor: peer id
    round: outer steps done, the donor's
    size_bytes: of the tensors fetched
    seconds: wall time that it took
    """

    kind: ClassVar[str] = "catch-up"
    donor: str
    round: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Pause:
    """A peer has left the swarm for a while: it saved, withdrew, and neither trains nor meets.

    round: outer steps done
    reason: "paused" (peer pause), "hours", "quota" or "gpu" (another program uses it)
    detail: one sentence for people: why, and when or how it goes on
    """

    kind: ClassVar[str] = "pause"
    round: int
    reason: str
    detail: str


@dataclass(frozen=True)
class Resume:
    """A peer is back after a pause, and has caught up where it had to.

    round: outer steps done
    seconds: wall time of the pause
    """

    kind: ClassVar[str] = "resume"
    round: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    """The daemon ends. One that was killed leaves none.

    round: outer steps done
    reason: "finished" (all rounds done), "signal" (it was asked to) or "error"
    detail: one sentence for people
    """

    kind: ClassVar[str] = "stop"
    round: int
    reason: str
    detail: str


Event = Start | Round | Meeting | Choice | Skip | Checkpoint | CatchUp | Pause | Resume | Stop
EVENTS: tuple[type[Event], ...] = (
    Start,
    Round,
    Meeting,
    Choice,
    Skip,
    Checkpoint,
    CatchUp,
    Pause,
    Resume,
    Stop,
)


def record(event: Event, time_s: float) -> Record:
    """Return the event as it stands in the log; time_s is Unix time."""
    stamp = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "time": stamp,
        "event": event.kind,
        **{field.name: _plain(getattr(event, field.name)) for field in fields(event)},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


class EventLog:
    """Append events to a file, a line and a write each; safe to call from any thread.

    echo is called with every record too, in order. Past limit_bytes the file is moved to PATH.1, PATH.1 to PATH.2, up
    to PATH.3; the new file begins with a copy of the last `start`, marked "copy": true, so that it can be understood
    alone. A disk that refuses is no reason to stop training: what could not be written is counted in `lost`.
    """

    def __init__(
        self,
        path: Path,
        echo: Callable[[Record], None] | None = None,
        limit_bytes: int = LIMIT_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.lost = 0
        self._path = path
        self._echo = echo
        self._limit_bytes = limit_bytes
        self._now = now
        self._lock = threading.Lock()
        self._file: int | None = None
        self._start: Record | None = None

    def write(self, event: Event) -> None:
        """Append one event; never raises for the file's sake."""
        with self._lock:
            entry = record(event, self._now())
            if isinstance(event, Start):
                self._start = entry
            if self.lost:
                entry = {**entry, "lost": self.lost}
            try:
                self._append(entry)
                self.lost = 0
            except OSError:
                self.lost += 1
                self._release()
            if self._echo is not None:
                self._echo(entry)

    def close(self) -> None:
        """Close the file; idempotent. A later write opens it again."""
        with self._lock:
            self._release()

    def _append(self, entry: Record) -> None:
        data = _line(entry)
        file = self._open()
        size_bytes = os.fstat(file).st_size
        if size_bytes and size_bytes + len(data) > self._limit_bytes:
            self._rotate()
            file, size_bytes = self._open(), 0
            if self._start is not None and entry["event"] != Start.kind:
                data = _line({**self._start, "copy": True}) + data
        elif size_bytes and os.pread(file, 1, size_bytes - 1) != b"\n":
            data = b"\n" + data  # a daemon was killed while it wrote; its torn line stays a line of its own
        if os.write(file, data) != len(data):
            os.ftruncate(file, size_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._file

    def _rotate(self) -> None:
        self._release()
        names = generations(self._path)
        for older, newer in reversed(list(zip(names[1:], names[:-1], strict=True))):
            if newer.exists():
                newer.replace(older)

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(entry: Record) -> bytes:
    return json.dumps(entry, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"
