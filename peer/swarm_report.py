"""A swarm's report: one row for each peer, folded from its events, and what all of it came to. Pure."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peer.heldout import Assessment
from peer.tail import Record

Stage = Literal["waiting", "starting", "training", "done", "stopped", "failed"]
"""waiting: its process is not started yet. done: all rounds. stopped: it was asked to end before that, and did."""

ENDED: tuple[Stage, ...] = ("done", "stopped", "failed")


@dataclass
class Row:
    """One peer, as far as its events tell.

    number: 1, 2, ... how: where its State came from (see `peer.events.Start`). round: outer steps done; a newcomer's
    begin at its donor's. rounds: how many of them it took itself. first_loss, loss: mean training loss of its first and
    its latest round (nats a token; None when not finite, or before the first). rate: tokens a second in the latest.
    called: those of its meetings for which it was the caller. declined, failed: reason → how many of its meetings; what
    names no partner ("alone") is no meeting and is left out. why: what happened to one that failed.
    """

    number: int
    stage: Stage = "waiting"
    peer_id: str = ""
    how: str = ""
    round: int = 0
    rounds: int = 0
    first_loss: float | None = None
    loss: float | None = None
    rate: float = 0.0
    partner: str | None = None
    meetings: int = 0
    called: int = 0
    bytes_sent: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    why: str = ""
    _stop: Record | None = None

    def take(self, record: Record) -> None:
        """Fold in one more event; unknown kinds are passed over."""
        match record["event"]:
            case "start":
                self.stage, self.how = "training", record["how"]
                self.peer_id, self.round = record["peer_id"], record["round"]
            case "round":
                self._round(record)
            case "meeting":
                self.meetings += 1
                self.called += record["role"] == "caller"
                self.bytes_sent += record["bytes_sent"]
                self.partner = record["partner"]
            case "skip" if record["partner"] is not None:
                reasons = self.failed if record["outcome"] == "failed" else self.declined
                reasons[record["reason"]] += 1
            case "catch-up":
                self.round = record["round"]
            case "stop":
                self._stop = record

    def end(self, status: int, asked: bool = False) -> None:
        """Take note that the process ended, with its exit status, or minus the signal that killed it.

        asked: it was told to end; to die of SIGTERM, before it could do better, is then no failure.
        """
        reason = self._stop["reason"] if self._stop else None
        if status == 0 and reason in ("finished", "signal"):
            self.stage = "done" if reason == "finished" else "stopped"
            return
        if asked and status == -signal.SIGTERM:
            self.stage = "stopped"
            return
        self.stage = "failed"
        if self._stop and reason == "error":
            self.why = self._stop["detail"]
        elif status < 0:
            self.why = f"it was killed by {_signal_name(-status)}"
        else:
            self.why = f"it ended with exit status {status} and did not say why"

    @property
    def ended(self) -> bool:
        """Whether the peer will do nothing more."""
        return self.stage in ENDED

    @property
    def sent_per_round(self) -> float | None:
        """Bytes sent, all told, for each round that it took."""
        return self.bytes_sent / self.rounds if self.rounds else None

    def _round(self, record: Record) -> None:
        self.loss = record["loss"]
        if not self.rounds:
            self.first_loss = self.loss
        self.round, self.rounds = record["round"], self.rounds + 1
        self.rate = record["tokens"] / record["seconds"] if record["seconds"] else 0.0
        self.bytes_sent = record["bytes_sent"]  # counts meetings that failed, too
        self.partner = record["partner"]


@dataclass(frozen=True)
class Report:
    """What a swarm's training came to.

    rounds: of the run. assessment: its losses are in the order of rows. wall_s: from the start of the first process to
    the end of the evaluation. failures: a sentence for each daemon that did not end well.
    """

    rounds: int
    rows: tuple[Row, ...]
    assessment: Assessment
    wall_s: float
    failures: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        """Whether every daemon did all rounds and ended in order."""
        return not self.failures and all(row.stage == "done" for row in self.rows)

    @property
    def meetings(self) -> int:
        """Meetings held, each counted once: by the peer that called."""
        return sum(row.called for row in self.rows)

    @property
    def skipped(self) -> dict[str, int]:
        """Reason → how many meetings were declined or failed for it, the most frequent first; each side counts."""
        total = Counter[str]()
        for row in self.rows:
            total += row.declined + row.failed
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    @property
    def bytes_sent_per_round(self) -> float | None:
        """Mean over the peers that took a round."""
        rates = [rate for row in self.rows if (rate := row.sent_per_round) is not None]
        return sum(rates) / len(rates) if rates else None

    def record(self) -> dict[str, Any]:
        """Return the report as one JSON object; what isn't known, or isn't finite, is None."""
        sent = self.bytes_sent_per_round
        return {
            "peers": len(self.rows),
            "rounds": self.rounds,
            "heldout_start": _plain(self.assessment.start),
            "heldout_end": [_plain(loss) for loss in self.assessment.peers],
            "heldout_average_end": _plain(self.assessment.average),
            "meetings": self.meetings,
            "skipped": self.skipped,
            "bytes_sent_per_round": None if sent is None else round(sent),
            "disagreement": _plain(self.assessment.disagreement),
            "wall_s": round(self.wall_s, 1),
        }


def number_of(peer_id: str | None, rows: Sequence[Row]) -> int | None:
    """Return which peer has this id; None for nobody of this swarm."""
    return next((row.number for row in rows if peer_id and row.peer_id == peer_id), None)


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
