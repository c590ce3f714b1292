"""`peer simulate` as people meet it: files, table, JSON, Ctrl-C, help and mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from peer.cli import simulate
from peer.cli.main import group, main
from peer.errors import ConfigError
from peer.lab import algorithms, results, settings
from peer.lab.plots import CHARTS
from peer.lab.results import FILE
from tests.lab.simulate_command import DEADLINE_S, TEXT, TINY, files, has, peer, start, until

CONTRACT = [
    *("algorithm", "peers", "rounds", "heldout_average", "heldout_peers", "disagreement"),
    *("bytes_per_round", "seconds_simulated", "optimizer_bytes"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, and a run whose model has a few thousand parameters."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "text.txt").write_text(TEXT)
    config = {"model_type": "gpt2", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, **TINY}
    (folder / "tiny.json").write_text(json.dumps(config))
    (folder / "run.toml").write_text(
        'model = "tiny.json"\ntokenizer = "bytes"\nrounds = 3\nlocal_steps = 2\n'
        f'[data]\ncorpus = "{folder}/text.txt"\nsequence_length = 16\nbatch = 2\n'
    )
    return folder


# ---------------------------------------------------------------- one simulation


@pytest.fixture(scope="module")
def first(base: Path) -> Result:
    return peer(base, "--run", "run.toml", "--peers", "3", "--seed", "4", "--out", "first", "--json")


@pytest.fixture(scope="module")
def again(base: Path, first: Result) -> Result:
    return peer(base, "--run", "run.toml", "--peers", "3", "--seed", "4", "--out", "again")


def test_standard_output_is_one_json_object_with_exactly_the_contracts_keys(base: Path, first: Result) -> None:
    assert first.exit_code == 0
    record = json.loads(first.stdout)
    assert list(record) == CONTRACT
    assert (record["algorithm"], record["peers"], record["rounds"]) == ("gasloc", 3, 3)
    _, points, outcome = results.read(base / "first" / FILE)
    assert outcome is not None
    assert record["heldout_peers"] == list(outcome.heldout_peers) == list(points[-1].heldout_peers)
    assert record["heldout_average"] == outcome.heldout_average == points[-1].heldout_average
    assert record["bytes_per_round"] == points[-1].bytes / 3


def test_the_results_begin_with_the_settings_and_have_the_start_and_every_measurement(
    base: Path, first: Result
) -> None:
    kept, points, _ = results.read(base / "first" / FILE)
    assert (kept["run"]["seed"], kept["peers"], kept["device"]) == (4, 3, "cpu")
    assert [point.round for point in points] == [0, 1, 2, 3]
    assert points[0].bytes == 0 < points[1].bytes
    for chart in CHARTS:
        assert (base / "first" / chart.file).read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others(base: Path, again: Result) -> None:
    assert results.read(base / "again" / FILE)[1:] == results.read(base / "first" / FILE)[1:]
    peer(base, "--run", "run.toml", "--peers", "3", "--seed", "5", "--out", "other")
    assert results.read(base / "other" / FILE)[1] != results.read(base / "first" / FILE)[1]


def test_progress_goes_to_standard_error_and_the_table_to_standard_output(again: Result) -> None:
    assert "results go to 'again'" in again.stderr
    assert re.findall(r"^round (\d)/3, loss \d\.\d{3}", again.stderr, re.M) == ["1", "2", "3"]
    assert re.findall(r"^ +(\d) .* kB ", again.stdout, re.M) == ["1", "2", "3"]
    assert "of the model in float32" in again.stdout


def test_with_json_the_table_is_on_standard_error(first: Result) -> None:
    assert re.findall(r"^ +(\d) .* kB ", first.stderr, re.M) == ["1", "2", "3"]


def test_the_options_reach_the_experiment_and_the_folder_gets_a_free_name(base: Path) -> None:
    (base / "lines.toml").write_text("step_s = 2.0\n[[peers]]\nup_mbit = 1\n")
    (base / "simulate-gasloc-mixed-9").mkdir()
    options = (
        "--run run.toml --algorithm gasloc-mixed --peers 4 --rounds 2 --local-steps 3 --meetings 1 --codec rank1-int8 "
        "--graph ring --links lines.toml --churn 0.1 --non-iid --seed 9 --inner adamw --device cpu"
    )
    done = peer(base, *options.split())
    assert "results go to 'simulate-gasloc-mixed-9-2'" in done.stderr
    kept, _, outcome = results.read(base / "simulate-gasloc-mixed-9-2" / FILE)
    run = kept["run"]
    assert (kept["algorithm"], kept["peers"], kept["graph"], kept["churn"]) == ("gasloc-mixed", 4, "ring", "0.1")
    assert (kept["links"], kept["non_iid"]) == ("lines.toml", True)
    assert (run["rounds"], run["local_steps"], run["seed"]) == (2, 3, 9)
    assert (run["exchange"]["meetings"], run["exchange"]["codec"]) == (1, "rank1-int8")
    assert outcome is not None
    assert outcome.seconds_simulated == (2 + 1) * 3 * 2.0


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.slow
def test_an_interrupt_ends_after_the_round_and_keeps_what_is_done(base: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "--run", str(base / "run.toml"), "--rounds", "1000000", "--out", "it", "--json")
    until(lambda: has(tmp_path / "it" / FILE, '"point"'), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    _, points, outcome = results.read(tmp_path / "it" / FILE)
    assert outcome is not None
    assert outcome.rounds == points[-1].round < 1000000
    record = json.loads((tmp_path / "out.txt").read_text())
    assert record["rounds"] == outcome.rounds
    assert has(tmp_path / "err.txt", f"interrupted after round {outcome.rounds} of 1000000")
    assert (tmp_path / "it" / CHARTS[0].file).exists()


@pytest.mark.slow
def test_a_second_interrupt_ends_it_within_the_round(base: Path, tmp_path: Path) -> None:
    # The only round would take hours.
    run = ("--run", str(base / "run.toml"), "--rounds", "1", "--local-steps", "1000000")
    process = start(tmp_path, *run, "--out", "it")
    until(lambda: has(tmp_path / "it" / FILE, '"point"'), process)
    process.send_signal(signal.SIGINT)
    until(lambda: has(tmp_path / "err.txt", "once more to end at once"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    _, points, outcome = results.read(tmp_path / "it" / FILE)
    assert ([point.round for point in points], outcome) == ([0], None)


# ---------------------------------------------------------------- help and mistakes


def test_help_tells_of_every_algorithm_what_the_lab_does() -> None:
    assert {name: each.what for name, each in algorithms.ALGORITHMS.items()} == simulate.ALGORITHMS
    text = CliRunner().invoke(group, ["simulate", "--help"]).output
    for name in simulate.ALGORITHMS:
        assert re.search(rf"^  {name}  +\w", text, re.M)


def test_what_help_calls_the_default_is_the_labs() -> None:
    defaults = {parameter.name: parameter.default for parameter in simulate.command.params}
    assert (defaults["algorithm"], defaults["peers"]) == (settings.ALGORITHM, settings.PEERS)
    models = [each for each in simulate.command.params if each.name == "model"]
    assert f"[default: {settings.MODEL}]" in str(getattr(models[0], "help", ""))


@pytest.mark.slow
def test_help_of_both_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom peer.cli.main import main\n"
        "for arguments in (['simulate', '--help'], ['simulate', 'compare', '--help'], ['simulate', '--peers', 'x']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


WRONG: list[tuple[Sequence[str], int, str]] = [
    (["--algorithm", "diloko"], 2, "'diloko' is not one of 'gasloc'"),
    (["--graph", "rung"], 2, "'rung' is not one of 'one-peer'"),
    (["comprae", "g.toml"], 2, r"There is no command 'comprae' here; did you mean 'compare'\?"),
    (["--peers", "4", "compare", "g.toml"], 2, "'--peers' says nothing to 'compare'; leave it out"),
    (["--peers", "0"], 1, "peers is 0; give a number from 1"),
    (["--rounds", "0"], 1, "rounds is 0"),
    (["--model", "gpt-10m"], 1, "give local_steps in place of round_seconds"),
    (["--codec", "ranks"], 1, "codec"),
    (["--inner", "adam"], 1, r"'optimizer' in \[inner\] is \"adam\""),
    (["--links", "none.toml"], 1, "cannot read '.*none.toml'"),
    (["--churn", "1.5"], 1, "churn is 1.5 a round"),
    (["--data", "nowhere.txt"], 1, "there is no data at '.*nowhere.txt'"),
    (["--run", "r.toml", "--model", "gpt-nano"], 1, "leave model out, or run"),
    (["compare", "none.toml"], 1, "cannot read 'none.toml'"),
]


@pytest.mark.parametrize(("arguments", "status", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_gets_one_sentence_a_status_and_leaves_nothing_behind(
    arguments: list[str],
    status: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *arguments])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (status, "")
    assert re.fullmatch(rf"peer: .*{sentence}.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_in_use_is_left_alone(base: Path, first: Result) -> None:
    before = files(base / "first")
    with pytest.raises(ConfigError, match="folder 'first' is not empty; give --out a new one"):
        peer(base, "--run", "run.toml", "--out", "first")
    assert files(base / "first") == before
