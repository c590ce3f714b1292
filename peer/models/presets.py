"""Models by name, and by a transformers config.json. Loads neither torch nor transformers until a file is resolved."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.errors import ConfigError

CONFIG_SIZE_BYTES = 1 << 20
"""A config.json longer than this is none."""

_BIDIRECTIONAL = ("xlm", "xlnet")
"""Types that transformers lists as causal although every position sees the later ones too."""

_NOT_ARCHITECTURE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys that say where a config comes from, not what model it is; a run must not depend on them."""


@dataclass(frozen=True)
class Shape:
    """One GPT-2: layers, width, heads, positions, vocabulary; the last token of the vocabulary ends a text."""

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int = 50257
    tokenizer: str = "gpt2"


_PRESETS = {
    "gpt-nano": Shape(5, 128, 4, 256, vocabulary=257, tokenizer="bytes"),  # 1.1 M
    "gpt-10m": Shape(6, 160, 5, 512),  # 10.0 M, 8.0 M of them embeddings
    "gpt-125m": Shape(12, 768, 12, 1024),  # GPT-2 small, 124.4 M
    "gpt-350m": Shape(24, 1024, 16, 1024),  # GPT-2 medium, 354.8 M
    "gpt-720m": Shape(30, 1344, 21, 1024),  # 719.7 M, heads of 64
}


def names() -> tuple[str, ...]:
    """Return the presets' names, smallest model first."""
    return tuple(_PRESETS)


def tokenizer_for(model: str) -> str:
    """Return the tokenizer that goes with a model: the preset's own, GPT-2's for a config file."""
    return _PRESETS[model].tokenizer if model in _PRESETS else "gpt2"


def resolve(model: str, base: Path | None = None) -> dict[str, Any]:
    """Return a model's config as plain values, "model_type" among them.

    model is a preset's name, or the path of a transformers config.json or of the folder that holds one, relative to
    base. Raises ConfigError for an unknown name, and for a config that is no causal language model of transformers.
    """
    if model in _PRESETS:
        return _gpt2(_PRESETS[model])
    path = (base or Path()) / model
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if not path.is_file():
        raise _unknown(model)
    config = _read(path)
    _check(config, path)
    return {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}


def _gpt2(shape: Shape) -> dict[str, Any]:
    # Everything that shapes the model is spelled out: the defaults of transformers may change, a run must not.
    return {
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_positions": shape.positions,
        "vocab_size": shape.vocabulary,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": shape.vocabulary - 1,
        "eos_token_id": shape.vocabulary - 1,
    }


def _unknown(model: str) -> ConfigError:
    if "/" in model or model.endswith(".json"):
        return ConfigError(
            f"no model config at '{model}'; give the path of a transformers config.json, or a preset's name"
        )
    near = difflib.get_close_matches(model.lower(), _PRESETS, n=1, cutoff=0.0)
    return ConfigError(
        f"unknown model '{model}'; did you mean '{near[0]}'? There are {', '.join(_PRESETS)}, "
        "and the path of a transformers config.json works too"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_SIZE_BYTES + 1)
        config = json.loads(raw) if len(raw) <= CONFIG_SIZE_BYTES else None
    except OSError as error:
        raise ConfigError(f"cannot read model config '{path}': {error.strerror}") from error
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ConfigError(f"model config '{path}' is not JSON ({error}); give a transformers config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config '{path}' is no JSON object of usual size; give a transformers config.json")
    return config


def _check(config: dict[str, Any], path: Path) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    kind = config.get("model_type")
    if _asks_for_code(config):
        raise ConfigError(
            f"model config '{path}' asks for code of its own (auto_map), which is never run; remove auto_map"
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=1)
        hint = (
            f"; did you mean '{near[0]}'?" if near else "; transformers' own types are accepted, such as gpt2 or llama"
        )
        raise ConfigError(f"model config '{path}' has the unknown model_type {json.dumps(kind)}{hint}")
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    encoder = (
        kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    if kind not in causal or kind in _BIDIRECTIONAL or (encoder and config.get("is_decoder") is not True):
        raise ConfigError(
            f"model config '{path}' is of type '{kind}', no causal language model; use one such as gpt2 or llama"
        )
    classes = config.get("architectures") or []
    if classes and not set(_strings(classes)) & set(_strings(causal.values())):
        raise ConfigError(f"model config '{path}' is for {', '.join(_strings(classes))}, no causal language model")


def _asks_for_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "auto_map" in value or any(_asks_for_code(inner) for inner in value.values())
    return False


def _strings(values: Any) -> list[str]:
    """Flatten class names, which transformers gives one by one or in tuples."""
    if isinstance(values, str):
        return [values]
    return [name for inner in values for name in _strings(inner)]
