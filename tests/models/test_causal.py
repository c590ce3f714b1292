"""Models as functions of a config and a seed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from peer.errors import ConfigError
from peer.models import causal, presets

TINY: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 12,
    "vocab_size": 40,
    "bos_token_id": 39,
    "eos_token_id": 39,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "vocab_size": 40,
}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))


def nano(seed: int) -> str:
    return causal.origin_hash(weights(causal.build(presets.resolve("gpt-nano"), seed)))


def test_the_seed_alone_decides_the_weights() -> None:
    first = nano(1)
    torch.rand(3)
    assert nano(1) == first
    assert nano(2) != first


def test_building_leaves_the_global_generators_alone() -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state(legacy=False)
    causal.build(TINY, 1)
    causal.outline(TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy_before)


def test_first_weights_are_gpt2s() -> None:
    model = weights(causal.build(presets.resolve("gpt-nano"), 0))
    spread = {name.removeprefix("transformer."): float(weight.detach().std()) for name, weight in model.items()}
    assert spread["wte.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["h.0.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["h.4.mlp.c_proj.weight"] == pytest.approx(
        0.02 / 10**0.5, rel=0.05
    )  # by the square root of 2 * layers
    assert spread["h.0.attn.c_attn.bias"] == 0
    assert bool((model["transformer.ln_f.weight"] == 1).all())


def test_a_model_is_float32_on_the_cpu_in_training_mode_whatever_the_defaults_and_the_config() -> None:
    with torch.device("meta"):
        model = causal.build(TINY | {"dtype": "bfloat16"}, 0)
    assert model.training
    assert {(weight.dtype, weight.device.type) for weight in model.parameters()} == {(torch.float32, "cpu")}


def test_tied_weights_are_there_once() -> None:
    model = causal.build(TINY, 0)
    assert "transformer.wte.weight" in weights(model)
    assert not any("lm_head" in name for name in weights(model))
    assert isinstance(model, GPT2LMHeadModel)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert causal.parameter_count(model) == (40 + 12) * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16


def test_an_outline_has_the_models_names_and_shapes_and_no_numbers() -> None:
    model, outline = causal.build(TINY, 0), causal.outline(TINY)
    assert [(name, each.shape) for name, each in weights(model).items()] == [
        (name, each.shape) for name, each in weights(outline).items()
    ]
    assert {each.device.type for each in outline.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "config",
    [
        TINY | {"embd_pdrop": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5},
        TINY,  # transformers' default is 0.1
        LLAMA | {"attention_dropout": 0.5},
    ],
)
def test_training_drops_nothing_out(config: dict[str, Any]) -> None:
    model = causal.build(config, 0)
    rows = tokens(3, 9)
    training = causal.loss(model, rows[:, :-1], rows[:, 1:])
    assert torch.equal(causal.loss(model.eval(), rows[:, :-1], rows[:, 1:]), training)


@pytest.mark.parametrize("config", [TINY, LLAMA])
def test_the_loss_is_the_mean_surprise_at_the_next_token(config: dict[str, Any]) -> None:
    model = causal.build(config, 0)
    rows = tokens(3, 9)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    with torch.no_grad():
        logits = model(inputs).logits.double()
        surprise = [logits[b, i].exp().sum().log() - logits[b, i, targets[b, i]] for b in range(3) for i in range(8)]
        assert causal.loss(model, inputs, targets).item() == pytest.approx(float(sum(surprise) / 24), abs=1e-6)


def test_the_loss_is_taken_in_float32_of_a_bfloat16_model() -> None:
    model = causal.build(TINY, 0).bfloat16()
    rows = tokens(2, 9)
    loss = causal.loss(model, rows[:, :-1], rows[:, 1:])
    expected = torch.nn.functional.cross_entropy(
        model(rows[:, :-1]).logits.float().view(-1, 40), rows[:, 1:].reshape(-1)
    )
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)


def test_the_loss_reaches_every_weight() -> None:
    model = causal.build(TINY, 0)
    rows = tokens(8, 13)
    causal.loss(model, rows[:, :-1], rows[:, 1:]).backward()  # type: ignore[no-untyped-call]
    assert [name for name, each in weights(model).items() if each.grad is None or not each.grad.any()] == []


def test_the_origin_is_the_hash_of_names_shapes_and_values_by_name() -> None:
    expected = hashlib.sha256(
        b"a\0(2, 2)\0" + np.array([1, 2, 3, 4], "<f4").tobytes() + b"b\0()\0" + np.array([5], "<f4").tobytes()
    ).hexdigest()
    square, scalar = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T, torch.tensor(5.0)  # not contiguous
    assert causal.origin_hash({"b": scalar, "a": square}) == expected
    assert causal.origin_hash({"a": square.double(), "b": scalar.bfloat16()}) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, np.nextafter(np.float32(2), np.float32(3)).item()])},
        {"b": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
        {},
    ],
)
def test_any_other_weights_have_another_origin(other: dict[str, Tensor]) -> None:
    assert causal.origin_hash(other) != causal.origin_hash({"a": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize("config", [TINY, LLAMA])
def test_a_model_must_have_room_for_the_tokenizer_and_the_sequences(config: dict[str, Any]) -> None:
    causal.check_fit(config, vocabulary_size=40, sequence_length=12)
    with pytest.raises(ConfigError, match="tokenizer has 41 tokens and the model only 40"):
        causal.check_fit(config, vocabulary_size=41, sequence_length=12)
    with pytest.raises(ConfigError, match="sequences of 13 tokens do not fit the model's 12 positions"):
        causal.check_fit(config, vocabulary_size=40, sequence_length=13)


@pytest.mark.parametrize(
    "config",
    [
        TINY | {"n_embd": 15},  # not divisible by the heads
        TINY | {"n_layer": "many"},
        TINY | {"activation_function": "no-such"},
        TINY | {"n_head": 0},
        TINY | {"vocab_size": -1},
        LLAMA | {"num_attention_heads": 0},
    ],
)
@pytest.mark.parametrize("make", [lambda config: causal.build(config, 0), causal.outline], ids=["build", "outline"])
def test_a_config_that_makes_no_model_is_refused_in_one_line(make: Any, config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"^transformers cannot make a model of this '{config['model_type']}' config: .+$"
    ):
        make(config)
