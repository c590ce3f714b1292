"""Pictures of simulations: how the loss falls, by rounds, by bytes sent and by time, and how far the peers are apart.

matplotlib is imported in the functions that draw, for it takes a second; pyplot and a display are never needed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from peer.errors import ConfigError
from peer.lab.results import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

DPI = 150

DIRECT = 8
"""Up to so many series have their names beside their lines; more have a legend."""

# Okabe and Ito's colours, which colour-blind people can tell apart; brown in place of their yellow, which is too pale.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
_INK, _FAINT, _GRID = "#222222", "#6B6B6B", "#E4E4E4"

_LINE_HEIGHT = 0.048  # of one line of a name, as a share of the axes
_ENDLESS = 1e100  # from here on a number is as good as infinite, and matplotlib's arithmetic would overflow
_FEW = 3  # points; of a series with more, the first need not be seen
_CEILING = 1.25  # times what the middle series begins with: what is above would squeeze all others into a corner


@dataclass(frozen=True)
class Chart:
    """One picture. x, y: fields of `Point`. log: the logarithmic axis. band: shade from lowest to highest peer."""

    file: str
    title: str
    subtitle: str
    x: Literal["round", "bytes", "seconds"]
    y: Literal["heldout_average", "disagreement"]
    log: Literal["x", "y", ""] = ""
    band: bool = False


_LOSS = "Held-out loss of the peers' average"
_SHADE = "shade: lowest to highest loss of a single peer"

CHARTS = (
    Chart("loss-rounds.png", _LOSS, f"nats per token · {_SHADE}", "round", "heldout_average", band=True),
    Chart("loss-bytes.png", _LOSS, f"nats per token · {_SHADE}", "bytes", "heldout_average", log="x", band=True),
    Chart("loss-seconds.png", _LOSS, f"nats per token · {_SHADE}", "seconds", "heldout_average", band=True),
    Chart(
        "disagreement-rounds.png",
        "Disagreement of the peers",
        "how far the peers are apart",
        "round",
        "disagreement",
        log="y",
    ),
)

_X_LABELS = {"round": "rounds", "bytes": "bytes sent by a peer (mean)"}

_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def mean_of(runs: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of runs that differ in their seed: one point for each round that all of them have.

    heldout_peers are the peers of all runs together, so that a band spans peers and seeds. A run that diverged makes
    the mean NaN from there on, since a mean of the others would hide it.
    """
    by_round = [{point.round: point for point in run} for run in runs]
    common = set[int].intersection(*(set(points) for points in by_round)) if by_round else set[int]()
    return [_mean([points[number] for points in by_round]) for number in sorted(common)]


