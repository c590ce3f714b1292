"""The benchmarks run, and what they print is consistent; how long anything takes is not looked at."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.core.codec import parse, parts
from peer.lab.grid import Grid
from peer.lab.links import Links
from peer.models.causal import outline
from peer.models.presets import resolve

ROOT = Path(__file__).parents[1]
CODEC = "rank4-int8"
OVERHEAD_BYTES = 2048
"""Offer, answer, Commit, Done and what surrounds the payload of some frames."""


def run(*arguments: str, name: str = "exchange") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    ended = run("--quick", "--codec", CODEC, "--json")
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


@pytest.mark.slow
def test_there_is_one_row_for_the_codec_that_was_asked_for(report: dict[str, Any]) -> None:
    assert [row["what"] for row in report["rows"]] == [CODEC]
    assert report["model"] == "gpt-10m"
    assert report["machine"]["torch_threads"] == 1


@pytest.mark.slow
def test_the_bytes_are_those_that_a_meeting_may_take(report: dict[str, Any]) -> None:
    model = outline(resolve("gpt-10m"))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert report["parameters"] == sum(weight.numel() for weight in model.parameters())
    cut = parts(shapes, parse(CODEC))
    budget = sum(sum(part.leg_bytes) * (1 if len(part.shape) > 1 else 0.25) for part in cut)
    row = report["rows"][0]
    assert 0.95 * budget < row["sent_bytes"] + row["received_bytes"] < budget + 2 * OVERHEAD_BYTES


@pytest.mark.slow
def test_the_two_models_came_together_equally_and_oppositely(report: dict[str, Any]) -> None:
    row = report["rows"][0]
    assert 0 < row["left"] <= row["promised"] < 0.11
    assert 0 < row["shift"] < 1e-4


@pytest.mark.slow
def test_ratios_are_those_of_the_times_beside_them(report: dict[str, Any]) -> None:
    hivemind = report["hivemind"]
    for row in (*report["rows"], hivemind):
        assert all(value > 0 for value in (row["wall_s"], row["raw_s"], row["cpu_s"]))
        assert len(row["peak_bytes"]) == 2
        assert all(0 <= peak < 1 << 30 for peak in row["peak_bytes"])
        assert math.isclose(row["times_raw"], row["wall_s"] / row["raw_s"])
        assert math.isclose(row["times_hivemind"], row["wall_s"] / hivemind["wall_s"])


@pytest.mark.slow
def test_hivemind_averaged_the_same_tensors(report: dict[str, Any]) -> None:
    hivemind = report["hivemind"]
    assert 0 < hivemind["left"] < 0.2
    assert hivemind["sent_bytes"] >= 2 * report["parameters"]  # half of the model in fp16, and the mean of the rest
    assert hivemind["wall_s"] <= hivemind["step_s"]


def test_an_unknown_codec_gets_a_sentence() -> None:
    ended = run("--codec", "rank0")
    assert ended.returncode == 1
    assert ended.stderr.startswith("benchmarks/exchange.py: unknown codec 'rank0': use none, int8")
    assert ended.stdout == ""


@pytest.mark.parametrize("name", ["algorithms", "curve", "slow-link"])
def test_a_grid_of_the_lab_can_be_simulated_as_it_is(name: str) -> None:
    grid = Grid.load(ROOT / "benchmarks" / f"{name}.toml")
    for cell in grid.cells:
        one = cell.experiment
        if one.links is not None:
            assert len(Links.load(one.links, one.peers).peers) == one.peers
        assert one.run.rounds > one.run.schedule.warmup_rounds
        assert one.run.data.corpus == "moby-dick"  # what is shipped
