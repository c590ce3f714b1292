"""What a simulation writes is what is read again, torn or whole, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.lab import results
from peer.lab.results import Outcome, Point, Recorder

POINT = Point(3, 12.5, 2e6, 4.5, 4.25, (4.5, 4.0), 0.125)
OUTCOME = Outcome("gossip", 2, 30, 3.5, (3.75, 3.25), 0.5, 1e6, 90.0, 4096)
SETTINGS = {"algorithm": "gossip", "seed": 1, "rounds": [1, 2], "nested": {"a": None}}

POINTS = st.builds(Point)
OUTCOMES = st.builds(Outcome)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / results.FILE


def record(path: Path, points: list[Point], outcome: Outcome | None = None) -> None:
    with Recorder(path, SETTINGS) as recorder:
        for point in points:
            recorder.point(point)
        if outcome is not None:
            recorder.outcome(outcome)


def number(value: Any) -> Any:
    """Return what a value of a row should be read as; NaN as a word, since it equals nothing."""
    if isinstance(value, tuple):
        return tuple(number(item) for item in value)
    return "NaN" if isinstance(value, float) and not math.isfinite(value) else value


def expected(row: Point | Outcome) -> dict[str, Any]:
    values = {name: number(value) for name, value in asdict(row).items()}
    if values.get("train_loss") == "NaN":
        values["train_loss"] = None
    return values


# ---------------------------------------------------------------- there and back


def test_each_line_is_an_object_that_says_its_kind(path: Path) -> None:
    record(path, [POINT], OUTCOME)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "experiment", **SETTINGS},
        {
            "kind": "point",
            "round": 3,
            "seconds": 12.5,
            "bytes": 2e6,
            "train_loss": 4.5,
            "heldout_average": 4.25,
            "heldout_peers": [4.5, 4.0],
            "disagreement": 0.125,
        },
        {
            "kind": "outcome",
            "algorithm": "gossip",
            "peers": 2,
            "rounds": 30,
            "heldout_average": 3.5,
            "heldout_peers": [3.75, 3.25],
            "disagreement": 0.5,
            "bytes_per_round": 1e6,
            "seconds_simulated": 90.0,
            "optimizer_bytes": 4096,
        },
    ]


@settings(deadline=None)
@given(points=st.lists(POINTS, max_size=4), outcome=st.none() | OUTCOMES)
def test_what_was_written_is_read_again(points: list[Point], outcome: Outcome | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / results.FILE
        record(path, points, outcome)
        found = results.read(path)
        assert found[0] == SETTINGS
        assert [expected(point) for point in found[1]] == [expected(point) for point in points]
        assert (found[2] and expected(found[2])) == (outcome and expected(outcome))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_comes_back_as_nan_or_none(value: float, path: Path) -> None:
    record(path, [replace(POINT, train_loss=value, heldout_average=value, heldout_peers=(1.0, value))])
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["train_loss"], line["heldout_average"], line["heldout_peers"]) == (None, None, [1.0, None])
    (point,) = results.read(path)[1]
    assert point.train_loss is None
    assert math.isnan(point.heldout_average)
    assert point.heldout_peers[0] == 1.0
    assert math.isnan(point.heldout_peers[1])


def test_whole_numbers_are_read_as_the_floats_they_stand_for(path: Path) -> None:
    record(path, [])
    with path.open("a") as file:
        file.write(json.dumps({"kind": "point", **asdict(POINT), "bytes": 7}) + "\n")
    (point,) = results.read(path)[1]
    assert (point.bytes, type(point.bytes)) == (7.0, float)


def test_every_line_is_in_the_file_at_once(path: Path) -> None:
    recorder = Recorder(path, SETTINGS)
    assert results.read(path) == (SETTINGS, [], None)
    recorder.point(POINT)
    assert results.read(path) == (SETTINGS, [POINT], None)
    recorder.outcome(OUTCOME)
    assert results.read(path) == (SETTINGS, [POINT], OUTCOME)


# ---------------------------------------------------------------- torn and full


def test_a_file_torn_anywhere_after_its_first_line_gives_the_whole_lines_before(path: Path) -> None:
    record(path, [POINT, replace(POINT, round=4)], OUTCOME)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size_bytes in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:size_bytes])
        # A line that lost nothing but its end of line is whole.
        lines = sum(size_bytes >= end - 1 for end in ends)
        _, points, outcome = results.read(path)
        assert [point.round for point in points] == [3, 4][: lines - 1]
        assert outcome == (OUTCOME if lines == 4 else None)


@pytest.mark.parametrize("text", ["", '{"kind": "experi'])
def test_a_file_without_an_experiment_is_refused(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line 1, has no experiment; the simulation ended before it began"):
        results.read(path)


def test_a_disk_that_is_full_ends_the_recording_with_a_sentence(path: Path) -> None:
    # A limit on the size of files makes write() take a part of a line, as a disk does that fills up. It holds for a
    # whole process, so it gets one of its own.
    script = f"""