def draw(series: Mapping[str, Sequence[Point]], folder: Path) -> list[Path]:
    """Write all charts as PNG files into a folder, which is made; raises `ConfigError` when a series is empty.

    series: name → points, in the order of rounds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    paths = []
    for chart in CHARTS:
        canvas = FigureCanvasAgg(figure(chart, series))
        path = folder / chart.file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            canvas.figure.savefig(path, dpi=DPI)
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error.strerror}") from error
        paths.append(path)
    return paths


def figure(chart: Chart, series: Mapping[str, Sequence[Point]]) -> Figure:
    """Return one chart; each series is a line, its name the line's gid, of the points that can be shown.

    Not shown are NaN and, on a logarithmic axis, 0; an axis on which all is 0 is linear instead. By bytes, a series
    that sent none is a level line at its last loss. Series that are missing, or go on above the axes, are named below.
    """
    from matplotlib.figure import Figure

    _check(series)
    picture = Figure(
        figsize=(8, max(4.8, 0.22 * sum(_wrap(name).count("\n") + 1 for name in series))),
        layout="constrained",
        facecolor="white",
    )
    axes = picture.add_subplot()
    _scale(chart, axes, series)
    lines: dict[str, Line2D] = {}
    notes: list[str] = []
    for number, (name, points) in enumerate(series.items()):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        line = _line(chart, axes, points, colour, dash)
        if line is None:
            zero = all(getattr(point, chart.y) == 0 for point in points)
            notes.append(f"{name} isn't shown: it is {'always 0' if zero else '0 or not finite throughout'}")
        else:
            line.set_gid(name)
            lines[name] = line
    notes += _limit(axes, lines)
    _dress(chart, axes, series)
    (_legend if len(lines) > DIRECT else _labels)(axes, lines)
    if notes:
        text = "\n".join(textwrap.wrap("; ".join(notes) + ".", 120))
        picture.supxlabel(text, x=0.01, ha="left", fontsize=8, color=_FAINT).set_parse_math(False)
    return picture


def _check(series: Mapping[str, Sequence[Point]]) -> None:
    if not series:
        raise ConfigError("there is nothing to draw; give at least one series")
    for name, points in series.items():
        if not points:
            raise ConfigError(f"series '{name}' has no points; let it finish a round, or leave it out")


def _mean(points: Sequence[Point]) -> Point:
    train = [point.train_loss for point in points if point.train_loss is not None]
    return Point(
        round=points[0].round,
        seconds=fmean(point.seconds for point in points),
        bytes=fmean(point.bytes for point in points),
        train_loss=fmean(train) if len(train) == len(points) else None,
        heldout_average=fmean(point.heldout_average for point in points),
        heldout_peers=tuple(loss for point in points for loss in point.heldout_peers),
        disagreement=fmean(point.disagreement for point in points),
    )


# ---------------------------------------------------------------- lines


def _scale(chart: Chart, axes: Axes, series: Mapping[str, Sequence[Point]]) -> None:
    for axis, field, scale in (("x", chart.x, axes.set_xscale), ("y", chart.y, axes.set_yscale)):
        if chart.log == axis and any(getattr(point, field) > 0 for points in series.values() for point in points):
            scale("log")


def _line(chart: Chart, axes: Axes, points: Sequence[Point], colour: str, dash: Any) -> Line2D | None:
    """Draw one series; return None where no point of it can be shown."""
    style: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 1.8, "solid_capstyle": "round"}
    shown = [point for point in points if _fits(getattr(point, chart.y), axes.get_yscale())]
    if shown and axes.get_xscale() == "log" and not any(point.bytes > 0 for point in points):
        return axes.axhline(getattr(shown[-1], chart.y), **style | {"linewidth": 1.2})
    shown = [point for point in shown if _fits(getattr(point, chart.x), axes.get_xscale())]
    if not shown:
        return None
    xs = [getattr(point, chart.x) for point in shown]
    if chart.band:
        low, high = zip(*(_extremes(point.heldout_peers) for point in shown), strict=True)
        axes.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
    ys = [getattr(point, chart.y) for point in shown]
    (line,) = axes.plot(xs, ys, marker="o", markersize=4, markevery=[-1], **style)
    return line


def _fits(value: float, scale: str) -> bool:
    return abs(value) < _ENDLESS and (value > 0 or scale == "linear")


def _extremes(losses: Sequence[float]) -> tuple[float, float]:
    finite = [loss for loss in losses if abs(loss) < _ENDLESS]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)


def _ys(line: Line2D) -> list[float]:
    ys: list[float] = np.asarray(line.get_ydata(), dtype=float).tolist()
    return ys


def _limit(axes: Axes, lines: Mapping[str, Line2D]) -> list[str]:
    """Cut off the fall from chance that all series begin with, and what is far above it; say which come back there."""
    values = {name: _ys(line) for name, line in lines.items()}
    later = {name: ys[1:] if len(ys) > _FEW else ys for name, ys in values.items()}
    top = _CEILING * median([ys[0] for ys in later.values()] or [0.0])
    if 2 * sum(max(ys) > top for ys in later.values()) > len(later):
        top = _CEILING * median(map(max, later.values()))  # what most of them do is to be seen
    if axes.get_yscale() == "log" or not 0 < top < axes.get_ylim()[1]:
        return []
    low = min(map(min, values.values()))
    axes.set_ylim(low - 0.05 * (top - low), top)
    return [f"{name} goes on above" for name, ys in later.items() if max(ys) > top]


# ---------------------------------------------------------------- what stands around them


def _dress(chart: Chart, axes: Axes, series: Mapping[str, Sequence[Point]]) -> None:
    from matplotlib.ticker import EngFormatter, FixedFormatter, FixedLocator, LogLocator, MaxNLocator, NullFormatter

    axes.set_title(chart.title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=24)
    axes.annotate(chart.subtitle, (0, 1), (0, 8), textcoords="offset points", xycoords="axes fraction", color=_FAINT)
    axes.set_xlabel(_X_LABELS.get(chart.x, ""), color=_INK)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK, labelsize=9)
    if chart.x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    elif chart.x == "bytes":
        if axes.get_xscale() == "log":
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    else:
        times_s = (point.seconds for points in series.values() for point in points)
        last_s = max(filter(math.isfinite, times_s), default=0.0) or 1.0
        name, unit_s = next((each for each in _UNITS if last_s >= 3 * each[1]), _UNITS[-1])
        ticks = MaxNLocator(steps=[1, 2, 3, 5, 6, 10]).tick_values(0, last_s / unit_s)
        low, high = axes.get_xlim()
        ticks = [tick for tick in ticks if low <= tick * unit_s <= high]
        axes.xaxis.set_major_locator(FixedLocator([tick * unit_s for tick in ticks]))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
        axes.set_xlabel(f"simulated {name}")


def _wrap(name: str) -> str:
    return textwrap.fill(name, 30)


def _legend(axes: Axes, lines: Mapping[str, Line2D]) -> None:
    names = [_wrap(name) for name in lines]
    legend = axes.legend(
        list(lines.values()), names, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _labels(axes: Axes, lines: Mapping[str, Line2D]) -> None:
    """Write each line's name to the right of the axes, where the line ends or as near to that as there is room."""
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())
    to_axes = axes.transScale + axes.transLimits
    names = {name: _wrap(name) for name in lines}
    ends = {name: min(1.0, to_axes.transform((1.0, _ys(line)[-1]))[1]) for name, line in lines.items()}
    order = sorted(lines, key=lambda name: ends[name])
    heights = [_LINE_HEIGHT * (1 + names[name].count("\n")) for name in order]
    for name, middle in zip(order, spread([ends[name] for name in order], heights), strict=True):
        colour = lines[name].get_color()
        axes.annotate(
            "", (1.005, ends[name]), (1.03, middle), "axes fraction", arrowprops={"arrowstyle": "-", "color": colour}
        )
        text = axes.annotate(
            names[name], (1.035, middle), xycoords="axes fraction", va="center", fontsize=9, color=_INK
        )
        text.set_parse_math(False)


def spread(middles: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return where to put labels so that none covers another: their order stays, and they move as little as they must.

    middles: where each wants its middle, ascending; heights: how high each is. They stay within 0 and 1 if they fit.
    """
    offsets = [below + height / 2 for below, height in zip(accumulate(heights, initial=0.0), heights, strict=False)]
    # With the offsets taken off, middles that may touch but not pass each other are a sequence that doesn't fall. Least
    # squares under that condition: average neighbours that do fall (isotonic regression by pooling).
    pools: list[tuple[float, int]] = []
    for middle, offset in zip(middles, offsets, strict=True):
        pools.append((middle - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (value, count), (above, more) = pools.pop(-2), pools.pop()
            pools.append(((value * count + above * more) / (count + more), count + more))
    flat = [value for value, count in pools for _ in range(count)]
    return [max(0.0, min(value, 1.0 - sum(heights))) + offset for value, offset in zip(flat, offsets, strict=True)]
