from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer import checkpoint
from peer.cli.export import command
from peer.core.state import State
from peer.errors import ConfigError
from peer.home import Home
from peer.manifest import Manifest
from peer.models import causal

RUN = Manifest.preset("gpt-nano")


def trained(home: Home, seed: int, round: int) -> State:
    """Have a checkpoint with these weights, and other anchors."""
    model = causal.build(RUN.config, seed)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    anchor = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    state = State(weights, anchor, {}, round=round)
    checkpoint.save(home.path, state, RUN.run_id)
    return state


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    home.manifest.write_text(RUN.to_toml())
    return home


def run(home: Home, out: Path) -> Result:
    return CliRunner().invoke(command, [str(out), "--home", str(home.path)], catch_exceptions=False)


def test_the_newest_weights_load_in_transformers_while_a_daemon_holds_the_home(home: Home, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with home.lock(RUN.run_id, "peer"):
        trained(home, 1, 1)
        state = trained(home, 2, 7)
        result = run(home, out)
    assert result.exit_code == 0
    assert result.output.startswith(f"Wrote '{out}': run {RUN.name} at round 7, as it was ")
    names: dict[str, object] = {}
    exec("\n".join(result.output.partition("Load it with:\n")[2].replace("  ", "").splitlines()), names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert isinstance(model, torch.nn.Module)
    weights = dict(model.named_parameters())
    assert weights.keys() == state.weights.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in state.weights.items())
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(out))
    assert callable(tokenizer)
    assert tokenizer("ab").input_ids == AutoTokenizer.from_pretrained(out)("ab").input_ids


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(home: Home, tmp_path: Path) -> None:
    trained(home, 1, 1)
    trained(home, 2, 2)
    entry = checkpoint.newest(home.path)
    assert entry is not None
    os.truncate(entry.path / "state.safetensors", 1000)
    result = run(home, tmp_path / "out")
    assert "at round 1, as it was" in result.stdout
    assert f"peer: checkpoint '{entry.path}' cannot be read (" in result.stderr


def test_a_home_in_which_nobody_trained_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no peer has trained in home '{tmp_path}/none' yet; start one with: peer j"):
        run(Home(tmp_path / "none"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_home_without_a_checkpoint_yet_is_an_error_with_the_next_step(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no checkpoint in home '{home.path}' yet; wait until the peer has"):
        run(home, tmp_path / "out")


def test_a_folder_that_is_there_already_is_left_alone(home: Home, tmp_path: Path) -> None:
    trained(home, 1, 1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"'{out}' is there already"):
        run(home, out)
    assert (out / "mine.txt").read_text() == "mine"
