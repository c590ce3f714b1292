"""What several peers' training came to: held-out loss of each and of their average, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from peer.core.state import Tensors
from peer.data.corpus import Tokens
from peer.data.stream import Ints, heldout_batches
from peer.manifest import Manifest
from peer.models import causal

TOKENS = 16384
"""Read for each held-out loss, in windows spread over all that is held out; the same for every model."""

LEAST_WINDOWS = 8


@dataclass(frozen=True)
class Assessment:
    """Held-out losses in nats a token; None where there are no weights.

    start: of the run's first weights. peers: of each peer. average: of the mean of all peers' weights. disagreement:
    how far the peers are from that mean, see `Spread`.
    """

    start: float
    peers: tuple[float | None, ...]
    average: float | None
    disagreement: float | None


class Spread:
    """The mean of models and their distance from it, taking one model at a time (Welford's method).

    mean: of the models added so far; empty before the first.
    """

    def __init__(self) -> None:
        self.mean: Tensors = {}
        self._count = 0
        self._squares = 0.0  # sum of ‖w_i − w̄‖² over the models so far

    def add(self, weights: Tensors) -> None:
        """Take one more model in; all have the same names and shapes."""
        self._count += 1
        if not self.mean:
            self.mean = {name: weight.detach().clone() for name, weight in weights.items()}
            return
        for name, weight in weights.items():
            difference = weight.detach() - self.mean[name]
            self.mean[name].add_(difference, alpha=1 / self._count)
            self._squares += _square(difference) * (1 - 1 / self._count)

    @property
    def disagreement(self) -> float | None:
        """Return sqrt(mean_i ‖w_i − w̄‖²) / ‖w̄‖ over all parameters at once; None without a model.

        0 when all are equal; 0.01 means that a peer is typically a percent of the model's size away from the mean.
        """
        if not self.mean:
            return None
        size = math.sqrt(sum(_square(mean) for mean in self.mean.values()))
        return math.sqrt(self._squares / self._count) / size if size else 0.0


class Survey:
    """Held-out losses of one model after another, and of their mean; computes in the model it is given."""

    def __init__(self, model: nn.Module, windows: Sequence[Ints], device: torch.device) -> None:
        self.spread = Spread()
        self._model, self._windows, self._device = model, windows, device
        self._last: float | None = None

    def add(self, weights: Tensors) -> float:
        """Take one more model in; return its loss."""
        self.spread.add(weights)
        return self._loss(weights)

    def average(self) -> float:
        """Return the loss of the mean of all models so far, of which there is at least one."""
        return self._loss(self.spread.mean)

    @torch.no_grad()
    def _loss(self, weights: Tensors) -> float:
        parameters = dict(self._model.named_parameters())
        if self._last is None or not all(torch.equal(weights[name], each) for name, each in parameters.items()):
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
            self._last = mean_loss(self._model, self._windows, self._device)
        return self._last


def assess(
    run: Manifest, heldout: Tokens, peers: Iterable[Tensors | None], device: torch.device | None = None
) -> Assessment:
    """Evaluate the run's first weights, each peer's, and the mean of them all, on the same held-out tokens.

    peers: each one's weights on the CPU, None for one that left none; taken one at a time, so that only the mean and
    one more model are in memory. Raises `ConfigError` when too little is held out.
    """
    device = device or torch.device("cpu")
    length = run.data.sequence_length
    windows = list(heldout_batches(heldout, length, run.data.batch, max(LEAST_WINDOWS, TOKENS // length)))
    model = causal.build(run.config, run.seed).to(device)
    start = mean_loss(model, windows, device)
    survey = Survey(model, windows, device)
    losses = tuple(None if weights is None else survey.add(weights) for weights in peers)
    average = survey.average() if survey.spread.mean else None
    return Assessment(start, losses, average, survey.spread.disagreement)


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Sequence[Ints], device: torch.device) -> float:
    """Return a model's mean loss over windows of equal length, each batch (some, length + 1)."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        windows = torch.from_numpy(batch).to(device)
        total += float(causal.loss(model, windows[:, :-1], windows[:, 1:])) * len(windows)
        count += len(windows)
    return total / count


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
