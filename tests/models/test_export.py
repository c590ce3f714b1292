"""What leaves the project must load elsewhere."""

from __future__ import annotations

import functools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from peer.errors import ConfigError
from peer.export import export
from peer.models import causal, presets, tokenizer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 257,
}


@functools.cache
def nano() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    model = causal.build(presets.resolve("gpt-nano"), 7)
    return model, {name: each.detach() for name, each in model.named_parameters()}


def write(out: Path, weights: dict[str, Tensor] | None = None) -> None:
    export(nano()[1] if weights is None else weights, presets.resolve("gpt-nano"), tokenizer.load("bytes"), out)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("config", [presets.resolve("gpt-nano"), LLAMA], ids=["tied", "untied"])
def test_an_exported_model_loads_in_transformers_and_gives_the_same_logits(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model = causal.build(config, 7).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)  # biases and norms too
    export(dict(model.named_parameters()), config, tokenizer.load("bytes"), tmp_path / "new" / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out")
    tokens = torch.arange(24).view(2, 12) * 10
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, model(tokens).logits)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_goes_along(tmp_path: Path, name: str) -> None:
    ours = tokenizer.load(name)
    export(nano()[1], presets.resolve("gpt-nano"), ours, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Call me Ishmael. Some years ago — never mind, don 't ask . 🐋"
    assert theirs(text).input_ids == ours.encode(text).tolist()
    assert theirs.decode(theirs(text).input_ids) == text


@pytest.mark.usefixtures("offline")
def test_an_exported_model_writes_on_and_knows_where_a_text_ends(tmp_path: Path) -> None:
    write(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    told = theirs.generate(torch.tensor([[72, 105]]), max_new_tokens=3, do_sample=False, pad_token_id=256)
    assert told.shape[1] > 2
    assert theirs.generation_config.eos_token_id == 256


def test_no_code_and_no_pickle_is_in_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("gpt2", "float32")


def test_nothing_else_is_left_beside_it_and_others_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path / "out")
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_the_weights_that_are_given_are_not_changed_nor_kept(tmp_path: Path) -> None:
    weights = {name: each.clone() for name, each in nano()[1].items()}
    write(tmp_path / "out", weights)
    assert causal.origin_hash(weights) == causal.origin_hash(nano()[1])


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("inside", [True, False], ids=["folder", "file"])
def test_what_is_there_already_is_not_touched(tmp_path: Path, inside: bool) -> None:
    precious = tmp_path / "out" / "precious" if inside else tmp_path / "out"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/out' is there already; give the name of a new folder"):
        write(tmp_path / "out")
    assert precious.read_text() == "mine"


def test_weights_of_another_model_are_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    whole = nano()[1]
    norm = "transformer.ln_f.bias"
    for weights, reason in [
        ({name: each for name, each in whole.items() if name != norm}, f"'{norm}' is missing"),
        (whole | {"surplus": torch.zeros(1)}, "'surplus' is none of them"),
        (whole | {norm: torch.zeros(64)}, rf"'{norm}' is \(64,\) and should be \(128,\)"),
        (whole | {norm: torch.zeros(1)}, rf"'{norm}' is \(1,\) and should be \(128,\)"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            write(tmp_path / "out", weights)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_not_be_written_is_named_and_left_clean(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=rf"cannot write '{tmp_path}/file/out'"):
        write(tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_progress_bars_of_transformers_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.is_progress_bar_enabled()
    write(tmp_path / "out")
    assert logging.is_progress_bar_enabled() == before
    assert capfd.readouterr() == ("", "")
