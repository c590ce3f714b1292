"""The live weights, as meetings see them: read beside training, in a thread of their own.

That the weights move between two products of a meeting does not matter: whatever comes of it, both sides apply the same
correction. It only matters that a correction itself falls between two inner steps; that is `peer.boundary`.

On a GPU products run on a stream of their own, after what training has queued so far, and no further: training's stream
never waits for it but to add a correction, once that is there. (Not run on a GPU yet.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peer.core.gossip import Outer, exchanged
from peer.core.state import State
from peer.still import Still


class View:
    """What meetings read of a State, and where what they compute belongs."""

    def __init__(self, outer: Outer, state: State, still: Still) -> None:
        self._outer, self._state, self._still = outer, state, still
        self.device = next(iter(state.weights.values())).device
        self._side = _stream(self.device)
        self._norm, self._norm_round = 0.0, -1

    def read(self, name: str, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function to a parameter while it stands still; some milliseconds at most."""
        with self._still.reading(), self._aside():
            # from a GPU in here: elsewhere torch would not wait for the side stream, nor would the weights stand still
            return product(exchanged(self._outer, self._state, name)).float().cpu()

    def norm(self) -> float:
        """Return the L2 norm of the weights, as it was at some moment of this round."""
        if self._norm_round != self._state.round:
            norms = []
            for weight in self._state.weights.values():
                with self._still.reading():
                    norms.append(torch.linalg.vector_norm(weight.detach()))
            self._norm, self._norm_round = float(torch.stack(norms).double().norm()), self._state.round
        return self._norm

    def await_products(self) -> None:
        """On a GPU: let training's stream wait until what was computed beside it is there."""
        if self._side is not None:
            torch.cuda.default_stream(self.device).wait_stream(self._side)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._side):
            yield


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
