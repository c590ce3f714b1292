"""The charts' data against the points they show, and the files that come out."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from peer.errors import ConfigError
from peer.lab.plots import CHARTS, DPI, Chart, draw, figure, mean_of, spread
from peer.lab.results import Point

ROUNDS, BYTES, SECONDS, DISAGREEMENT = CHARTS


def point(number: int, loss: float = math.nan, **values: Any) -> Point:
    """Return a plain point of a round; without a loss it falls from 5.5."""
    loss = 5.5 / (1 + number) if math.isnan(loss) else loss
    plain = Point(number, 2.0 * number, 1e6 * number, loss, loss, (loss - 0.25, loss + 0.5), 0.125 * number)
    return replace(plain, **values)


def run(rounds: int = 5, **values: Any) -> list[Point]:
    return [point(number, **values) for number in range(rounds)]


def axes_of(picture: Figure) -> Axes:
    (axes,) = picture.axes
    return axes


def shown(picture: Figure) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line that goes by a name."""
    lines = {str(line.get_gid()): line for line in axes_of(picture).lines if line.get_gid() is not None}
    return {
        name: list(zip(*(np.asarray(each, dtype=float).tolist() for each in line.get_data()), strict=True))
        for name, line in lines.items()
    }


def rendered(picture: Figure) -> RendererBase:
    """Lay the picture out and return what measures its parts."""
    canvas: Any = FigureCanvasAgg(picture)
    canvas.draw()
    renderer: RendererBase = canvas.get_renderer()
    return renderer


def swatch(line: Line2D) -> bytes:
    """Return the pixels of a level line drawn in the style of a given one."""
    picture = Figure(figsize=(1, 0.2))
    sample: Any = Line2D([0, 1], [0.5, 0.5])
    sample.update_from(line)
    sample.set_clip_box(None)
    sample.set_clip_path(None)
    sample.set_transform(picture.transFigure)
    picture.add_artist(sample)
    canvas: Any = FigureCanvasAgg(picture)
    canvas.draw()
    return bytes(canvas.buffer_rgba())


def words(picture: Figure) -> list[str]:
    """Return all that is written by the axes' side, and below them."""
    legend = axes_of(picture).get_legend()
    texts = [*axes_of(picture).texts, *picture.texts, *(legend.get_texts() if legend is not None else [])]
    return [text.get_text().replace("\n", " ") for text in texts]


# ---------------------------------------------------------------- what is shown


def test_the_lines_are_the_points() -> None:
    series = {"gossip": run(), "DiLoCo": run(7)}
    assert shown(figure(ROUNDS, series)) == {
        name: [(each.round, each.heldout_average) for each in points] for name, points in series.items()
    }
    assert shown(figure(SECONDS, series)) == {
        name: [(each.seconds, each.heldout_average) for each in points] for name, points in series.items()
    }


def test_an_axis_that_is_logarithmic_leaves_out_what_is_0() -> None:
    series = {"gossip": run()}
    by_bytes, apart = figure(BYTES, series), figure(DISAGREEMENT, series)
    assert (axes_of(by_bytes).get_xscale(), axes_of(by_bytes).get_yscale()) == ("log", "linear")
    assert (axes_of(apart).get_xscale(), axes_of(apart).get_yscale()) == ("linear", "log")
    assert shown(by_bytes) == {"gossip": [(each.bytes, each.heldout_average) for each in run()[1:]]}
    assert shown(apart) == {"gossip": [(each.round, each.disagreement) for each in run()[1:]]}


def test_points_that_are_not_finite_are_left_out() -> None:
    points = [point(0), replace(point(1), heldout_average=math.nan), point(2), replace(point(3), seconds=math.nan)]
    assert shown(figure(ROUNDS, {"a": points})) == {"a": [(each, points[each].heldout_average) for each in (0, 2, 3)]}
    assert shown(figure(SECONDS, {"a": points})) == {"a": [(0.0, 5.5), (4.0, points[2].heldout_average)]}


def test_the_band_spans_the_lowest_and_the_highest_peer() -> None:
    points = [replace(point(number), heldout_peers=(3.0 + number, 9.0, math.nan, 2.0, 4.0)) for number in range(3)]
    (band,) = list(axes_of(figure(ROUNDS, {"a": points})).collections)
    assert isinstance(band, FillBetweenPolyCollection)
    (path,) = band.get_paths()
    corners = {(float(x), float(y)) for x, y in np.asarray(path.vertices)}
    assert corners == {(float(number), edge) for number in range(3) for edge in (2.0, 9.0)}


def test_disagreement_has_no_band() -> None:
    assert len(axes_of(figure(DISAGREEMENT, {"a": run()})).collections) == 0


def test_a_series_that_sends_nothing_is_a_level_line_at_its_last_loss() -> None:
    picture = figure(BYTES, {"gossip": run(), "alone": run(4, bytes=0.0)})
    assert [y for _, y in shown(picture)["alone"]] == [5.5 / 4, 5.5 / 4]
    assert len(shown(picture)["gossip"]) == 4


