"""Causal language models, built from a config and a seed. The architectures are transformers' own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from peer.errors import ConfigError
from peer.models.draws import PortableDraws

_COMPLAINTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)
"""What the constructors of transformers make of values that are wrong or don't go together."""


def build(config: dict[str, Any], seed: int) -> torch.nn.Module:
    """Build a config's model on the CPU in float32, without dropout, in training mode.

    The same config and seed (≥ 0) give the same bits on every machine, as long as the architecture draws nothing but
    normal and uniform numbers, as GPT-2 and most others do. The global generators stay as they were.
    Raises ConfigError when transformers cannot make a model of the config.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), PortableDraws(seed):
        # Not torch.manual_seed: it would seed the accelerators' generators too, which fork_rng does not restore.
        torch.default_generator.manual_seed(seed)
        return _instantiate(config)


def outline(config: dict[str, Any]) -> torch.nn.Module:
    """Return the same model on the meta device: names and shapes, no numbers, no memory. Raises as build does."""
    with torch.device("meta"):
        return _instantiate(config)


def loss(model: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token, in float32, a scalar.

    inputs, targets: (batch, length) int64; targets[b, i] is the token after inputs[b, i].
    """
    logits = model(input_ids=inputs, use_cache=False).logits  # (batch, length, vocabulary)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_count(model: torch.nn.Module) -> int:
    """Count a model's parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def origin_hash(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of names, shapes and little-endian float32 values, by name in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().to("cpu", torch.float32)
        digest.update(f"{name}\0{tuple(weight.shape)}\0".encode())
        digest.update(weight.contiguous().numpy().astype("<f4", copy=False).reshape(-1).data)
    return digest.hexdigest()


def check_fit(config: dict[str, Any], vocabulary_size: int, sequence_length: int) -> None:
    """Raise ConfigError when a model has too few embeddings for the tokenizer, or positions for the sequences."""
    settings = _settings(config).get_text_config()
    words = getattr(settings, "vocab_size", None)
    if words is not None and vocabulary_size > words:
        raise ConfigError(
            f"the tokenizer has {vocabulary_size} tokens and the model only {words}; "
            f"choose another tokenizer, or set vocab_size to {vocabulary_size} in the model's config"
        )
    positions = getattr(settings, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"sequences of {sequence_length} tokens do not fit the model's {positions} positions; shorten them"
        )


def _settings(config: dict[str, Any]) -> PretrainedConfig:
    try:
        settings: PretrainedConfig = AutoConfig.for_model(**config)
        _without_dropout(settings)
    except _COMPLAINTS as error:
        raise _unusable(config, error) from error
    return settings


def _instantiate(config: dict[str, Any]) -> torch.nn.Module:
    settings = _settings(config)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=torch.float32
        )
    except _COMPLAINTS as error:
        raise _unusable(config, error) from error
    return model.train()


def _unusable(config: dict[str, Any], error: Exception) -> ConfigError:
    return ConfigError(
        f"transformers cannot make a model of this '{config.get('model_type')}' config: {' '.join(str(error).split())}"
    )


def _without_dropout(settings: PretrainedConfig) -> None:
    # On the config, not in the modules: attention reads its rate from there. Every rate has "drop" in its name.
    for key, value in list(vars(settings).items()):
        if isinstance(value, PretrainedConfig):
            _without_dropout(value)
        elif "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(settings, key, 0.0)
