"""Model, data, inner optimizer: inner steps until the round is over. Knows no network.

The trainer owns `State`: its weights are the model's own parameters, its inner slots the optimizer's own tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peer.core.gossip import outer_step, slots, start
from peer.core.schedule import factor
from peer.core.state import Cursor, State, Tensors
from peer.data.stream import Sequences
from peer.errors import ConfigError
from peer.lordo import Lordo, refresh, state_bytes
from peer.manifest import Inner, Manifest
from peer.models.causal import loss
from peer.sensitivity import sensitivity
from peer.still import Still

COASTED = 64
"""After so many rounds without inner steps nothing moves any more: of the momentum 0.65^64 is left, or 0.9^64."""

MICRO_TOKENS = {"cpu": 1024, "cuda": 16384, "mps": 8192}
"""Tokens that go through the model at once, as long as memory allows it; a larger batch is accumulated."""


@dataclass(frozen=True)
class Tally:
    """What a round came to. loss: mean over its steps, nats a token; drift: L2 norm of weights − anchor.

    micro_batch: sequences that went through the model at once. optimizer_bytes: the inner optimizer's memory, measured.
    feedback: L2 norm of its error feedback, None without one.
    """

    steps: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    drift: float
    micro_batch: int
    optimizer_bytes: int
    feedback: float | None


def choose_device(wish: str) -> torch.device:
    """Return the device that is asked for; "auto" takes the best one there is. Raises `ConfigError`."""
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wish == "auto":
        return torch.device(best)
    try:
        device = torch.device(wish)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {wish}: {reason}; this machine has {best}, use --device {best}") from None
    return device


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return what the forward pass computes in: bfloat16 where the device has it, else float32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


def optimizer_for(inner: Inner, weights: Tensors, seed: int = 0) -> torch.optim.Optimizer:
    """Return the inner optimizer; matrices decay, vectors don't (decoupled decay).

    seed: the run's, for low-rank bases. At the end of each round `peer.lordo.refresh` wants to be called.
    """
    if inner.optimizer == "lordo":
        return Lordo(weights, inner.rule, inner.lr, seed)
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    vectors = [weight for weight in weights.values() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
    )


class Trainer:
    """One peer's training, a step at a time.

    step_s: how long the last inner step took, in seconds, 0 before there was one. sensitivity: how much the loss minds
    a change in each parameter, as it stood at the last outer step. still: whoever holds it finds the weights unmoving.
    micro_batch: sequences that go through the model at once, halved whenever memory does not suffice.
    """

    def __init__(
        self,
        run: Manifest,
        model: nn.Module,
        sequences: Sequences,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run = run
        self._say = say
        self.device = device
        self.dtype = compute_dtype(device)
        self.model = model.to(device)
        tokens = MICRO_TOKENS.get(device.type, MICRO_TOKENS["cpu"])
        self.micro_batch = self._most_at_once = min(run.data.batch, max(1, tokens // run.data.sequence_length))
        self._sequences = sequences
        self._clock = clock
        weights: Tensors = dict(self.model.named_parameters())
        anchor = {name: weight.detach().clone() for name, weight in weights.items()}
        self.state = State(weights, anchor, start(run.outer.form, weights))
        self._optimizer = optimizer_for(run.inner, weights, run.seed)
        self._gather_inner()
        self.sensitivity = sensitivity(self._optimizer, weights)
        self._began = clock()
        self._losses: list[Tensor] = []
        self._abandon = False
        self._landing = False
        self.still = Still()
        self.step_s = 0.0
        self._round_s = 0.0

    def adopt(self, state: State) -> None:
        """Continue from another State (a checkpoint, a donor's): copy its tensors into the live ones."""
        with torch.no_grad():
            for name, weight in self.state.weights.items():
                weight.copy_(state.weights[name])
                self.state.anchor[name].copy_(state.anchor[name])
                for slot in slots(self.run.outer.form):
                    self.state.outer[slot][name].copy_(state.outer[slot][name])
        self.state.round, self.state.step = state.round, state.step
        self.state.cursor, self.state.origin = state.cursor, state.origin
        self._optimizer.state.clear()
        for slot, tensors in state.inner.items():
            for name, tensor in tensors.items():
                weight = self.state.weights[name]
                # AdamW's step counter lives on the CPU, its moments with the weights
                memory = tensor.clone() if tensor.ndim == 0 else tensor.to(weight.device, copy=True)
                self._optimizer.state[weight][slot] = memory
        if isinstance(self._optimizer, Lordo):
            self._optimizer.begin()  # what a donor does not hand over
        self._gather_inner()
        self.sensitivity = sensitivity(self._optimizer, self.state.weights)
        self.begin_round()

    def catch_up(self, state: State, round: int = 0) -> None:
        """Continue from a donor's State, with the data and the count of steps that are our own.

        round: that the others have reached meanwhile. The rounds up to it are taken without inner steps, which is what
        a peer that takes none in a round does: its momentum carries it on, and fades.
        """
        state.cursor, state.step = self.state.cursor, self.state.step
        self.adopt(state)
        for _ in range(min(COASTED, round - self.round)):
            outer_step(self.run.outer, self.state)
        self.state.round = max(self.round, round)

    def begin(self) -> None:
        """Begin to train, for the first time or after `abandon`; the round begins anew, with the drift so far."""
        self._abandon = self._landing = False
        self.micro_batch = self._most_at_once  # what else needed memory may be gone
        self.begin_round()

    def begin_round(self) -> None:
        """Start counting a round's steps and time."""
        self._began = self._clock()
        self._losses = []

    def land(self) -> None:
        """Begin a last round, without steps, that takes as long as the one before it."""
        self.begin_round()
        self._landing = True

    def claim(self, shard: int) -> None:
        """Read another shard of the data from the next step on; callable from any thread."""
        with self.still.reading():
            self.state.cursor = Cursor(shard, self.state.cursor.lap, 0)

    @property
    def round(self) -> int:
        """Outer steps done."""
        return self.state.round

    @property
    def round_s(self) -> float:
        """How long a round takes, in seconds: the last one, or as planned before there was one; 0 if nobody knows."""
        return self._round_s or self.run.round_seconds or self.step_s * (self.run.local_steps or 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the round began."""
        return self._clock() - self._began

    @property
    def fraction(self) -> float:
        """How much of the round is done, from 0 to 1, by steps or by time as the run has it; landing, by time."""
        if self._landing:
            return min(1.0, self.elapsed_s / self.round_s) if self.round_s else 1.0
        if self.run.local_steps is not None:
            return min(1.0, len(self._losses) / self.run.local_steps)
        return min(1.0, self.elapsed_s / (self.run.round_seconds or 1.0))

    @property
    def round_is_over(self) -> bool:
        """Whether the outer step is due; a round has at least one inner step."""
        return bool(self._losses) and self.fraction >= 1.0

    @property
    def lr(self) -> float:
        """The inner learning rate at this point of the run."""
        return self.run.inner.lr * factor(self.run.schedule, self.run.rounds, self.state.round + self.fraction)

    def abandon(self) -> None:
        """Make the step that is under way end without touching the weights; callable from any thread."""
        self._abandon = True

    def step(self) -> bool:
        """Take one inner step; False when it was abandoned half-way, which leaves State as it was."""
        began = self._clock()
        state, batch = self.state, self.run.data.batch
        before = state.cursor
        windows, cursor = self._sequences.read(before, batch)
        while (total := self._gradients(windows)) is None and not self._abandon:
            self._shrink()
        with self.still.changing():
            if self._abandon or total is None:
                self._optimizer.zero_grad(set_to_none=True)
                return False
            self._update(self.lr)
            self._losses.append(total)
            state.step += 1
            if state.cursor.shard == before.shard:
                state.cursor = cursor
        self.step_s = self._clock() - began
        return True

    def end_round(self) -> Tally:
        """Take the outer step and begin the next round."""
        steps, lr, seconds = len(self._losses), self.lr, self.elapsed_s
        mean_loss = float(torch.stack(self._losses).mean())
        weights, anchor = self.state.weights, self.state.anchor
        with self.still.changing():
            # the drift is this peer's own: a correction stands in weights and anchor
            refresh(self._optimizer, lambda name: weights[name].detach() - anchor[name], self.state.round + 1)
            drift = outer_step(self.run.outer, self.state)
            self.sensitivity = sensitivity(self._optimizer, weights)
        feedback = self._optimizer.feedback_norm() if isinstance(self._optimizer, Lordo) else None
        self.begin_round()
        self._round_s = seconds
        tokens = steps * self.run.data.batch * self.run.data.sequence_length
        optimizer_bytes = state_bytes(self._optimizer)
        return Tally(steps, mean_loss, lr, tokens, seconds, drift, self.micro_batch, optimizer_bytes, feedback)

    def _gradients(self, windows: NDArray[np.int64]) -> Tensor | None:
        """Add up a batch's gradients and return its loss; None if there was too little memory, or it was abandoned."""
        total, batch = torch.zeros((), device=self.device), len(windows)
        for first in range(0, batch, self.micro_batch):
            if self._abandon:
                return None
            piece = torch.from_numpy(windows[first : first + self.micro_batch])
            try:
                total += self._backward(piece, len(piece) / batch)
            except (RuntimeError, MemoryError) as error:
                # once abandoned, the weights may be corrected under a backward pass, which torch notices
                if not self._abandon and not _out_of_memory(error):
                    raise
                return None
        return total

    def _shrink(self) -> None:
        """Let half as much go through the model at once: twice as many pieces, and as many tokens a step as before."""
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.micro_batch == 1:
            raise ConfigError(
                f"{self.device} has too little memory for a single sequence of {self.run.data.sequence_length} tokens; "
                "close what else uses it, give another --device, or join a run with a smaller model"
            )
        self.micro_batch //= 2
        self._say(f"memory is short: {self.micro_batch} sequences at once from now on, as many tokens a step as before")

    def _backward(self, windows: Tensor, share: float) -> Tensor:
        if self.device.type == "cuda":
            windows = windows.pin_memory()
        windows = windows.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            mean = loss(self.model, windows[:, :-1], windows[:, 1:]) * share
        mean.backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    def _update(self, lr: float) -> None:
        if self.run.inner.clip > 0:
            nn.utils.clip_grad_norm_(self.state.weights.values(), self.run.inner.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not self.state.inner:
            self._gather_inner()

    def _gather_inner(self) -> None:
        names: dict[Any, str] = {weight: name for name, weight in self.state.weights.items()}
        self.state.inner = {}
        for weight, memory in self._optimizer.state.items():
            for slot, tensor in memory.items():
                self.state.inner.setdefault(slot, {})[names[weight]] = tensor


def _out_of_memory(error: BaseException) -> bool:
    # torch has a class of its own only for CUDA
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory")
    )
