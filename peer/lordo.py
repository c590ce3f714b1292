"""The low-rank inner optimizer as torch knows optimizers: `peer.core.lordo` inside the layers, AdamW for all else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from peer.core import lordo
from peer.core.lordo import Memory, Rule
from peer.core.state import Tensors

Shape = tuple[int, ...]

_INSIDE = re.compile(r"(?:.*\.)?\d+\..+\.weight")


def is_block(name: str, shape: Shape) -> bool:
    """Tell whether a parameter is a matrix inside a numbered layer, such as "transformer.h.0.attn.c_attn.weight".

    Embeddings and heads stand outside of the layers, also where they are numbered themselves ("lm_heads.0.weight").
    Stacked experts (three dimensions) are none.
    """
    return len(shape) == 2 and _INSIDE.fullmatch(name) is not None


def slots(name: str, shape: Shape, rule: Rule) -> dict[str, Shape]:
    """Return what is kept of one parameter: slot → shape; `step` is the number of steps taken."""
    if not is_block(name, shape):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    short, long = sorted(shape)
    rank = lordo.rank_of(shape, rule.rank)
    kept = {"step": (), "exp_avg": (rank, long), "exp_avg_sq": (rank, long), "basis": (short, rank)}
    return kept | ({} if rule.feedback == "none" else {"feedback": (lordo.coded_bytes(shape),)})


def handed_over(shapes: Mapping[str, Shape], rule: Rule) -> dict[str, dict[str, Shape]]:
    """Return what of the memory a newcomer gets: slot → name → shape.

    It is the small part: that of the blocks, without error feedback, which is the donor's own debt. AdamW's moments of
    the other parameters are as large as these, and begin anew.
    """
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if is_block(name, shape):
            for slot, kept in slots(name, shape, rule).items():
                if slot != "feedback":
                    found.setdefault(slot, {})[name] = kept
    return found


def flaw_of(memory: Mapping[str, Tensors]) -> str | None:
    """Return why a memory that was handed over can be none, such as a basis that is not orthonormal; None if it can."""
    for slot, tensors in memory.items():
        for name, tensor in tensors.items():
            if slot in ("step", "exp_avg_sq") and bool((tensor < 0).any()):
                return f"{slot} of {name} is negative"
            if slot == "basis" and not _is_orthonormal(tensor):
                return f"the basis of {name} is not orthonormal"
    return None


def _is_orthonormal(basis: Tensor) -> bool:
    unit = torch.eye(basis.shape[1], device=basis.device, dtype=basis.dtype)
    return bool(((basis.mT @ basis - unit).abs() < 1e-3).all())


class Lordo(torch.optim.Optimizer):
    """LoRDO over named weights. Its memory is there from the beginning, in float32 or wider, whatever the weights are.

    The memory travels as `peer.core.state.State.inner`; load_state_dict would cast it to the weights' dtype.
    rule: see `peer.core.lordo`. seed: the run's, of which the first basis is drawn, and later ones if they are random.
    """

    def __init__(self, weights: Tensors, rule: Rule, lr: float, seed: int) -> None:
        super().__init__(list(weights.values()), {"lr": lr})
        self.rule = rule
        self._weights = weights
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """Make what is missing of the memory, as it is before the first step."""
        for name, weight in self._weights.items():
            for slot, shape in slots(name, tuple(weight.shape), self.rule).items():
                if slot not in self.state[weight]:
                    self.state[weight][slot] = self._blank(name, weight, slot, shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one inner step on every weight that has a gradient; there are no closures here."""
        lr = float(self.param_groups[0]["lr"])
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._step(name, weight, lr)

    @torch.no_grad()
    def project(self, delta: Callable[[str], Tensor], round: int) -> None:
        """Give every block the basis of the round that begins; delta: name → the drift of the one that ends."""
        for name, weight in self._weights.items():
            if is_block(name, tuple(weight.shape)):
                basis = self._basis(name, delta, round, self.state[weight]["basis"])
                lordo.rotate(self._memory(weight), basis, self.rule, int(self.state[weight]["step"]))

    def feedback_norm(self) -> float | None:
        """Return the L2 norm of all E, what the bases have left out so far; None without error feedback."""
        if self.rule.feedback == "none":
            return None
        squares = 0.0
        for weight in self._weights.values():
            if "feedback" in self.state[weight]:
                squares += float(lordo.uncoded(self.state[weight]["feedback"], lordo.upright(weight)).norm()) ** 2
        return math.sqrt(squares)

    def _basis(self, name: str, delta: Callable[[str], Tensor], round: int, old: Tensor) -> Tensor:
        if self.rule.projection == "random":
            return lordo.drawn(tuple(old.shape), self._seed, name, round).to(old)
        return lordo.project(lordo.upright(delta(name)).to(old), old, self.rule.projection)

    def _step(self, name: str, weight: Tensor, lr: float) -> None:
        memory = self.state[weight]
        memory["step"] += 1
        step, dtype = int(memory["step"]), memory["exp_avg"].dtype
        exact, gradient = weight.to(dtype), weight.grad.to(dtype)  # type: ignore[union-attr]
        if is_block(name, tuple(weight.shape)):
            lordo.update(lordo.upright(exact), lordo.upright(gradient), self._memory(weight), self.rule, step, lr)
        else:
            decay = self.rule.weight_decay if weight.ndim >= 2 else 0.0
            lordo.adam(exact, gradient, memory["exp_avg"], memory["exp_avg_sq"], self.rule, step, lr, decay)
        if exact is not weight:
            weight.copy_(exact)

    def _memory(self, weight: Tensor) -> Memory:
        memory = self.state[weight]
        return Memory(memory["basis"], memory["exp_avg"], memory["exp_avg_sq"], memory.get("feedback"))

    def _blank(self, name: str, weight: Tensor, slot: str, shape: Shape) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if slot == "step":
            return torch.zeros(())  # on the CPU, as torch's own optimizers keep it
        if slot == "basis":
            return lordo.drawn(shape, self._seed, name, 0).to(weight.device, dtype)
        return torch.zeros(shape, device=weight.device, dtype=torch.uint8 if slot == "feedback" else dtype)


def refresh(optimizer: torch.optim.Optimizer, delta: Callable[[str], Tensor], round: int) -> None:
    """End a round for an inner optimizer: one of low rank gets its next bases, any other is left alone.

    delta: name → drift of the round that ends, made when it is asked for, so that one of them exists at a time; the
    peer's own (weights − anchor), or an average of several peers'. round: that begins, 1 for the second one.
    """
    if isinstance(optimizer, Lordo):
        optimizer.project(delta, round)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Measure an optimizer's memory: the bytes of the tensors that it keeps now."""
    return sum(map(_bytes, optimizer.state.values()))


def block_bytes(optimizer: torch.optim.Optimizer, weights: Tensors) -> int:
    """Measure an optimizer's memory of the blocks alone, the matrices that are low-rank under LoRDO."""
    blocks = [weight for name, weight in weights.items() if is_block(name, tuple(weight.shape))]
    return sum(_bytes(optimizer.state[weight]) for weight in blocks if weight in optimizer.state)


def _bytes(memory: Mapping[str, Any]) -> int:
    return sum(each.numel() * each.element_size() for each in memory.values() if isinstance(each, Tensor))