import resource
from pathlib import Path
from peer.errors import ConfigError
from peer.lab.results import Point, Recorder
path = Path({str(path)!r})
recorder = Recorder(path, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, {resource.RLIM_INFINITY}))
for part in ("any further; is the disk full?", "File too large"):
    try:
        recorder.point(Point(0, 0.0, 0.0, None, 1.0, (1.0,) * 50, 0.0))
    except ConfigError as error:
        assert part in str(error), error
    else:
        raise SystemExit("nothing was raised")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert results.read(path) == ({}, [], None)


def test_results_that_are_there_already_are_not_written_over(path: Path) -> None:
    record(path, [POINT])
    with pytest.raises(ConfigError, match="holds results already; give another folder"):
        Recorder(path, {})
    assert results.read(path) == (SETTINGS, [POINT], None)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write '.*nowhere/results\.jsonl': No such file"):
        Recorder(tmp_path / "nowhere" / results.FILE, {})
    with pytest.raises(ConfigError, match=r"cannot read '.*nowhere/results\.jsonl': No such file"):
        results.read(tmp_path / "nowhere" / results.FILE)


def test_nothing_is_written_after_the_outcome(path: Path) -> None:
    recorder = Recorder(path, SETTINGS)
    recorder.outcome(OUTCOME)
    with pytest.raises(ValueError, match="closed file"):
        recorder.point(POINT)


def test_a_setting_called_kind_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="can't be called kind"):
        Recorder(path, {"kind": "gossip"})
    assert not path.exists()


# ---------------------------------------------------------------- malformed

EXPERIMENT_LINE = '{"kind": "experiment"}'
POINT_LINE = json.dumps({"kind": "point", **asdict(POINT)})
OUTCOME_LINE = json.dumps({"kind": "outcome", **asdict(OUTCOME)})
ORDER = "stands in the wrong place"


@pytest.mark.parametrize(
    ("lines", "at", "said"),
    [
        ([POINT_LINE], 1, ORDER),
        ([EXPERIMENT_LINE, EXPERIMENT_LINE], 2, ORDER),
        ([EXPERIMENT_LINE, OUTCOME_LINE, POINT_LINE], 3, ORDER),
        ([EXPERIMENT_LINE, OUTCOME_LINE, OUTCOME_LINE], 3, ORDER),
        ([EXPERIMENT_LINE, ""], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, "nonsense", POINT_LINE], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, "[" * 100_000], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, "[]"], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, '{"kind": "pint"}'], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, '{"kind": ["point"]}'], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("0.125", "NaN")], 2, "is no experiment, no point and no outcome"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("bytes", "octets")], 2, "has not the fields of its kind: bytes, octets"),
        ([EXPERIMENT_LINE, OUTCOME_LINE.replace('"peers": 2, ', "")], 2, "has not the fields of its kind: peers"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("12.5", '"12.5"')], 2, "has another type of seconds"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("12.5", "true")], 2, "has another type of seconds"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("12.5", "1e999")], 2, "has another type of seconds"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("12.5", "9" * 400)], 2, "has another type of seconds"),
        ([EXPERIMENT_LINE, POINT_LINE.replace('"round": 3', '"round": 3.0')], 2, "has another type of round"),
        ([EXPERIMENT_LINE, POINT_LINE.replace('"round": 3', '"round": null')], 2, "has another type of round"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("[4.5, 4.0]", "4.5")], 2, "has another type of heldout_peers"),
        ([EXPERIMENT_LINE, POINT_LINE.replace("[4.5, 4.0]", "[[4.5]]")], 2, "has another type of heldout_peers"),
        ([EXPERIMENT_LINE, OUTCOME_LINE.replace('"gossip"', "7")], 2, "has another type of algorithm"),
    ],
)
def test_a_line_that_no_recorder_wrote_is_named(lines: list[str], at: int, said: str, path: Path) -> None:
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as caught:
        results.read(path)
    assert str(caught.value).startswith(f"'{path}', line {at}, ")
    assert said in str(caught.value)


def test_a_last_line_without_its_end_that_is_an_object_counts_and_is_refused_like_any(path: Path) -> None:
    path.write_text(f"{EXPERIMENT_LINE}\n{POINT_LINE}")
    assert results.read(path) == ({}, [POINT], None)
    path.write_text(f'{EXPERIMENT_LINE}\n{{"kind": "pint"}}')
    with pytest.raises(ConfigError, match="line 2, is no experiment"):
        results.read(path)
