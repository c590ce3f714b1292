"""Which models there are, and what --model accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.errors import ConfigError
from peer.models import presets
from peer.models.causal import outline, parameter_count

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "positions", "vocabulary", "count"),
    [
        ("gpt-nano", 5, 128, 4, 256, 257, 1_057_280),
        ("gpt-10m", 6, 160, 5, 512, 50257, 9_979_040),
        ("gpt-125m", 12, 768, 12, 1024, 50257, 124_439_808),  # GPT-2 small as released
        ("gpt-350m", 24, 1024, 16, 1024, 50257, 354_823_168),  # GPT-2 medium as released
        ("gpt-720m", 30, 1344, 21, 1024, 50257, 719_729_472),
    ],
)
def test_a_preset_is_a_gpt2_of_its_size(
    name: str, layers: int, width: int, heads: int, positions: int, vocabulary: int, count: int
) -> None:
    config = presets.resolve(name)
    assert [config[key] for key in ("model_type", "n_layer", "n_embd", "n_head", "n_positions", "vocab_size")] == [
        "gpt2",
        layers,
        width,
        heads,
        positions,
        vocabulary,
    ]
    # Embeddings, then per layer two norms, two d x 3d and d x d, two d x 4d with biases, then the last norm.
    block = 12 * width**2 + 13 * width
    assert (vocabulary + positions) * width + layers * block + 2 * width == count
    assert parameter_count(outline(config)) == count


def test_the_presets_are_listed_from_small_to_large() -> None:
    assert presets.names() == ("gpt-nano", "gpt-10m", "gpt-125m", "gpt-350m", "gpt-720m")


def test_a_preset_is_plain_values_without_dropout_and_with_tied_embeddings() -> None:
    for name in presets.names():
        config = presets.resolve(name)
        assert json.loads(json.dumps(config)) == config
        assert [config["embd_pdrop"], config["attn_pdrop"], config["resid_pdrop"]] == [0, 0, 0]
        assert config["tie_word_embeddings"] is True
        assert config["eos_token_id"] == config["vocab_size"] - 1


def test_changing_a_resolved_preset_does_not_change_the_next_one() -> None:
    presets.resolve("gpt-nano")["n_layer"] = 99
    assert presets.resolve("gpt-nano")["n_layer"] == 5


def test_the_smallest_model_reads_bytes_and_all_others_gpt2s_tokens() -> None:
    assert presets.tokenizer_for("gpt-nano") == "bytes"
    assert {presets.tokenizer_for(name) for name in presets.names()[1:]} == {"gpt2"}
    assert presets.tokenizer_for("some/config.json") == "gpt2"


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("gpt-nan", "gpt-nano"),
        ("GPT-125M", "gpt-125m"),
        ("gpt125m", "gpt-125m"),
        ("gpt-350", "gpt-350m"),
        ("zzz", "gpt-"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one_and_with_what_else_works(given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown model '{given}'; did you mean '{nearest}.*config\.json"):
        presets.resolve(given)


def test_a_config_file_is_found_relative_to_the_base(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write(tmp_path / "models", LLAMA)
    assert presets.resolve("models/config.json", base=tmp_path) == LLAMA
    assert presets.resolve(str(tmp_path / "models" / "config.json")) == LLAMA


def test_a_folder_with_a_config_file_will_do(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert presets.resolve(str(tmp_path)) == LLAMA


def test_what_says_nothing_of_the_architecture_is_left_out(tmp_path: Path) -> None:
    names = {"_name_or_path": "x/y", "transformers_version": "4.40.0", "torch_dtype": "bfloat16", "dtype": "float16"}
    assert presets.resolve(str(write(tmp_path, LLAMA | names))) == LLAMA


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None])
def test_a_config_that_names_a_causal_class_or_none_is_taken(tmp_path: Path, architectures: list[str] | None) -> None:
    config = LLAMA | {"architectures": architectures}
    assert presets.resolve(str(write(tmp_path, config))) == config


def test_an_encoder_is_taken_once_it_is_told_to_be_a_decoder(tmp_path: Path) -> None:
    config = {"model_type": "bert", "is_decoder": True}
    assert presets.resolve(str(write(tmp_path, config))) == config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "vit"}, "type 'vit', no causal language model"),
        ({"model_type": "t5"}, "type 't5', no causal language model"),
        ({"model_type": "bert"}, "type 'bert', no causal language model"),
        ({"model_type": "xlnet"}, "type 'xlnet', no causal language model"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "is for LlamaForSequenceClassification, no causal",
        ),
        ({"model_type": "lama"}, "unknown model_type \"lama\"; did you mean 'llama'"),
        ({"model_type": "-"}, 'unknown model_type "-"; transformers'),
        ({"hidden_size": 32}, "unknown model_type null"),
        ({"model_type": ["gpt2"]}, 'unknown model_type ["gpt2"]'),
        (LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "asks for code of its own"),
        (LLAMA | {"text_config": {"auto_map": {}}}, "asks for code of its own"),
        ([1, 2], "no JSON object"),
        ("x" * presets.CONFIG_SIZE_BYTES, "no JSON object of usual size"),
    ],
)
def test_a_config_that_is_no_causal_model_of_transformers_is_refused(tmp_path: Path, config: Any, reason: str) -> None:
    path = write(tmp_path, config)
    with pytest.raises(ConfigError) as refusal:
        presets.resolve(str(path))
    assert reason in str(refusal.value)
    assert f"'{path}'" in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model_type": "gpt2"', b"\xff\xfe{"])
def test_a_config_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"'{path}' is not JSON"):
        presets.resolve(str(path))


@pytest.mark.parametrize("given", ["nowhere/config.json", "config.json", "./gpt-nano"])
def test_a_path_that_leads_nowhere_is_quoted(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=f"no model config at '{given}'"):
        presets.resolve(given, base=tmp_path)


def test_presets_resolve_without_torch_and_transformers() -> None:
    code = "import sys; from peer.models.presets import resolve; resolve('gpt-125m'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "transformers"} & set(done.stdout.split())
