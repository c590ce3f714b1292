"""The TOML of lines: what it means, and what is said of mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from peer.errors import ConfigError
from tests.wan import Line, Lines

FULL = """
mtu = 9000
seed = 7

[[peers]]
count = 2
up_mbit = 20
down_mbit = 100.5
latency_ms = 15
jitter_ms = 3
loss = 0.01
queue_ms = 50
blackouts = [[10, 12.5], [60, 61]]

[[peers]]
"""


def load(folder: Path, text: str) -> Lines:
    path = folder / "lines.toml"
    path.write_text(text)
    return Lines.load(path)


def test_a_file_says_everything_of_every_line(tmp_path: Path) -> None:
    home = Line(20, 100.5, 15, 3, 0.01, 50, ((10, 12.5), (60, 61)))
    assert load(tmp_path, FULL) == Lines((home, home, Line()), mtu=9000, seed=7)


def test_what_is_left_out_is_unlimited_immediate_and_without_loss(tmp_path: Path) -> None:
    lines = load(tmp_path, "[[peers]]\nup_mbit = inf")
    assert lines.mtu == 1500
    (line,) = lines.hosts
    assert (line.up_mbit, line.down_mbit) == (math.inf, math.inf)
    assert (line.latency_ms, line.jitter_ms, line.loss, line.blackouts) == (0, 0, 0, ())


def test_lines_survive_the_way_through_json(tmp_path: Path) -> None:
    lines = load(tmp_path, FULL)
    assert Lines.of(json.loads(json.dumps(lines.table()))) == lines


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no hosts are described; write [[peers]]"),
        ("peers = 3", "'peers' is 3; give a list"),
        ("peers = [3]", "no hosts are described; write [[peers]]"),
        ("mtu = 100\n[[peers]]", "'mtu' is 100; give a number from 576 to 65535"),
        ("mtu = 1500.0\n[[peers]]", "'mtu' is 1500.0; give a whole number"),
        ("sed = 1\n[[peers]]", "unknown key 'sed'; did you mean 'seed'?"),
        ("[[peers]]\n[[peers]]\nup_mbits = 1", "unknown key 'up_mbits' in [[peers]] number 2; did you mean 'up_mbit'?"),
        ("[[peers]]\nblackout = []", "unknown key 'blackout' in [[peers]] number 1; did you mean 'blackouts'?"),
        ("[[peers]]\nup_mbit = 0", "'up_mbit' in [[peers]] number 1 is 0.0; give a number from 0.001 to 1e+06"),
        ("[[peers]]\nloss = 1.5", "'loss' in [[peers]] number 1 is 1.5; give a number from 0 to 1"),
        ('[[peers]]\nloss = "1 %"', "'loss' in [[peers]] number 1 is \"1 %\"; give a number"),
        ("[[peers]]\nlatency_ms = nan", "'latency_ms' in [[peers]] number 1 is NaN; give a number"),
        ("[[peers]]\ncount = 0", "'count' in [[peers]] number 1 is 0; give a number from 1 to 250"),
        ("[[peers]]\ncount = 200\n[[peers]]\ncount = 51", "251 hosts are described; one machine takes 250 at most"),
        ("[[peers]]\nblackouts = 3", "'blackouts' in [[peers]] number 1 is 3; give a list"),
        ("[[peers]]\nblackouts = [3]", "a blackout in [[peers]] number 1 is 3; give [from, to] in seconds"),
        ("[[peers]]\nblackouts = [[9, 3]]", "a blackout in [[peers]] number 1 is [9, 3]; give [from, to] in seconds"),
        ("[[peers]", "not TOML"),
    ],
)
def test_a_mistake_gets_a_sentence_that_names_the_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    assert str(raised.value).startswith(f"lines '{tmp_path / 'lines.toml'}': {says}")


def test_a_line_is_changed_by_the_names_of_the_file() -> None:
    line = Line(up_mbit=20, latency_ms=15)
    assert line.changed({"up_mbit": 5, "blackouts": [(1, 2)]}) == Line(up_mbit=5, latency_ms=15, blackouts=((1, 2),))
    with pytest.raises(ConfigError, match="unknown key 'latency'; did you mean 'latency_ms'"):
        line.changed({"latency": 3})
