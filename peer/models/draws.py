"""Random numbers that are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Draw = Callable[[tuple[int, ...]], NDArray[np.float64]]

_BLOCK = 1 << 20
"""Numbers drawn at a time, which bounds the memory of a draw in float64."""


class PortableDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Take normal and uniform draws from numpy's PCG64 in float64.

    torch's own normal_ differs in the last bits between processors (it has another kernel for each set of vector
    instructions), and the first weights of a run must be the same for all its peers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the two draws, let everything else through."""
        aten = torch.ops.aten
        first, second = (list(args[1:]) + [0.0, 1.0][len(args) - 1 :])[:2]  # both have these defaults
        if func is aten.normal_.default:  # (target, mean, standard deviation)
            return self._fill(args[0], self._generator.standard_normal, second, first)
        if func is aten.uniform_.default:  # (target, from, to)
            return self._fill(args[0], self._generator.random, second - first, first)
        return func(*args, **(kwargs or {}))

    def _fill(self, target: Tensor, draw: Draw, scale: float, shift: float) -> Tensor:
        rows = target if target.dim() else target.view(1)
        step = max(1, _BLOCK * len(rows) // max(1, rows.numel()))
        for part in torch.split(rows, step):
            part.copy_(torch.from_numpy(draw(tuple(part.shape)) * scale + shift))
        return target
