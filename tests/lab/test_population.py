"""Virtual peers against real ones: the daemon's Trainer, one model and one optimizer at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peer.core.schedule import factor
from peer.core.state import Cursor
from peer.data.stream import Sequences
from peer.lab.population import Population
from peer.manifest import Manifest
from peer.models import causal
from peer.trainer import Trainer

CPU = torch.device("cpu")
PEERS = 3
TOKENS = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16)


def tiny_run(**changes: Any) -> Manifest:
    """Return a run of milliseconds."""
    run = Manifest.preset("gpt-nano")
    run = replace(run, config=run.config | {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16})
    run = replace(run, rounds=4, local_steps=3, data=replace(run.data, shards=4, sequence_length=16, batch=4))
    return replace(run, **changes)


def real_peer(run: Manifest, shard: int) -> Trainer:
    sequences = Sequences(TOKENS, run.data.sequence_length, run.data.shards, run.seed)
    trainer = Trainer(run, causal.build(run.config, run.seed), sequences, CPU)
    trainer.claim(shard)
    return trainer


def lr(run: Manifest, progress: float) -> float:
    return run.inner.lr * factor(run.schedule, run.rounds, progress)


def test_virtual_peers_train_as_real_ones_do() -> None:
    run = tiny_run()
    real = [real_peer(run, shard) for shard in range(PEERS)]
    virtual = Population(run, TOKENS, PEERS, CPU)
    for step in range(3):
        losses = virtual.step(range(PEERS), [lr(run, step / 3)] * PEERS)
        for peer, trainer in enumerate(real):
            trainer.step()
            assert losses[peer] == pytest.approx(float(trainer._losses[-1]), abs=1e-5)
    for peer, trainer in enumerate(real):
        state = virtual.states[peer]
        assert (state.step, state.cursor) == (trainer.state.step, trainer.state.cursor)
        for name, weight in trainer.state.weights.items():
            torch.testing.assert_close(state.weights[name], weight.detach(), rtol=0, atol=1e-5)


def test_a_step_of_some_leaves_the_others_as_they_were() -> None:
    run = tiny_run()
    whole, some = Population(run, TOKENS, PEERS, CPU), Population(run, TOKENS, PEERS, CPU)
    before = {name: tensor.clone() for name, tensor in some.stack.items()}
    whole.step(range(PEERS), [1e-3] * PEERS)
    some.step([0, 2], [1e-3, 1e-3])
    for name, tensor in some.stack.items():
        assert torch.equal(tensor[1], before[name][1])
        torch.testing.assert_close(tensor[[0, 2]], whole.stack[name][[0, 2]], rtol=0, atol=1e-6)


def test_peers_that_step_by_the_mean_gradient_are_one_peer_with_a_large_batch() -> None:
    run = tiny_run()
    virtual = Population(run, TOKENS, PEERS, CPU)
    model = causal.build(run.config, run.seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": run.inner.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(run.inner.beta1, run.inner.beta2),
    )
    streams = Sequences(TOKENS, run.data.sequence_length, run.data.shards, run.seed)
    cursors = [Cursor(peer) for peer in range(PEERS)]
    for _ in range(3):
        virtual.step(range(PEERS), [1e-3] * PEERS, averaged=True)
        read = [streams.read(cursor, run.data.batch) for cursor in cursors]
        cursors = [cursor for _, cursor in read]
        batch = torch.from_numpy(np.concatenate([windows for windows, _ in read]))
        causal.loss(model, batch[:, :-1], batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.inner.clip)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in model.named_parameters():
        for peer in range(PEERS):
            torch.testing.assert_close(virtual.stack[name][peer], weight.detach(), rtol=0, atol=1e-5)


def test_peers_with_texts_of_their_own_read_disjoint_parts() -> None:
    run = tiny_run()
    tokens = np.repeat(np.arange(PEERS, dtype=np.uint16), 4000)
    virtual = Population(run, tokens, PEERS, CPU, non_iid=True)
    for peer in range(PEERS):
        assert set(np.unique(virtual._read(peer))) == {peer}


def test_a_newcomer_has_its_donors_anchor_memory_and_round() -> None:
    run = tiny_run()
    virtual = Population(run, TOKENS, PEERS, CPU)
    virtual.step([0], [1e-3])
    donor, newcomer = virtual.states[0], virtual.states[2]
    donor.round = 7
    donor.outer["momentum"]["transformer.wte.weight"].fill_(3.0)
    donor.anchor["transformer.wte.weight"].fill_(2.0)
    virtual.copy(0, 2)
    assert newcomer.round == 7
    for name, anchor in donor.anchor.items():
        assert torch.equal(newcomer.weights[name], anchor) and torch.equal(newcomer.anchor[name], anchor)
        assert torch.equal(newcomer.outer["momentum"][name], donor.outer["momentum"][name])
    assert torch.equal(virtual.stack["transformer.wte.weight"][2], newcomer.weights["transformer.wte.weight"])
