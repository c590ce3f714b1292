"""docs/lab.md says what is there."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

from peer.lab.algorithms import ALGORITHMS
from peer.lab.graphs import GRAPHS
from peer.lab.grid import Grid
from peer.lab.links import Links
from peer.lab.results import Outcome

TEXT = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def blocks(text: str) -> list[str]:
    """Return what is indented, block by block."""
    return [
        block.replace("\n    ", "\n").strip() + "\n" for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)
    ]


def test_every_algorithm_and_graph_is_told_of_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Algorithms"), re.M)
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} - {"--algorithm"} == set(ALGORITHMS)
    graphs = section("Algorithms").partition("`--graph`")[2].partition("In a grid")[0]
    assert set(re.findall(r"`([a-z-]+)`", graphs)) == set(GRAPHS)


def test_constants_are_those_of_the_code() -> None:
    for name, eta, gamma in (("diloco", "η", "γ"), ("noloco", "η", "μ")):
        row = next(line for line in section("Algorithms").splitlines() if line.startswith(f"| `{name}`"))
        outer = asdict(ALGORITHMS[name].outer)
        assert f"{eta} {outer['eta']:g}" in row and f"{gamma} {outer['gamma']:g}" in row


def test_the_links_and_the_grid_that_are_shown_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "links.toml").write_text(next(block for block in blocks(section("Time")) if "[[peers]]" in block))
    assert [link.up_mbit for link in Links.load(tmp_path / "links.toml", 9).peers] == [20.0] * 7 + [1.0, 20.0]
    grid = next(block for block in blocks(section("Many at once")) if "[[run]]" in block)
    assert tomllib.loads(grid)["seeds"] == [0, 1, 2]
    (tmp_path / "grid.toml").write_text(grid)
    assert len(Grid.load(tmp_path / "grid.toml").cells) == 3 * (1 + 4)


def test_what_comes_out_is_told_of() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("What comes out"), re.M)
    keys = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert {field.name for field in fields(Outcome)} == keys
