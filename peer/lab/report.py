"""What simulations came to, as the rows of a table: for people, as Markdown, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from peer.lab.results import Outcome, Point, Result


@dataclass(frozen=True)
class Measure:
    """A mean over seeds, and the standard deviation of one seed from it; None of a single one."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Measure:
        """Sum up one value for each seed."""
        if not all(map(math.isfinite, values)):
            return cls(math.nan, None)
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "not finite"
        return f"{self.mean:.3f}" + ("" if self.deviation is None else f" ± {self.deviation:.3f}")


@dataclass(frozen=True)
class Row:
    """One run of a grid over the seeds that are done.

    Losses in nats per token: heldout_average of the peers' averaged weights, heldout_peers the mean over single peers,
    worst_peer the highest of any peer and seed. bytes_per_round: sent by a peer, mean. model_share: that as a share of
    the model in float32. difference_percent: of heldout_average from the reference's, over the seeds that both have
    done; None without any. seconds_to_reference: until heldout_average was down to the reference's last one, simulated,
    mean over these seeds; None where one never was. reference: its label.
    """

    label: str
    algorithm: str
    peers: int
    rounds: int
    seeds: tuple[int, ...]
    planned: int
    heldout_average: Measure
    heldout_peers: Measure
    worst_peer: float
    disagreement: float
    bytes_per_round: float
    model_share: float
    seconds_simulated: float
    optimizer_bytes: int
    difference_percent: float | None
    seconds_to_reference: float | None
    reference: str


def row(
    label: str,
    results: Mapping[int, Result],
    planned: int,
    model_bytes: int,
    reference: Mapping[int, Result],
    reference_label: str = "",
) -> Row:
    """Sum up a run. results: seed → what it left, at least one; reference: of what it is compared with."""
    outcomes = {seed: result.outcome for seed, result in results.items()}
    targets = {seed: result.outcome for seed, result in reference.items()}
    every = list(outcomes.values())
    sent = fmean(each.bytes_per_round for each in every)
    return Row(
        label=label,
        algorithm=every[0].algorithm,
        peers=every[0].peers,
        rounds=every[0].rounds,
        seeds=tuple(outcomes),
        planned=planned,
        heldout_average=Measure.of([each.heldout_average for each in every]),
        heldout_peers=Measure.of([fmean(each.heldout_peers) for each in every]),
        worst_peer=_highest([loss for each in every for loss in each.heldout_peers]),
        disagreement=fmean(each.disagreement for each in every),
        bytes_per_round=sent,
        model_share=sent / model_bytes,
        seconds_simulated=fmean(each.seconds_simulated for each in every),
        optimizer_bytes=max(each.optimizer_bytes for each in every),
        difference_percent=_difference(outcomes, targets),
        seconds_to_reference=_seconds_to({seed: result.points for seed, result in results.items()}, targets),
        reference=reference_label,
    )


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("run", lambda row: row.label),
    ("seeds", lambda row: f"{len(row.seeds)}/{row.planned}"),
    ("held-out, average", lambda row: str(row.heldout_average)),
    ("difference", lambda row: "-" if row.difference_percent is None else f"{row.difference_percent:+.2f} %"),
    ("held-out, peers", lambda row: str(row.heldout_peers)),
    ("worst peer", lambda row: _finite(row.worst_peer, ".3f")),
    ("disagreement", lambda row: _finite(row.disagreement, ".2g")),
    ("kB a round", lambda row: f"{row.bytes_per_round / 1e3:,.1f}"),
    ("of a model", lambda row: share(row.model_share)),
    ("simulated s", lambda row: f"{row.seconds_simulated:,.0f}"),
    ("s to reference", lambda row: "-" if row.seconds_to_reference is None else f"{row.seconds_to_reference:,.0f}"),
    ("optimizer kB", lambda row: f"{row.optimizer_bytes / 1e3:,.0f}"),
)
"""Heading and cell of the table for people."""

LEGEND = (
    "Losses are in nats per token, ± the standard deviation over seeds: of the peers' averaged weights, and of single "
    "peers (the mean of them, and the highest of all seeds). Difference: of the average from that of the run's "
    "reference, over the seeds that both have done; the reference is '{reference}', or what is named in brackets. "
    "Disagreement: the root mean square distance of the peers' weights from their mean, over the mean's norm. kB a "
    "round: sent by one peer, meetings after the last round included; of a model: that as a share of its weights in "
    "float32. Simulated s: to the end, and until the average's loss was that with which the reference ends. Optimizer "
    "kB: what one peer's inner optimizer keeps in memory."
)


def share(value: float) -> str:
    """Return a share of a model: 1/45, or a multiple of it."""
    if value <= 0:
        return "0"
    if value > 0.95:
        return f"{value:.2f} ×"
    return f"1/{1 / value:.1f}" if value > 0.1 else f"1/{1 / value:,.0f}"


def named(rows: Sequence[Row], reference: str) -> list[Row]:
    """Return the rows with the reference in the label of those that have another one than that of the table."""
    return [
        row if row.reference in ("", reference) else replace(row, label=f"{row.label} [{row.reference}]")
        for row in rows
    ]


def markdown(rows: Sequence[Row], reference: str) -> str:
    """Return the table as Markdown, with what its columns mean below."""
    headings = [heading for heading, _ in COLUMNS]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    lines += [[cell(row).replace("|", "\\|") for _, cell in COLUMNS] for row in named(rows, reference)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{LEGEND.format(reference=reference)}\n"


def record(rows: Sequence[Row], reference: str) -> dict[str, Any]:
    """Return the table as one JSON object; what isn't known, or isn't finite, is None."""
    kept = [{key: value for key, value in asdict(row).items() if key != "planned"} for row in rows]
    plain: dict[str, Any] = _plain({"reference": reference, "runs": kept})
    return plain


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """Return what came out of one simulation as one JSON object; what isn't finite is None."""
    plain: dict[str, Any] = _plain(asdict(outcome))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _difference(outcomes: Mapping[int, Outcome], reference: Mapping[int, Outcome]) -> float | None:
    common = [seed for seed in outcomes if seed in reference]
    if not common:
        return None
    own, other = (fmean(each[seed].heldout_average for seed in common) for each in (outcomes, reference))
    percent = 100 * (own / other - 1) if other else math.nan
    return percent if math.isfinite(percent) else None


def _seconds_to(courses: Mapping[int, Sequence[Point]], reference: Mapping[int, Outcome]) -> float | None:
    reached = [first_below(courses[seed], reference[seed].heldout_average) for seed in courses if seed in reference]
    times = [each for each in reached if each is not None]
    return fmean(times) if times and len(times) == len(reached) else None


def first_below(points: Sequence[Point], loss: float) -> float | None:
    """Return the simulated second at which the average's held-out loss was down to `loss`, on a line between points."""
    before: Point | None = None
    for point in points:
        if point.heldout_average <= loss:
            if before is None:
                return point.seconds
            share = (before.heldout_average - loss) / (before.heldout_average - point.heldout_average)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def _highest(values: Sequence[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.nan


def _finite(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "not finite"