def test_where_nobody_sends_or_nobody_is_apart_the_axis_is_linear() -> None:
    series = {"alone": run(4, bytes=0.0, disagreement=0.0)}
    assert axes_of(figure(BYTES, series)).get_xscale() == "linear"
    assert shown(figure(DISAGREEMENT, series)) == {"alone": [(float(number), 0.0) for number in range(4)]}


def test_a_series_that_cannot_be_shown_is_named_below() -> None:
    series = {"gossip": run(), "DDP": run(disagreement=0.0), "lost": run(disagreement=math.nan)}
    picture = figure(DISAGREEMENT, series)
    assert list(shown(picture)) == ["gossip"]
    said = "DDP isn't shown: it is always 0; lost isn't shown: it is 0 or not finite throughout."
    assert said in words(picture)


def test_a_series_that_diverges_does_not_squeeze_the_others() -> None:
    wild = [*run(3), point(3, 1e4), point(4, 1e90)]
    picture = figure(ROUNDS, {"tame": run(), "wild": wild})
    low, high = axes_of(picture).get_ylim()
    assert 0 < low < 5.5 / 5 < 5.5 / 2 < high < 5.5
    assert "wild goes on above." in words(picture)
    assert shown(picture)["wild"][-1] == (4.0, 1e90)


def test_the_fall_from_chance_does_not_squeeze_what_comes_after_it() -> None:
    picture = figure(ROUNDS, {"a": run(), "b": run(6)})
    low, high = axes_of(picture).get_ylim()
    assert low < 5.5 / 6 < 5.5 / 2 < high < 5.5
    assert not any("above" in text for text in words(picture))


def test_what_most_series_do_is_seen_to_its_height() -> None:
    rising = [point(0), point(1, 4.0), point(2, 8.0), point(3, 3.0), point(4, 2.0)]
    for series in ({"a": rising}, {"a": rising, "b": rising, "c": run()}):
        picture = figure(ROUNDS, series)
        assert 8.0 < axes_of(picture).get_ylim()[1] < 12.0
        assert not any("above" in text for text in words(picture))


def test_a_short_series_that_only_falls_is_shown_whole() -> None:
    picture = figure(ROUNDS, {"a": run(3)})
    low, high = axes_of(picture).get_ylim()
    assert low < 5.5 / 3 - 0.25
    assert high > 5.5 + 0.5
    assert not any("above" in text for text in words(picture))


@pytest.mark.parametrize(
    ("last_s", "unit", "unit_s"),
    [
        (0.0, "seconds", 1),
        (0.5, "seconds", 1),
        (40.0, "seconds", 1),
        (1500.0, "minutes", 60),
        (2 * 3600.0, "minutes", 60),
        (5 * 3600.0, "hours", 3600),
        (40 * 86400.0, "days", 86400),
    ],
)
def test_time_is_labelled_in_the_unit_that_people_would_use(last_s: float, unit: str, unit_s: int) -> None:
    axes = axes_of(figure(SECONDS, {"a": [replace(point(0), seconds=0.0), replace(point(1), seconds=last_s)]}))
    assert axes.get_xlabel() == f"simulated {unit}"
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert axes.get_xticks().tolist() == pytest.approx([float(name) * unit_s for name in names])
    assert names[0] == "0"
    assert len(names) >= (4 if last_s else 1)
    assert all(len(name) <= 4 for name in names)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("count", [1, 8])
def test_up_to_8_series_have_their_names_beside_their_lines(count: int) -> None:
    names = [f"variant {number}" for number in range(count)]
    picture = figure(ROUNDS, {name: run() for name in names})
    assert axes_of(picture).get_legend() is None
    assert set(names) <= set(words(picture))


def test_more_series_have_a_legend_outside_the_axes_and_no_two_look_alike() -> None:
    names = [f"variant {number}" for number in range(20)]
    picture = figure(ROUNDS, {name: run() for name in names})
    renderer = rendered(picture)
    axes = axes_of(picture)
    legend = axes.get_legend()
    assert legend is not None
    assert words(picture)[-20:] == names
    window, around, page = (each.get_window_extent(renderer) for each in (legend, axes, picture))
    assert around.x1 < window.x0 < window.x1 <= page.x1
    assert page.y0 <= window.y0 < window.y1 <= page.y1
    assert len({swatch(line) for line in axes.lines}) == 20


def test_names_beside_their_lines_do_not_cover_each_other() -> None:
    names = ["a", "a name that is so long that it takes two lines or more of its own", *"cdefgh"]
    picture = figure(ROUNDS, {name: run() for name in names})
    renderer = rendered(picture)
    texts = [text for text in axes_of(picture).texts if text.get_text().replace("\n", " ") in names]
    boxes = sorted((text.get_window_extent(renderer) for text in texts), key=lambda box: float(box.y0))
    assert len(boxes) == 8
    assert all(one.y1 <= other.y0 for one, other in pairwise(boxes))


SPACED = st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.12)), min_size=1, max_size=8)


