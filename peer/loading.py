"""What takes long to load and needs no network: the model, its first weights, the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from peer.config import Config
from peer.data import corpus
from peer.data.stream import Sequences
from peer.home import Home
from peer.manifest import Manifest
from peer.models import causal, tokenizer
from peer.trainer import Trainer, choose_device


@dataclass(frozen=True)
class Loaded:
    """A trainer at the run's first weights.

    shapes: of the parameters, in the model's order. origin: hash of the first weights.
    """

    trainer: Trainer
    shapes: dict[str, tuple[int, ...]]
    origin: str
    parameters: int


def load(config: Config, run: Manifest, home: Home, say: Callable[[str], None]) -> Loaded:
    """Build the model and read the data; raises `ConfigError`."""
    device = choose_device(config.device)
    words = tokenizer.load(run.tokenizer)
    causal.check_fit(run.config, words.vocabulary_size, run.data.sequence_length)
    texts = corpus.load(config.data or run.data.corpus, words, home.cache, say)
    sequences = Sequences(texts.train, run.data.sequence_length, run.data.shards, run.seed)
    model: nn.Module = causal.build(run.config, run.seed)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    origin = causal.origin_hash(weights)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return Loaded(Trainer(run, model, sequences, device, say=say), shapes, origin, causal.parameter_count(model))
