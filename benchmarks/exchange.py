#!/usr/bin/env python3
"""Measure one exchange between two peers, each a process, over gRPC on the loopback.

Beside every codec stands a plain socket copy of the same bytes between the same two processes, and the whole table
stands beside hivemind's averaging of the same tensors, all in one run. How to read the table: README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a file

from benchmarks.averager import Averaged, Averager
from benchmarks.cost import Cost
from benchmarks.pair import Shapes, parameter_count, promise, shapes_of
from benchmarks.report import Report, Row
from benchmarks.side import Comparison, Met, Side
from benchmarks.worker import Failed, Worker
from peer.core.codec import parse
from peer.errors import ConfigError

CODECS = ("none", "int8", "int4", "rank16-int8", "rank4-int4", "rank16-int4", "rank64-int4")
MODEL, REPETITIONS = "gpt-125m", 3
QUICK_MODEL, QUICK_REPETITIONS = "gpt-10m", 2
MOST_SHIFT = 1e-4
"""The sum of the two sides may move by the rounding of float32, some 1e-5 of a difference of one percent."""

WARM_UPS = 4
HIVEMIND_LEFT = 0.2
"""It rounds the models to fp16, not their difference, which leaves some 8 %; more says that it did not average."""


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", action="append", help=f"measure this one only; repeatable (default: {CODECS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MODEL} instead of {MODEL}, fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks/exchange.py reads memory and CPU time from /proc; run it on Linux")
    try:
        codecs = [parse(spec).spec for spec in options.codec or CODECS]
        report = measure(QUICK_MODEL if options.quick else MODEL, codecs, options.quick)
    except (ConfigError, Failed) as error:
        sys.exit(f"benchmarks/exchange.py: {error}")
    print(json.dumps(report.plain(), indent=2) if options.json else report.text())


def measure(model: str, codecs: Sequence[str], quick: bool) -> Report:
    """Return the whole table; raises `Failed` when something did not do what it should have."""
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    say(f"the shapes of {model}")
    shapes = shapes_of(model)
    averaged, hivemind_left = average(shapes, repetitions)
    with two_sides(shapes) as (caller, callee, port):
        hivemind = hivemind_row(caller, callee, averaged, hivemind_left)
        rows = tuple(codec_row(caller, callee, port, spec, repetitions) for spec in codecs)
    step_s = median(max(one.step_s for one in pair) for pair in averaged[1:])
    return Report(model, parameter_count(shapes), repetitions, rows, hivemind, step_s)


# ------------------------------------------------------------------ an exchange


@contextmanager
def two_sides(shapes: Shapes) -> Iterator[tuple[Worker, Worker, int]]:
    """Yield caller, callee, and the callee's gRPC port."""
    caller, callee = Worker("the caller", Side, shapes, True), Worker("the callee", Side, shapes, False)
    try:
        port, raw_port = callee.ask("listen")
        caller.ask("connect", raw_port)
        callee.ask("accept")
        yield caller, callee, port
    finally:
        caller.close()
        callee.close()


def codec_row(caller: Worker, callee: Worker, port: int, spec: str, repetitions: int) -> Row:
    """Measure one codec, after warm-ups that teach the peers what to expect, and check that it did what it promises."""
    exchanges: list[tuple[Met, Met]] = []
    raws_s: list[float] = []
    plains_s: list[float] = []
    for number in range(1 - WARM_UPS, repetitions + 1):
        both(caller, callee, "prepare", spec)
        callee.ask("expect")
        ours: Met = caller.ask("meet", port)
        theirs: Met = callee.ask("met")
        exchanges.append((ours, theirs))
        raws_s.append(raw(caller, callee, ours.sent_bytes, ours.received_bytes))
        plains_s.append(plain(caller, callee, ours.sent_bytes, ours.received_bytes))
        wall_s = took_s(ours.cost, theirs.cost)
        kind = number if number > 0 else "warm-up"
        say(f"{spec}: {kind}: {wall_s:.2f} s, plain gRPC {plains_s[-1]:.3f} s, raw {raws_s[-1]:.3f} s")
    callee.tell("show")
    comparison: Comparison = caller.ask("compare")
    promised = promise(parse(spec))
    check(spec, comparison, callee.hear(), promised)
    warm, last = exchanges[WARM_UPS:], exchanges[-1][0]
    return Row(
        what=spec,
        wall_s=median(took_s(a.cost, b.cost) for a, b in warm),
        sent_bytes=last.sent_bytes,
        received_bytes=last.received_bytes,
        cpu_s=median(a.cost.cpu_s + b.cost.cpu_s for a, b in warm),
        peak_bytes=(max(a.cost.peak_bytes for a, _ in exchanges), max(b.cost.peak_bytes for _, b in exchanges)),
        plain_s=median(plains_s[WARM_UPS:]),
        raw_s=median(raws_s[WARM_UPS:]),
        left=comparison.left,
        promised=promised,
        shift=comparison.shift,
    )


