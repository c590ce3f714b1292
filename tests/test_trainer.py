"""A peer alone is plain training, bit for bit; what is saved continues exactly; a step abandoned leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peer.core.change import Change, Correction
from peer.core.codec import parse, parts
from peer.core.gossip import Form, Outer, outer_step
from peer.core.schedule import factor
from peer.core.state import Cursor, State, Tensors
from peer.data.stream import Sequences
from peer.errors import ConfigError
from peer.manifest import Manifest
from peer.models import causal
from peer.trainer import Trainer, choose_device, optimizer_for

CPU = torch.device("cpu")
TINY = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}


def tiny(form: Form = Form.OWN, eta: float = 1.0, gamma: float = 0.7, **changes: Any) -> Manifest:
    run = Manifest.preset("gpt-nano")
    run = replace(run, config=run.config | TINY, rounds=4, local_steps=3, round_seconds=None)
    data = replace(run.data, shards=4, sequence_length=16, batch=4)
    return replace(run, data=data, outer=Outer(form, eta, gamma, 0.5), **changes)


def sequences(run: Manifest) -> Sequences:
    tokens = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16)
    return Sequences(tokens, run.data.sequence_length, run.data.shards, run.seed)


def trainer(run: Manifest) -> Trainer:
    return Trainer(run, causal.build(run.config, run.seed), sequences(run), CPU)


def one_round(peer: Trainer) -> float:
    while not peer.round_is_over:
        assert peer.step()
    return peer.end_round().loss


def weights(peer: Trainer) -> Tensors:
    return {name: weight.detach().clone() for name, weight in peer.state.weights.items()}


def plainly(run: Manifest, steps: int) -> tuple[nn.Module, list[float]]:
    """Ordinary training as anybody would write it in PyTorch."""
    model = causal.build(run.config, run.seed)
    optimizer = optimizer_for(run.inner, dict(model.named_parameters()))
    cursor, data, losses = Cursor(), sequences(run), []
    for step in range(steps):
        windows, cursor = data.read(cursor, run.data.batch)
        batch = torch.from_numpy(windows)
        logits = model(input_ids=batch[:, :-1]).logits
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        mean.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), run.inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.inner.lr * factor(run.schedule, run.rounds, step / (run.local_steps or 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    return model, losses


@pytest.mark.parametrize("form", list(Form))
def test_one_peer_with_eta_1_and_gamma_0_is_plain_training_bit_for_bit(form: Form) -> None:
    run = tiny(form, eta=1.0, gamma=0.0)
    peer = trainer(run)
    losses = [one_round(peer) for _ in range(run.rounds)]
    model, plain = plainly(run, 12)
    assert all(torch.equal(peer.state.weights[name], weight) for name, weight in model.named_parameters())
    assert losses == pytest.approx([float(np.mean(plain[i : i + 3])) for i in (0, 3, 6, 9)], rel=1e-5)
    assert (peer.state.round, peer.state.step) == (4, 12)


def test_the_loss_falls() -> None:
    run = tiny()
    peer = trainer(replace(run, rounds=20, inner=replace(run.inner, lr=0.01)))
    tokens = np.tile(np.arange(50), 400).astype(np.uint16)
    peer._sequences = Sequences(tokens, 16, 4, 0)
    losses = [one_round(peer) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("cut", [0, 2, 3, 4])
def test_a_state_that_is_adopted_by_a_new_trainer_continues_exactly(form: Form, cut: int) -> None:
    run = tiny(form)
    straight, first = trainer(run), trainer(run)
    for peer in (straight, first):
        for _ in range(cut):
            peer.step()
            if peer.round_is_over:
                peer.end_round()
    second = trainer(run)
    second.adopt(copy.deepcopy(first.state))
    second._losses = list(first._losses)  # steps of the round so far: a checkpoint in mid-round restarts the round
    for peer in (straight, second):
        while peer.round < 3:
            peer.step()
            if peer.round_is_over:
                peer.end_round()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(second).values(), strict=True))
    assert straight.state.cursor == second.state.cursor
    assert straight.state.step == second.state.step


def test_the_state_is_the_live_model_and_optimizer() -> None:
    peer = trainer(tiny())
    peer.step()
    assert peer.state.weights["transformer.wte.weight"] is peer.model.get_parameter("transformer.wte.weight")
    assert set(peer.state.inner) == {"step", "exp_avg", "exp_avg_sq"}
    before = peer.state.inner["exp_avg"]["transformer.wte.weight"].clone()
    peer.step()
    assert not torch.equal(before, peer.state.inner["exp_avg"]["transformer.wte.weight"])


def test_a_step_that_is_abandoned_leaves_the_state_as_it_was() -> None:
    peer = trainer(tiny())
    peer.step()
    before, cursor = weights(peer), peer.state.cursor
    peer.abandon()
    assert not peer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(peer).values(), strict=True))
    assert (peer.state.cursor, peer.state.step) == (cursor, 1)
    assert all(weight.grad is None for weight in peer.state.weights.values())


def test_a_correction_in_mid_round_never_enters_the_drift_or_the_momentum() -> None:
    """With and without a correction the momentum is the same, and the weights differ by the correction alone."""
    run = tiny(inner=replace(tiny().inner, lr=1e-9))
    plain, corrected = trainer(run), trainer(run)
    shapes = {name: tuple(weight.shape) for name, weight in plain.state.weights.items()}
    changes = tuple(Change(part, torch.full(part.shape, 0.25), None) for part in parts(shapes, parse("none")))
    for step in range(3):
        plain.step()
        corrected.step()
        if step == 1:
            Correction(changes).add_(0.5, corrected.state.weights, corrected.state.anchor)
    plain.end_round()
    corrected.end_round()
    for name in shapes:
        assert torch.allclose(plain.state.outer["momentum"][name], corrected.state.outer["momentum"][name], atol=1e-7)
        assert torch.allclose(plain.state.weights[name] + 0.125, corrected.state.weights[name], atol=1e-6)


def test_a_large_batch_goes_through_the_model_in_pieces_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    whole = trainer(run)
    monkeypatch.setattr("peer.trainer.MICRO_TOKENS", {"cpu": 16})
    pieces = trainer(run)
    assert (whole.micro_batch, pieces.micro_batch) == (4, 1)
    whole.step()
    pieces.step()
    for a, b in zip(weights(whole).values(), weights(pieces).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def with_memory_for(peer: Trainer, sequences: int, error: Exception) -> None:
    """Let a model run out of memory, in the middle of its forward pass, at more sequences than these."""

    def forward(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if len(output) > sequences:
            raise error

    next(module for module in peer.model.modules() if isinstance(module, nn.LayerNorm)).register_forward_hook(forward)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["cuda", "mps", "cpu", "python"],
)
def test_out_of_memory_halves_the_pieces_and_the_step_is_taken_with_all_its_tokens(error: Exception) -> None:
    run, told = tiny(), list[str]()
    plain = trainer(run)
    peer = Trainer(run, causal.build(run.config, run.seed), sequences(run), CPU, say=told.append)
    with_memory_for(peer, 1, error)
    for _ in range(run.local_steps or 0):
        assert plain.step() and peer.step()
    assert peer.micro_batch == 1
    assert [line.split(":")[0] for line in told] == ["memory is short"] * 2
    for a, b in zip(weights(plain).values(), weights(peer).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert peer.state.cursor == plain.state.cursor
    ours, theirs = peer.end_round(), plain.end_round()
    assert (ours.micro_batch, theirs.micro_batch) == (1, 4)
    assert (ours.tokens, ours.steps) == (theirs.tokens, theirs.steps)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_memory_that_does_not_suffice_for_one_sequence_is_an_error_that_says_what_to_do() -> None:
    peer = trainer(tiny())
    before = weights(peer)
    with_memory_for(peer, 0, MemoryError())
    with pytest.raises(ConfigError, match="too little memory for a single sequence of 16 tokens; close what else"):
        peer.step()
    assert all(torch.equal(before[name], weight) for name, weight in weights(peer).items())


def test_an_error_that_is_not_about_memory_is_none_to_be_quiet_about() -> None:
    peer = trainer(tiny())
    with_memory_for(peer, 0, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        peer.step()


def test_a_round_by_time_ends_when_its_seconds_are_over_and_has_a_step_at_least() -> None:
    run = tiny(local_steps=None, round_seconds=10.0)
    now = [0.0]
    peer = Trainer(run, causal.build(run.config, run.seed), sequences(run), CPU, clock=lambda: now[0])
    now[0] = 20.0
    assert not peer.round_is_over
    peer.step()
    assert peer.round_is_over
    tally = peer.end_round()
    assert (tally.steps, tally.seconds, tally.tokens) == (1, 20.0, 4 * 16)
    now[0] = 25.0
    assert peer.fraction == 0.5
    assert peer.lr == run.inner.lr * factor(run.schedule, run.rounds, 1.5)


def test_claiming_another_shard_holds_from_the_next_step_on() -> None:
    peer = trainer(tiny())
    peer.step()
    peer.claim(3)
    assert peer.state.cursor == Cursor(3, 0, 0)
    peer.step()
    assert peer.state.cursor == Cursor(3, 0, 4)


def test_a_device_that_is_not_there_is_refused_with_one_that_is() -> None:
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"use --device (cpu|cuda|mps)"):
        choose_device("cuda:99")


def test_state_of_another_dtype_is_taken_over_in_float32() -> None:
    peer = trainer(tiny())
    source = trainer(tiny()).state
    half = State(
        {name: tensor.detach().bfloat16() for name, tensor in source.weights.items()}, source.anchor, source.outer
    )
    peer.adopt(half)
    assert all(weight.dtype == torch.float32 for weight in peer.state.weights.values())


@pytest.mark.parametrize("form", list(Form))
def test_rounds_that_a_download_took_are_taken_without_inner_steps(form: Form) -> None:
    """As DiLoCo with no drift: torch's SGD with Nesterov momentum on a gradient of zero."""
    run = tiny(form, eta=0.7, gamma=0.65)
    donor, peer = trainer(run), trainer(run)
    for _ in range(3):
        one_round(donor)
    oracle = copy.deepcopy(donor.state)
    for _ in range(5):
        outer_step(run.outer, oracle)
    if form is Form.OWN:
        begun, momentum = donor.state.anchor, donor.state.outer["momentum"]
        fading = 0.7 * sum(0.65 ** (n + 1) for n in range(5))  # η γ (γ^0 + … + γ^4) of m, which fades γ-fold a round
        for name, weight in oracle.weights.items():
            assert torch.allclose(weight, begun[name] + fading * 0.65 * momentum[name], atol=1e-6)
    peer.catch_up(copy.deepcopy(donor.state), 8)
    assert peer.round == oracle.round == 8
    for name, weight in weights(peer).items():
        assert torch.equal(weight, oracle.weights[name].detach())
        assert torch.equal(peer.state.anchor[name], weight)


def test_a_donor_that_is_level_is_taken_over_as_it_is_and_one_far_behind_soon_moves_no_more() -> None:
    donor = trainer(tiny(eta=0.7))
    one_round(donor)
    level, late, later = (trainer(tiny(eta=0.7)) for _ in range(3))
    level.catch_up(copy.deepcopy(donor.state))
    assert level.round == 1
    late.catch_up(copy.deepcopy(donor.state), 100)
    later.catch_up(copy.deepcopy(donor.state), 100_000)
    assert (late.round, later.round) == (100, 100_000)
    for a, b in zip(weights(late).values(), weights(later).values(), strict=True):
        assert torch.equal(a, b)
