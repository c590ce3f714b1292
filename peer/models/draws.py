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
        if func is aten.normal_.default:
            mean, deviation = _numbers(args)
            return self._fill(args[0], self._generator.standard_normal, deviation, mean)
        if func is aten.uniform_.default:
            low, high = _numbers(args)
            return self._fill(args[0], self._generator.random, high - low, low)
        return func(*args, **(kwargs or {}))

    def _fill(self, target: Tensor, draw: Draw, scale: float, shift: float) -> Tensor:
        rows = target if target.dim() else target.view(1)
        step = max(1, _BLOCK * len(rows) // max(1, rows.numel()))
        for part in torch.split(rows, step):
            part.copy_(torch.from_numpy(draw(tuple(part.shape)) * scale + shift))
        return target


def _numbers(args: tuple[Any, ...]) -> tuple[float, float]:
    # What follows the target; torch leaves out what equals the default, which is (0, 1) for both draws.
    given = args[1:]
    return (given[0] if given else 0.0), (given[1] if len(given) > 1 else 1.0)
