"""A home carries its run with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.home import Home
from peer.manifest import Manifest
from peer.process import _settle_in


def test_a_home_of_a_model_from_a_file_is_read_again_from_a_relative_path_and_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Manifest.preset("gpt-nano").config | {"n_layer": 1}))
    run = Manifest.preset(str(config))
    home = Home("mine")
    home.create()
    _settle_in(home, run)
    config.unlink()
    _settle_in(home, run)
    assert Manifest.load(home.manifest).run_id == run.run_id
    moved = (tmp_path / "mine").rename(tmp_path / "yours")
    assert Manifest.load(moved / "run.toml").run_id == run.run_id


def test_a_home_of_another_run_and_a_damaged_manifest_are_refused_with_what_to_do(tmp_path: Path) -> None:
    home = Home(tmp_path)
    _settle_in(home, Manifest.preset("gpt-nano"))
    with pytest.raises(ConfigError, match="--home"):
        _settle_in(home, Manifest.preset("gpt-10m"))
    home.manifest.write_text("{{")
    with pytest.raises(ConfigError, match="move that file away"):
        _settle_in(home, Manifest.preset("gpt-nano"))
    assert home.manifest.read_text() == "{{"
