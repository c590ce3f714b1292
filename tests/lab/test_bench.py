"""What is kept of a grid's simulations: which count as done, when they are refused, and who may fill the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.errors import ConfigError
from peer.lab import bench
from peer.lab.grid import Cell, Grid
from peer.lab.results import FILE, Outcome, Point, Recorder
from tests.lab.simulate_command import TEXT

CPU = torch.device("cpu")
POINT = Point(2, 1.0, 10.0, 2.0, 2.0, (2.0,), 0.0)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    (tmp_path / "lines.toml").write_text("[[peers]]\n")
    (tmp_path / "text.txt").write_text(TEXT)
    text = '[[run]]\nlabel = "a"\nrounds = 2\nlinks = "lines.toml"\ndata = { corpus = "text.txt" }'
    (tmp_path / "cell.toml").write_text(text)
    return Grid.load(tmp_path / "cell.toml").cells[0]


def leave(cell: Cell, out: Path, rounds: int | None) -> dict[str, Any]:
    """Write what a simulation would have left after some rounds; None: when it was killed. Return its settings."""
    recorded = bench.Sources().recorded(cell.experiment, CPU)
    cell.folder(out).mkdir(parents=True)
    with Recorder(cell.folder(out) / FILE, recorded) as recorder:
        recorder.point(POINT)
        if rounds is not None:
            recorder.outcome(Outcome("gasloc", 8, rounds, 2.0, (2.0,), 0.0, 10.0, 1.0, 0))
    return recorded


@pytest.mark.parametrize(("rounds", "whole"), [(2, True), (1, False), (None, False)])
def test_only_what_came_to_its_end_counts_as_done(cell: Cell, tmp_path: Path, rounds: int, whole: bool) -> None:
    found = bench.kept(cell, tmp_path, leave(cell, tmp_path, rounds))
    assert (found is not None) == whole
    if found is not None:
        assert (found.points, found.outcome.rounds) == ((POINT,), 2)


@pytest.mark.parametrize("text", [None, "", '{"kind": "experi'])
def test_nothing_or_a_torn_beginning_is_not_done(cell: Cell, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        cell.folder(tmp_path).mkdir(parents=True)
        (cell.folder(tmp_path) / FILE).write_text(text)
    assert bench.kept(cell, tmp_path, {}) is None


@pytest.mark.parametrize(("name", "file"), [("links", "lines.toml"), ("corpus", "text.txt")])
def test_results_of_a_file_that_has_changed_since_are_refused(cell: Cell, tmp_path: Path, name: str, file: str) -> None:
    recorded = leave(cell, tmp_path, 2)
    assert bench.Sources().recorded(cell.experiment, CPU) == recorded
    (tmp_path / file).write_text((tmp_path / file).read_text() + "# more\n")
    with pytest.raises(ConfigError, match=rf"results of other settings .*contents\.{name} was"):
        bench.kept(cell, tmp_path, bench.Sources().recorded(cell.experiment, CPU))


def test_results_of_a_simulation_that_ended_early_are_not_thrown_away_for_other_settings(
    cell: Cell, tmp_path: Path
) -> None:
    recorded = leave(cell, tmp_path, 1)
    with pytest.raises(ConfigError, match=r"results of other settings .*\(peers was 8, is 9\)"):
        bench.kept(cell, tmp_path, recorded | {"peers": 9})


def test_files_that_were_moved_are_the_same(cell: Cell, tmp_path: Path) -> None:
    before = bench.Sources().recorded(cell.experiment, CPU)
    (tmp_path / "there").mkdir()
    links = Path(str(cell.experiment.links)).rename(tmp_path / "there" / "lines.toml")
    text = Path(cell.experiment.run.data.corpus).rename(tmp_path / "there" / "text.txt")
    run = replace(cell.experiment.run, data=replace(cell.experiment.run.data, corpus=str(text)))
    assert bench.Sources().recorded(replace(cell.experiment, links=links, run=run), CPU) == before


def test_results_that_can_not_be_read_are_refused_with_the_run_they_belong_to(cell: Cell, tmp_path: Path) -> None:
    leave(cell, tmp_path, 2)
    (cell.folder(tmp_path) / FILE).write_text("garbage\n")
    with pytest.raises(ConfigError, match=rf"run '{cell.label}', seed 0: .*line 1.* or delete"):
        bench.kept(cell, tmp_path, {})


def test_of_many_settings_that_have_changed_some_are_named(cell: Cell, tmp_path: Path) -> None:
    recorded = leave(cell, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"\(peers was 8, is 9; a was null, is 1; b was null, is 1; and 2 more\)"):
        bench.kept(cell, tmp_path, recorded | {"peers": 9} | dict.fromkeys("abcd", 1))


def test_a_folder_of_a_grid_is_one_processs_and_nothing_else_is_in_it(tmp_path: Path) -> None:
    with (
        bench.held(tmp_path / "it"),
        pytest.raises(ConfigError, match="another process is filling"),
        bench.held(tmp_path / "it"),
    ):
        pass
    with bench.held(tmp_path / "it"):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds other things"), bench.held(tmp_path / "mine"):
        pass
