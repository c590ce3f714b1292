"""What a daemon does or did, folded from its event log; live or not, from its home's lock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from peer import events
from peer.errors import ConfigError
from peer.events import Record
from peer.home import Home


@dataclass(frozen=True)
class Failure:
    """The last meeting that failed: with whom, why (one stable word, one sentence), when (ISO-8601)."""

    partner: str | None
    reason: str
    detail: str
    time: str


@dataclass(frozen=True)
class Paused:
    """Why a daemon waits: one stable word, one sentence, since when (ISO-8601)."""

    reason: str
    detail: str
    time: str


@dataclass(frozen=True)
class Stopped:
    """How the daemon ended: "finished", "signal" or "error", a sentence, when (ISO-8601)."""

    reason: str
    detail: str
    time: str


@dataclass
class Status:
    """The last life of a home's daemon, from its last `start` on. Counts and bytes are since that start.

    running, pid, uptime_s: as the home's lock says; pid and uptime_s are None when it doesn't run.
    rounds: of the whole run, 0 where an older version has not said. paused: why it waits, None while it takes part.
    stall_s, round_s: what training lost to meetings in the last round, and how long that was; None before the first.
    choice: how it means to meet others, and why, in one sentence; empty before it has chosen.
    loss: mean training loss of the last round (nats a token), None before the first one and when it isn't finite.
    optimizer_bytes: memory of the inner optimizer, None before the first round.
    partner: of the last meeting. skipped: reason → how many meetings were declined or failed for it.
    checkpoint_round, checkpoint_time: of the last checkpoint, an earlier life's if this one has written none.
    stopped: None while it runs, and after it was killed. started, heard: time of its first and its last event.
    """

    running: bool = False
    pid: int | None = None
    uptime_s: float | None = None
    run_id: str = ""
    name: str = ""
    model: str = ""
    peer_id: str = ""
    parameters: int = 0
    device: str = ""
    dtype: str = ""
    how: str = ""
    version: str = ""
    round: int = 0
    rounds: int = 0
    loss: float | None = None
    lr: float | None = None
    optimizer_bytes: int | None = None
    stall_s: float | None = None
    round_s: float | None = None
    choice: str = ""
    peers: int = 0
    partner: str | None = None
    last_failure: Failure | None = None
    meetings: int = 0
    declined: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    checkpoint_round: int | None = None
    checkpoint_time: str | None = None
    addresses: list[str] = field(default_factory=list)
    bootstraps: list[str] = field(default_factory=list)
    started: str = ""
    heard: str = ""
    paused: Paused | None = None
    stopped: Stopped | None = None


# Event → the fields that Status takes over from it. A round's counts are cumulative, so they also make up for
# meetings whose own events are no longer in the log.
_IDENTITY = ("pid", "run_id", "name", "model", "peer_id", "parameters", "device", "dtype", "how", "version")
_COUNTS = ("meetings", "declined", "failed", "bytes_sent", "bytes_received")
_TAKEN = {
    "start": (*_IDENTITY, "addresses", "bootstraps", "round", "rounds"),
    "round": (*_COUNTS, "round", "loss", "lr", "peers", "partner", "optimizer_bytes", "stall_s"),
    "meeting": ("partner",),
    "catch-up": ("round",),
}


def fold(records: Iterable[Record]) -> Status:
    """Fold events, oldest first, into the status of the last life among them. Pure; unknown kinds are passed over."""
    status = Status()
    for record in records:
        kind = record["event"]
        if kind == "start":
            status = Status(
                checkpoint_round=status.checkpoint_round,
                checkpoint_time=status.checkpoint_time,
                started=record["time"],
            )
        for name in _TAKEN.get(kind, ()):
            if name in record:  # an older version may have written the log
                setattr(status, name, record[name])
        if kind == "meeting":
            status.meetings += 1
            status.bytes_sent += record["bytes_sent"]
            status.bytes_received += record["bytes_received"]
        elif kind == "skip":
            _skip(status, record)
        elif kind == "checkpoint":
            status.checkpoint_round, status.checkpoint_time = record["round"], record["time"]
        elif kind == "round":
            status.round_s = record["seconds"]
        elif kind == "choice":
            status.choice = record["why"]
        elif kind == "pause":
            status.paused = Paused(record["reason"], record["detail"], record["time"])
        elif kind == "resume":
            status.paused = None
        elif kind == "stop":
            status.stopped = Stopped(record["reason"], record["detail"], record["time"])
        status.heard = record["time"]
    return status


def _skip(status: Status, record: Record) -> None:
    reason = record["reason"]
    status.skipped[reason] = status.skipped.get(reason, 0) + 1
    if record["outcome"] == "failed":
        status.failed += 1
        status.last_failure = Failure(record["partner"], reason, record["detail"], record["time"])
    else:
        status.declined += 1


def status(home: Home, now_s: float | None = None) -> Status:
    """Return what the home's daemon does, or did before it stopped; raises `ConfigError` if there never was one."""
    holder = home.holder()
    found = fold(events.read(home.events))
    if holder is None and not found.heard:
        raise ConfigError(
            f"no daemon has run in home '{home.path}' yet; start one with: peer join, or name its folder with --home"
        )
    if holder is None or not holder.live:
        return replace(found, pid=None)
    if found.pid != holder.pid:  # it is coming up, and the log still tells of the one before
        paused = found.paused
        if (
            paused and datetime.fromisoformat(paused.time).timestamp() + 0.001 < holder.started
        ):  # which has no more digits
            paused = None
        found = Status(checkpoint_round=found.checkpoint_round, checkpoint_time=found.checkpoint_time, paused=paused)
    if found.paused is None and (asked_s := home.paused_s) is not None:
        asked = datetime.fromtimestamp(asked_s).astimezone().isoformat(timespec="seconds")
        found = replace(found, paused=Paused("paused", "peer pause was asked for; it is about to leave", asked))
    uptime_s = max(0.0, (time.time() if now_s is None else now_s) - holder.started)
    return replace(found, running=True, pid=holder.pid, uptime_s=uptime_s, run_id=holder.run_id, peer_id=holder.peer_id)