def touching(middles: Sequence[float], heights: Sequence[float]) -> bool:
    gaps = [(heights[at] + heights[at + 1]) / 2 for at in range(len(heights) - 1)]
    return any(middles[at + 1] - middles[at] < gap - 1e-9 for at, gap in enumerate(gaps))


@settings(deadline=None)
@given(SPACED)
def test_labels_are_spread_until_none_covers_another_and_all_stay_inside(labels: list[tuple[float, float]]) -> None:
    middles, heights = sorted(middle for middle, _ in labels), [height for _, height in labels]
    placed = spread(middles, heights)
    assert not touching(placed, heights)
    assert placed[0] >= heights[0] / 2 - 1e-9
    assert placed[-1] <= 1 - heights[-1] / 2 + 1e-9
    inside = middles[0] >= heights[0] / 2 and middles[-1] <= 1 - heights[-1] / 2
    if inside and not touching(middles, heights):
        assert placed == pytest.approx(middles)


def test_labels_that_want_one_place_are_spread_evenly_around_it() -> None:
    assert spread([0.5, 0.5, 0.5], [0.1, 0.1, 0.1]) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.1, 0.5, 0.52], [0.1, 0.1, 0.1]) == pytest.approx([0.1, 0.46, 0.56])


# ---------------------------------------------------------------- files

AWKWARD = {
    "$x_{$": run(),
    "_hidden": run(1),
    "alone": run(bytes=0.0, disagreement=0.0),
    "lost $x_{$": run(heldout_average=math.nan, disagreement=math.nan),
    "huge": [*run(3), point(3, 1e300, disagreement=1e300)],
    "no peers": [replace(each, heldout_peers=()) for each in run()],
}


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG as its header says."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.parametrize(
    "series",
    [
        {"one": run()},
        {"a single point": run(1)},
        {"all lost": run(heldout_average=math.nan, disagreement=math.nan)},
        AWKWARD,
        {f"a rather long name of a variant, number {number}": run() for number in range(24)},
    ],
    ids=["one", "a single point", "all lost", "awkward", "many"],
)
def test_the_charts_are_png_files_without_a_warning(series: dict[str, list[Point]], tmp_path: Path) -> None:
    paths = draw(series, tmp_path / "plots")
    assert [path.name for path in paths] == [
        "loss-rounds.png",
        "loss-bytes.png",
        "loss-seconds.png",
        "disagreement-rounds.png",
    ]
    assert sorted(paths) == sorted((tmp_path / "plots").iterdir())
    for path in paths:
        width, height = size_of(path)
        assert width == 8 * DPI
        assert height >= 4.8 * DPI
        assert 5_000 < path.stat().st_size < 2_000_000


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.file)
def test_every_chart_says_what_it_shows(chart: Chart) -> None:
    axes = axes_of(figure(chart, {"a": run()}))
    assert axes.get_title(loc="left") == chart.title != ""
    assert chart.subtitle in words(axes.get_figure(root=True))  # type: ignore[arg-type]
    assert axes.get_xlabel()


def test_without_points_there_is_a_sentence_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is nothing to draw; give at least one series"):
        draw({}, tmp_path / "plots")
    with pytest.raises(ConfigError, match="series 'b' has no points; let it finish a round, or leave it out"):
        draw({"a": run(), "b": []}, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write '.*plots/loss-rounds\.png': "):
        draw({"a": run()}, tmp_path / "plots")


def test_matplotlib_is_not_loaded_before_a_chart_is_drawn_and_pyplot_never(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from peer.lab.plots import draw
from peer.lab.results import Point
assert "matplotlib" not in sys.modules
draw({{"a": [Point(0, 0.0, 0.0, None, 1.0, (1.0,), 0.0)]}}, Path({str(tmp_path)!r}))
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60, env=environment)


# ---------------------------------------------------------------- several seeds


def test_the_mean_of_runs_is_taken_round_by_round() -> None:
    one = [Point(0, 0.0, 0.0, None, 5.0, (5.0, 6.0), 0.0), Point(1, 2.0, 10.0, 4.0, 3.0, (3.0, 3.5), 0.5)]
    other = [Point(0, 0.0, 0.0, None, 7.0, (8.0,), 0.0), Point(1, 4.0, 30.0, 5.0, 4.0, (4.0,), 1.0)]
    assert mean_of([one, other]) == [
        Point(0, 0.0, 0.0, None, 6.0, (5.0, 6.0, 8.0), 0.0),
        Point(1, 3.0, 20.0, 4.5, 3.5, (3.0, 3.5, 4.0), 0.75),
    ]


def test_the_mean_of_one_run_is_that_run() -> None:
    assert mean_of([run()]) == run()


def test_the_mean_has_the_rounds_that_all_runs_have() -> None:
    assert [each.round for each in mean_of([run(5), run(3), [point(4), point(1)]])] == [1]
    assert mean_of([run(5), []]) == []
    assert mean_of([]) == []


def test_a_run_that_diverged_is_not_averaged_away() -> None:
    (mean,) = mean_of([[point(0)], [replace(point(0), heldout_average=math.nan, train_loss=None)]])
    assert math.isnan(mean.heldout_average)
    assert mean.train_loss is None
