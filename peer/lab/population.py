"""Many virtual peers of one run in one process: their weights stacked, their inner steps taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer.core.gossip import outer_step, start
from peer.core.state import Cursor, State, Tensors
from peer.data.corpus import Tokens
from peer.data.stream import Sequences
from peer.lordo import handed_over, refresh
from peer.manifest import Manifest
from peer.models import causal
from peer.sensitivity import sensitivity
from peer.trainer import optimizer_for

CHUNK_TOKENS = 4096
"""Tokens, over all peers, that go through the stacked model at once: what fits a processor's cache does better."""


class Population:
    """The State, data stream and inner optimizer of every virtual peer, each the daemon's own.

    stack: parameter name → (peers, *shape), all peers' weights; states[i].weights are views of it, so what the core
    does to one peer's State in place is seen by the stacked model. All begin with the run's first weights.
    sensitivity[i]: of peer i's parameters, see `peer.sensitivity`.
    non_iid: each peer reads a contiguous part of the corpus of its own, in place of windows dealt from all of it.
    """

    def __init__(self, run: Manifest, tokens: Tokens, peers: int, device: torch.device, non_iid: bool = False) -> None:
        self.run, self.device = run, device
        self.model: nn.Module = causal.build(run.config, run.seed).to(device)
        first = {name: weight.detach() for name, weight in self.model.named_parameters()}
        self.stack: Tensors = {name: weight.expand(peers, *weight.shape).clone() for name, weight in first.items()}
        self.states = [self._state({name: whole[peer] for name, whole in self.stack.items()}) for peer in range(peers)]
        self.optimizers = [optimizer_for(run.inner, state.weights, run.seed) for state in self.states]
        self.sensitivity: list[dict[str, float]] = [{} for _ in self.states]
        length, seed = run.data.sequence_length, run.seed
        if non_iid:
            parts = np.array_split(np.asarray(tokens), peers)
            self._streams = [Sequences(part, length, 1, seed) for part in parts]
            cursors = [Cursor() for _ in parts]
        else:
            self._streams = [Sequences(tokens, length, max(run.data.shards, peers), seed) for _ in range(peers)]
            cursors = [Cursor(peer) for peer in range(peers)]
        for state, cursor in zip(self.states, cursors, strict=True):
            state.cursor = cursor
        self._gradients = vmap(grad_and_value(self._loss), chunk_size=max(1, CHUNK_TOKENS // (run.data.batch * length)))

    def __len__(self) -> int:
        return len(self.states)

    def step(self, who: Sequence[int], lrs: Sequence[float], averaged: bool = False) -> list[float]:
        """Take one inner step of each of some peers, at a learning rate of its own; return their losses.

        averaged: each steps by the mean of all their gradients, as in data-parallel training.
        """
        if not who:
            return []
        windows = torch.from_numpy(np.stack([self._read(peer) for peer in who])).to(self.device)
        everybody = list(who) == list(range(len(self)))
        weights = self.stack if everybody else {name: whole[list(who)] for name, whole in self.stack.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule on every device
            gradients, losses = self._gradients(weights, windows)
        if averaged:
            gradients = {name: whole.mean(0).expand_as(whole).contiguous() for name, whole in gradients.items()}
        for row, (peer, lr) in enumerate(zip(who, lrs, strict=True)):
            self._update(peer, {name: whole[row] for name, whole in gradients.items()}, lr)
        return [float(loss) for loss in losses]

    def end_round(self, peer: int, delta: Tensors | None = None) -> None:
        """End a peer's round as its trainer would; delta: what new low-rank bases are made of, None: its own drift."""
        state = self.states[peer]
        if delta is None:
            refresh(self.optimizers[peer], lambda name: state.weights[name] - state.anchor[name], state.round + 1)
        else:
            refresh(self.optimizers[peer], delta.__getitem__, state.round + 1)
        outer_step(self.run.outer, state)
        self.sensitivity[peer] = sensitivity(self.optimizers[peer], state.weights)

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Hand one peer's anchor, outer memory, low-rank memory and round to another, as a donor does to a newcomer."""
        donor, newcomer = self.states[source], self.states[target]
        for name, anchor in donor.anchor.items():
            newcomer.weights[name].copy_(anchor)
            newcomer.anchor[name].copy_(anchor)
            for slot, tensors in donor.outer.items():
                newcomer.outer[slot][name].copy_(tensors[name])
        newcomer.round = donor.round
        self.optimizers[target] = optimizer_for(self.run.inner, newcomer.weights, self.run.seed)
        if self.run.inner.optimizer == "lordo":
            shapes = {name: tuple(weight.shape) for name, weight in donor.weights.items()}
            for slot, names in handed_over(shapes, self.run.inner.rule).items():
                for name in names:
                    theirs = self.optimizers[source].state[donor.weights[name]][slot]
                    self.optimizers[target].state[newcomer.weights[name]][slot].copy_(theirs)

    def _state(self, weights: Tensors) -> State:
        anchor = {name: weight.clone() for name, weight in weights.items()}
        return State(weights, anchor, start(self.run.outer.form, weights))

    def _read(self, peer: int) -> Any:
        state = self.states[peer]
        windows, state.cursor = self._streams[peer].read(state.cursor, self.run.data.batch)
        return windows  # (batch, sequence_length + 1)

    def _loss(self, weights: Tensors, windows: Tensor) -> Tensor:
        # what `peer.models.causal.loss` computes, of one peer among the stacked ones
        return causal.loss(_Called(self.model, weights), windows[:, :-1], windows[:, 1:])

    def _update(self, peer: int, gradients: Tensors, lr: float) -> None:
        state, optimizer = self.states[peer], self.optimizers[peer]
        for name, weight in state.weights.items():
            weight.grad = gradients[name]
        nn.utils.clip_grad_norm_(state.weights.values(), self.run.inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for weight in state.weights.values():
            weight.grad = None
        state.step += 1


class _Called:
    """The run's model, called with weights that are given."""

    def __init__(self, model: nn.Module, weights: Tensors) -> None:
        self._model, self._weights = model, weights

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self._model, self._weights, (), inputs)
