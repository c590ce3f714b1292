"""`peer simulate compare` as people meet it: one table of many simulations, which goes on where it was interrupted."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.lab import results
from peer.lab.plots import CHARTS
from peer.lab.results import FILE
from tests.lab.simulate_command import DEADLINE_S, TEXT, files, has, peer, start, until

GRID = """
[common]
peers = 2
rounds = 2
local_steps = 1
config = {{ n_embd = 16, n_layer = 1, n_head = 2, n_positions = 16 }}
data = {{ corpus = "text.txt", sequence_length = 16, batch = 2 }}
[[run]]
label = "wild"
algorithm = "gasloc-plain"
outer = {{ alpha = 1.0, gamma = 0.9 }}
exchange = {{ meetings = {meetings} }}
[[run]]
label = "other"
config = {{ n_positions = 1000 }}
data = {{ sequence_length = {length} }}
"""


@pytest.mark.slow
def test_a_comparison_tells_of_failures_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "grid.toml").write_text(GRID.format(meetings=1, length=1000))
    wild = tmp_path / "it" / "runs" / "wild"

    done = peer(tmp_path, "compare", "grid.toml", "--out", "it", "--jobs", "2", "--json")
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert [run["label"] for run in record["runs"]] == ["wild"]
    assert record["missing"] == [{"label": "other", "seed": 0}]
    assert re.search(r"run 'other', seed 0, ended with exit status 1.*\n.*give more text", record["failures"][0])
    assert done.stderr.count("no daemon would take these outer constants") == 1
    before = files(wild)

    done = peer(tmp_path, "compare", "grid.toml", "--out", "it", "--only", "wild")
    assert done.exit_code == 0
    assert "1 of the file's 2 simulations are not done; leave out --only and --seed" in done.stderr
    assert files(wild) == before

    (tmp_path / "grid.toml").write_text(GRID.format(meetings=1, length=32))
    done = peer(tmp_path, "compare", "grid.toml", "--out", "it")
    assert done.exit_code == 0
    assert files(wild) == before
    losses = [float(loss) for loss in re.findall(r"^(?:wild|other) +1/1 +(\d\.\d+)", done.stdout, re.M)]
    kept = [results.read(tmp_path / f"it/runs/{label}/seed-0" / FILE)[2] for label in ("wild", "other")]
    assert losses == [round(outcome.heldout_average, 3) for outcome in kept if outcome is not None]
    assert "| other | 1/1 |" in (tmp_path / "it" / "compare.md").read_text()
    assert (tmp_path / "it" / CHARTS[0].file).read_bytes().startswith(b"\x89PNG")
    before = files(tmp_path / "it" / "runs")

    done = peer(tmp_path, "compare", "grid.toml", "--out", "it", "--json")
    assert (done.exit_code, json.loads(done.stdout)["missing"]) == (0, [])
    assert files(tmp_path / "it" / "runs") == before

    (tmp_path / "grid.toml").write_text(GRID.format(meetings=2, length=32))
    with pytest.raises(
        ConfigError, match=r"run 'wild', seed 0, .*run.exchange.meetings was 1, is 2.* --out, or delete"
    ):
        peer(tmp_path, "compare", "grid.toml", "--out", "it")


@pytest.mark.slow
def test_an_interrupted_comparison_keeps_what_its_simulations_did(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = GRID.format(meetings=1, length=16).replace("rounds = 2", "rounds = 1000000\nevaluations = 1")
    (tmp_path / "grid.toml").write_text(text)
    process = start(tmp_path, "compare", "grid.toml", "--out", "it", "--jobs", "1", "--json")
    file = tmp_path / "it" / "runs" / "wild" / "seed-0" / FILE
    until(lambda: has(file, '"point"'), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    _, points, outcome = results.read(file)
    assert outcome is not None
    assert outcome.rounds == points[-1].round < 1000000
    record = json.loads((tmp_path / "out.txt").read_text())
    assert (record["runs"], [each["label"] for each in record["missing"]]) == ([], ["wild", "other"])
    assert record["failures"] == []
    assert not (tmp_path / "it" / "runs" / "other").exists()


def processes(words: str) -> list[str]:
    """Return those whose command line has some words in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if words.encode() in (path / "cmdline").read_bytes():
                found.append(path.name)
        except OSError:
            pass  # it has ended meanwhile
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_comparison_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    # Rounds that would take hours.
    text = GRID.format(meetings=1, length=16).replace("local_steps = 1", "local_steps = 1000000")
    (tmp_path / "grid.toml").write_text(text)
    process = start(tmp_path, "compare", "grid.toml", "--out", str(tmp_path / "it"), "--jobs", "1")
    folder = tmp_path / "it" / "runs" / "wild" / "seed-0"
    until(lambda: has(folder / FILE, '"point"'), process)
    assert len(processes(str(folder))) == 1
    process.kill()
    process.wait()
    end = time.monotonic() + DEADLINE_S
    while processes(str(folder)):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert results.read(folder / FILE)[2] is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('links = "none.toml"', "run 'a': cannot read '.*none.toml'"),
        ('churn = "none.txt"', "run 'a': cannot read the churn trace"),
        ("config = { n_head = 3 }", "run 'a': transformers cannot make a model"),
        ('data = { corpus = "none" }', "run 'a': there is no data at '.*none'"),
    ],
)
def test_a_run_that_can_not_begin_is_named_before_any_does(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(f'[[run]]\nlabel = "a"\n{line}\n')
    with pytest.raises(ConfigError, match=sentence):
        peer(tmp_path, "compare", "grid.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]
