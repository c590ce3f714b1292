"""What a daemon tells, on a terminal or in a pipe."""

from __future__ import annotations

import json
import os
from typing import TextIO

from peer.tail import Record

from .words import counted, size


class Printer:
    """Prints lines at once. When nobody reads any more it goes on into the void: that is no reason to stop training."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._optimizer_told = False

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        try:
            print(sentence, file=self._out, flush=True)
        except OSError:
            # Not only for this line: what is left in the buffer would fail again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def json(self, record: Record) -> None:
        """Print an event as it stands in the log."""
        self.say(json.dumps(record))

    def event(self, record: Record) -> None:
        """Print an event for people, if it is news to them."""
        sentence = line(record)
        if sentence is not None:
            self.say(sentence)
        if record["event"] == "round" and not self._optimizer_told:
            self._optimizer_told = True
            self.say(f"the inner optimizer takes {size(record['optimizer_bytes'])} of memory")


def line(record: Record) -> str | None:
    """Return an event as one line for people; None for what they need not see as it happens."""
    match record["event"]:
        case "start":
            parameters = f"{record['parameters'] / 1e6:.1f} M parameters"
            return (
                f"peer {record['peer_id'][:8]} trains run {record['run_id'][:8]} ({record['name']}, {parameters}) "
                f"from round {record['round']} ({record['how']}) on {record['device']} in {record['dtype']}"
            )
        case "round":
            return _round(record)
        case "skip" if record["reason"] == "catch-up":
            return f"could not catch up{_with(record['partner'], ' from ')}: {record['detail']}"
        case "skip" if record["outcome"] == "failed":
            return f"meeting{_with(record['partner'])} failed: {record['detail']}"
        case "catch-up":
            return f"caught up with {record['donor'][:8]} at round {record['round']} in {record['seconds']:.1f} s"
        case "stop" if record["reason"] != "error":  # an error ends the command with a sentence of its own
            return f"stopped ({record['reason']}): {record['detail']}"
    return None


def _round(record: Record) -> str:
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
    rate = record["tokens"] / record["seconds"] if record["seconds"] else 0.0
    return (
        f"round {record['round']}: loss {loss}, {record['steps']} steps at {rate:,.0f} tokens/s, "
        f"{counted(record['peers'], 'peer')}, {counted(record['meetings'], 'meeting')}"
        f"{_with(record['partner'], ', last with ')}, {size(record['bytes_sent'])} sent"
    )


def _with(partner: str | None, words: str = " with ") -> str:
    return f"{words}{partner[:8]}" if partner else ""
