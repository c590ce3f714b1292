#!/usr/bin/env python3
"""Measure for how much of the time training waits for the other peer, over lines of different speed.

Two peers on an emulated internet, 100 ms apart there and back: peerloom, peerloom with meetings in the foreground, and
DiLoCo over hivemind's averager, beside the same two processes alone. How to read the table: README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a file

from benchmarks.course import Course, check, course
from benchmarks.fleet import Fleet, Kind
from benchmarks.report import machine
from benchmarks.table import table
from benchmarks.worker import Failed
from peer.errors import ConfigError
from peer.manifest import Manifest
from tests.wan import Line

MODEL = "gpt-10m"
PEERS = 2
RATES_MBIT = (1000.0, 100.0, 20.0, 5.0)
LATENCY_MS = 25.0
"""Of a line, one way; a packet crosses two of them, and its answer too."""

ROUND_S, ROUNDS = 15.0, 3
QUICK_RATES_MBIT, QUICK_ROUND_S, QUICK_ROUNDS = (20.0,), 10.0, 2
WARM_UP = 1
"""So many rounds come before those that are counted: links are unknown, and memory is new."""

FEWER = {"foreground": 1, "diloco": 1}
"""Rounds less than ours, whose meetings vary most."""

SLOW_MBIT, SLOW_ROUNDS = 10.0, 1
"""Where an all-reduce takes longer than a round, this many rounds of DiLoCo are enough: they are all alike."""

JUMBO_MBIT, JUMBO_BYTES, PACKET_BYTES = 100.0, 9000, 1500
"""From this rate on packets are larger, so that emulating the line does not take the processor from who is measured."""

NAMES: dict[Kind, str] = {
    "alone": "alone",
    "peerloom": "peerloom",
    "foreground": "… in the foreground",
    "diloco": "DiLoCo, hivemind",
}
COMPARED: tuple[Kind, ...] = ("peerloom", "foreground", "diloco")


@dataclass(frozen=True)
class Row:
    """One kind of peers on one kind of lines.

    mbit: infinite for lines without a limit. others: the share of the processor that other programs had meanwhile.
    """

    kind: Kind
    mbit: float
    course: Course
    others: float


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--mbit", type=float, action="append", help=f"lines of this rate only; repeatable ({RATES_MBIT})"
    )
    parser.add_argument("--rounds", type=int, help=f"count so many rounds of peerloom (default: {ROUNDS})")
    parser.add_argument("--round-seconds", type=float, help=f"of inner steps (default: {ROUND_S:g})")
    parser.add_argument("--quick", action="store_true", help="20 Mbit/s only, two rounds of 10 s; two or three minutes")
    parser.add_argument("--keep", type=Path, help="leave homes, events and logs in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    rates = options.mbit or (QUICK_RATES_MBIT if options.quick else RATES_MBIT)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    round_s = options.round_seconds or (QUICK_ROUND_S if options.quick else ROUND_S)
    try:
        if options.keep is not None:
            rows = measure(rates, rounds, round_s, options.keep)
        else:
            with tempfile.TemporaryDirectory(prefix="peer-stall-") as folder:
                rows = measure(rates, rounds, round_s, Path(folder))
    except (ConfigError, Failed) as error:
        sys.exit(f"benchmarks/stall.py: {error}")
    print(json.dumps(plain(rows, round_s), indent=2) if options.json else text(rows, round_s))


def measure(rates: Sequence[float], rounds: int, round_s: float, folder: Path) -> list[Row]:
    """Return all rows, the peers that are alone first."""
    rows = [row("alone", math.inf, rounds, round_s, folder)]
    for mbit in rates:
        rows += [row(kind, mbit, rounds, round_s, folder) for kind in COMPARED]
    return rows


def row(kind: Kind, mbit: float, rounds: int, round_s: float, folder: Path) -> Row:
    """Run two peers for some rounds."""
    counted = max(1, rounds - FEWER.get(kind, 0))
    if kind == "diloco" and mbit < SLOW_MBIT:
        counted = min(counted, SLOW_ROUNDS)
    lines = [Line(up_mbit=mbit, down_mbit=mbit, latency_ms=LATENCY_MS)] * PEERS
    mtu = JUMBO_BYTES if mbit >= JUMBO_MBIT else PACKET_BYTES
    run = replace(run_of(round_s), rounds=1000 if kind != "diloco" else WARM_UP + counted)
    place = folder / f"{kind}-{mbit:g}"
    say(f"{NAMES[kind]}{'' if math.isinf(mbit) else f', {mbit:g} Mbit/s'}: {WARM_UP} + {counted} rounds")
    with Fleet(kind, run, place, lines, mtu, LATENCY_MS) as fleet:
        fleet.watch(WARM_UP + counted, within_s=120 + (WARM_UP + counted) * (4 * round_s + 120))
        check(fleet.places)
        found = Row(kind, mbit, course(kind, fleet.places, WARM_UP), fleet.others)
    one = found.course
    say(f"  {one.steps_per_s:.2f} steps/s, waited {one.waited:.2%}; other programs had {found.others:.0%}")
    return found


def run_of(round_s: float) -> Manifest:
    """Return what all peers train: small batches, so that a step takes about as long here as a large one on a GPU."""
    source = f'model = "{MODEL}"\nround_seconds = {round_s!r}\n[data]\nbatch = 2\nsequence_length = 128\n'
    schedule = '[schedule]\nkind = "constant"\nwarmup_rounds = 1.0\n[exchange]\ncodec = "auto"\n'
    return Manifest.parse(source + schedule)


# ------------------------------------------------------------------ what is printed


HEAD = (
    "Mbit/s",
    "what",
    "rounds",
    "steps",
    "steps/s",
    "× alone",
    "waited %",
    "meetings",
    "up MB",
    "down MB",
    "codec",
)


def text(rows: Sequence[Row], round_s: float) -> str:
    """Return the table, and what has to be known to read it."""
    lines: list[tuple[str, ...]] = []
    for before, each in zip([None, *rows], rows, strict=False):
        if before is not None and before.mbit != each.mbit:
            lines.append(())
        lines.append(_cells(each, rows[0]))
    here = machine()
    search_s = _search_s(rows)
    return "\n".join(
        [
            f"Two peers of {MODEL}, {4 * LATENCY_MS:.0f} ms apart, rounds of {round_s:g} s of inner steps; "
            "both together, without the first round",
            f"{here['cores']} cores, torch {here['torch']}, one torch thread a process",
            "",
            table(HEAD, lines, 2),
            "",
            f"hivemind: of each wait {search_s:.1f} s went by until the group was found.",
            f"Other programs had up to {max(each.others for each in rows):.0%} of the processor.",
        ]
    )


def plain(rows: Sequence[Row], round_s: float) -> dict[str, Any]:
    """Return everything as plain values, ratios too."""
    return {
        "model": MODEL,
        "peers": PEERS,
        "round_s": round_s,
        "round_trip_ms": 4 * LATENCY_MS,
        "machine": machine(),
        "rows": [_plain(each, rows[0]) for each in rows],
    }


def _plain(row: Row, alone: Row) -> dict[str, Any]:
    return {
        "what": row.kind,
        "mbit": None if math.isinf(row.mbit) else row.mbit,
        **asdict(row.course),
        "steps_per_s": row.course.steps_per_s,
        "times_alone": row.course.steps_per_s / alone.course.steps_per_s,
        "waited": row.course.waited,
        "others": row.others,
    }


def _cells(row: Row, alone: Row) -> tuple[str, ...]:
    one, meets = row.course, row.course.meetings > 0
    quiet = row.kind == "alone"
    return (
        "" if math.isinf(row.mbit) else f"{row.mbit:g}",
        NAMES[row.kind],
        str(one.rounds),
        str(one.steps),
        f"{one.steps_per_s:.2f}",
        f"{one.steps_per_s / alone.course.steps_per_s:.2f}",
        f"{100 * one.waited:.2f}",
        f"{one.meetings / one.rounds:.1f}" if meets else "",
        "" if quiet else f"{one.sent_bytes / one.rounds / 1e6:.2f}",
        "" if quiet else f"{one.received_bytes / one.rounds / 1e6:.2f}",
        ", ".join(sorted(one.codecs, key=lambda name: -one.codecs[name])) if meets else "" if quiet else "fp16",
    )


def _search_s(rows: Sequence[Row]) -> float:
    found = [row.course for row in rows if row.kind == "diloco"]
    return sum(one.search_s for one in found) / max(1, sum(one.rounds for one in found))


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
