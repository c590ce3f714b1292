"""How a swarm's rows look: while it trains, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from peer.swarm_report import Report, Row, number_of

from .words import counted, size

WIDTH = 120
"""Columns, where no terminal says how many it has."""


class Progress:
    """Shows rows as they change: on a terminal one line for each peer that updates, elsewhere a line for each round."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        self._rounds = rounds
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._told: dict[int, tuple[str, int]] = {}

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rows: Sequence[Row]) -> None:
        """Show what the rows say now."""
        if self._live is not None:
            self._live.update(progress(rows, self._rounds), refresh=True)
            return
        for row in rows:
            if self._told.get(row.number, ("waiting", 0)) != (row.stage, row.round):
                self._told[row.number] = (row.stage, row.round)
                self._console.print(sentence(row, rows, self._rounds), highlight=False, soft_wrap=True)


def progress(rows: Sequence[Row], rounds: int) -> Table:
    """Return the rows as a table for the time of training."""
    table = _table("peer", "state", "round", "loss", "partner", "meetings", "sent", "tokens/s")
    for row in rows:
        table.add_row(
            str(row.number),
            row.stage,
            f"{row.round}/{rounds}",
            _loss(row.loss),
            _partner(row, rows),
            str(row.meetings),
            size(row.bytes_sent),
            f"{row.rate:,.0f}" if row.rate else "-",
        )
    return table


def sentence(row: Row, rows: Sequence[Row], rounds: int) -> str:
    """Return a row as one line."""
    head = f"peer {row.number} {row.stage}"
    if not row.rounds:
        return f"{head} ({row.how}) from round {row.round}" if row.how else head
    return (
        f"{head}: round {row.round}/{rounds}, loss {_loss(row.loss)}, partner {_partner(row, rows)}, "
        f"{counted(row.meetings, 'meeting')}, {size(row.bytes_sent)} sent, {row.rate:,.0f} tokens/s"
    )


def outcome(report: Report) -> Table:
    """Return the final table."""
    table = _table(
        "peer", "rounds", "loss, first → last round", "held-out", "met", "declined", "failed", "sent a round"
    )
    for row, heldout in zip(report.rows, report.assessment.peers, strict=True):
        table.add_row(
            str(row.number),
            str(row.rounds),
            f"{_loss(row.first_loss)} → {_loss(row.loss)}",
            _loss(heldout),
            str(row.meetings),
            _reasons(row.declined),
            _reasons(row.failed),
            "-" if row.sent_per_round is None else size(row.sent_per_round),
        )
    table.add_section()
    table.add_row("average", "", "", _loss(report.assessment.average))
    table.add_row("at start", "", "", _loss(report.assessment.start))
    return table


def summary(report: Report) -> str:
    """Return what stands below the final table."""
    apart = report.assessment.disagreement
    lines = [
        f"{counted(len(report.rows), 'peer')}, {counted(report.rounds, 'round')}, "
        f"{counted(report.meetings, 'meeting')} (each counted by both its peers above), {report.wall_s:.0f} s"
    ]
    if report.bytes_sent_per_round is not None:
        lines.append(f"a peer sent {size(report.bytes_sent_per_round)} a round on average")
    if apart is not None:
        lines.append(
            f"the peers are {100 * apart:.2f} % apart: the root mean square distance of their weights from the "
            "average, over the average's norm"
        )
    return "\n".join(lines)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        words = heading in ("state", "declined", "failed")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "declined")
    return table


def _reasons(reasons: Counter[str]) -> str:
    if not reasons:
        return "0"
    words = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"{reasons.total()} ({words})"


def _partner(row: Row, rows: Sequence[Row]) -> str:
    number = number_of(row.partner, rows)
    return str(number) if number else (row.partner or "-")[:8]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