def raw(caller: Worker, callee: Worker, send_bytes: int, receive_bytes: int) -> float:
    """Return how long a plain copy of as many bytes takes, both ways at once."""
    callee.tell("copy", receive_bytes, send_bytes)
    ours: Cost = caller.ask("copy", send_bytes, receive_bytes)
    return took_s(ours, callee.hear())


def plain(caller: Worker, callee: Worker, send_bytes: int, receive_bytes: int) -> float:
    """Return how long as many bytes take over a plain stream of gRPC, both ways at once."""
    took: float = caller.ask("copy_plain", callee.ask("expect_plain", receive_bytes), send_bytes, receive_bytes)
    return took


def took_s(caller: Cost, callee: Cost) -> float:
    """Return the time from the caller's beginning until both were done."""
    return max(caller.ended_s, callee.ended_s) - caller.began_s


def check(spec: str, comparison: Comparison, callee_anchored: bool, promised: float) -> None:
    """Raise `Failed` unless the exchange did what it promises."""
    if not comparison.left <= promised:
        raise Failed(f"{spec} left {comparison.left:.3%} of the difference, and promises at most {promised:.3%}")
    if not comparison.shift <= MOST_SHIFT:
        raise Failed(f"{spec} moved the sum of the two sides by {comparison.shift:.3%} of their difference")
    if not (comparison.anchored and callee_anchored):
        raise Failed(f"{spec} did not move weights and anchor alike")


# ------------------------------------------------------------------ hivemind


def average(shapes: Shapes, repetitions: int) -> tuple[list[tuple[Averaged, Averaged]], float]:
    """Let hivemind average the same tensors, a warm-up first; return each time, and what was left of the difference."""
    results: list[tuple[Averaged, Averaged]] = []
    prefix = f"benchmark{time.monotonic_ns()}"
    say("hivemind: coming up")
    one, two = (Worker(f"hivemind peer {number}", Averager, shapes, number) for number in range(2))
    try:
        two.ask("join", prefix, one.ask("join", prefix, []))
        for number in range(repetitions + 1):
            both(one, two, "prepare")
            results.append(both(one, two, "step"))
            say(f"hivemind: {number or 'warm-up'}: {all_reduce_s(*results[-1]):.2f} s")
        left = sum(both(one, two, "left")) / 2
    finally:
        one.close()
        two.close()
    if not left <= HIVEMIND_LEFT:
        raise Failed(f"hivemind left {left:.3%} of the difference: it did not average")
    return results, left


def hivemind_row(caller: Worker, callee: Worker, averaged: list[tuple[Averaged, Averaged]], left: float) -> Row:
    """Return hivemind's row, with a plain copy of as many bytes beside it."""
    warm = averaged[1:]
    each_way = int(median(max(a.wire_bytes, b.wire_bytes) for a, b in warm)) // 2
    raws_s = [raw(caller, callee, each_way, each_way) for _ in averaged]
    plains_s = [plain(caller, callee, each_way, each_way) for _ in averaged]
    return Row(
        what="hivemind fp16",
        wall_s=median(all_reduce_s(a, b) for a, b in warm),
        sent_bytes=each_way,
        received_bytes=each_way,
        cpu_s=median(a.cost.cpu_s + b.cost.cpu_s for a, b in warm),
        peak_bytes=(max(a.cost.peak_bytes for a, _ in averaged), max(b.cost.peak_bytes for _, b in averaged)),
        plain_s=median(plains_s[1:]),
        raw_s=median(raws_s[1:]),
        left=left,
        promised=HIVEMIND_LEFT,
    )


def all_reduce_s(a: Averaged, b: Averaged) -> float:
    """Return the time from the first tensor on its way until both had the average."""
    return max(a.cost.ended_s, b.cost.ended_s) - min(a.cost.began_s, b.cost.began_s)


def both(one: Worker, two: Worker, word: str, *args: object) -> tuple[Any, Any]:
    """Give both the same order and return both results."""
    one.tell(word, *args)
    two.tell(word, *args)
    return one.hear(), two.hear()


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
