"""peer status: what the daemon of a home does, or did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click

from peer.config import HOME
from peer.home import Home
from peer.status import Status, status

from .help import Command, examples, option
from .words import duration, size


@click.command(
    name="status",
    cls=Command,
    short_help="Show what this machine's peer is doing.",
    epilog=examples("peer status", "peer status --json", "peer status --home ~/second-peer"),
)
@option("--home", metavar="FOLDER", help=f"The home folder of the peer to ask about.  [default: {HOME}]")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(home: str | None, as_json: bool) -> None:
    """Show what this machine's peer is doing: round, loss, partners, bytes, and why its last meeting failed.

    It reads the peer's event log, so it works for one that has stopped, too, and says why it did.
    """
    found = status(Home(Path(home) if home else HOME))
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    click.echo(_headline(found))
    for label, text in _lines(found):
        click.echo(f"  {label:<13} {text}")


def _headline(found: Status) -> str:
    who = f"peer {found.peer_id}" if found.peer_id else "the daemon"
    if found.running:
        doing = "is running" if found.started else "is starting"
        if found.paused is not None:
            return f"{who} waits since {_moment(found.paused.time)}: {found.paused.detail} (process {found.pid})"
        return f"{who} {doing}: process {found.pid}, for {duration(found.uptime_s or 0.0)}"
    if found.stopped is None and not found.heard:
        return f"{who} is stopped: it ended before it began to train, or is a bootstrap node's"
    if found.stopped is None:
        return f"{who} is stopped: it was killed, or its machine went down; last heard of {_moment(found.heard)}"
    why = {"finished": "it finished", "signal": "it was asked to stop"}.get(found.stopped.reason, "an error")
    return f"{who} is stopped since {_moment(found.stopped.time)}: {why} ({found.stopped.detail})"


def _lines(found: Status) -> Iterator[tuple[str, str]]:
    if found.run_id:
        yield "run", f"{found.name} {found.run_id}".strip()
    if found.started:
        yield "model", f"{found.model}, {found.parameters:,} parameters, {found.dtype} on {found.device}"
        yield "round", f"{_round(found)}, loss {_loss(found)}"
        if found.optimizer_bytes is not None:
            yield "optimizer", f"{size(found.optimizer_bytes)} of memory"
        if found.stall_s is not None and found.round_s:
            yield "stalled", f"{found.stall_s / found.round_s:.2%} of the last round, for meetings"
        yield "peers", f"{found.peers} known, last partner {found.partner or 'none yet'}"
        yield "meetings", f"{found.meetings} done, {found.declined} declined, {found.failed} failed"
        if found.choice:
            yield "choice", found.choice
        yield "bytes", f"{size(found.bytes_sent)} sent, {size(found.bytes_received)} received"
    if found.skipped:
        counts = sorted(found.skipped.items(), key=lambda item: -item[1])
        yield "why not", ", ".join(f"{reason} {count}" for reason, count in counts)
    if found.last_failure is not None:
        failure = found.last_failure
        whom = f" with {failure.partner}" if failure.partner else ""
        yield "last failure", f"{failure.reason}{whom}, {_moment(failure.time)}: {failure.detail}"
    if found.checkpoint_time is not None:
        yield "checkpoint", f"round {found.checkpoint_round}, {_moment(found.checkpoint_time)}"
    if found.running:
        yield from (("address", address) for address in found.addresses)
        yield from (("bootstrap", address) for address in found.bootstraps)


def _round(found: Status) -> str:
    if not found.rounds:
        return str(found.round)
    landing = found.running and found.round >= found.rounds
    return f"{found.round} of {found.rounds}" + (", all done and meeting a last few times" if landing else "")


def _loss(found: Status) -> str:
    if found.loss is not None:
        return f"{found.loss:.4f}"
    return "unknown until a round is done" if found.lr is None else "not a finite number: training has diverged"


def _moment(stamp: str) -> str:
    return f"{datetime.fromisoformat(stamp).astimezone():%Y-%m-%d %H:%M:%S}"
