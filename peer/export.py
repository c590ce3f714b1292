"""Write a model out as a folder that transformers loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from peer.errors import ConfigError
from peer.models import causal
from peer.models.tokenizer import Tokenizer


def export(weights: Mapping[str, Tensor], config: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (by parameter name, as `peer.models.causal.build` names them) and tokenizer to the folder `out`.

    transformers' AutoModelForCausalLM.from_pretrained(out) and AutoTokenizer.from_pretrained(out) load it without a
    network. The folder appears whole or not at all. Raises ConfigError when it is there already and not empty, when it
    can't be written, and when the weights are not the config's.
    """
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(f"'{out}' is there already; give the name of a new folder, or of an empty one")
        model = _filled(weights, config)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as around, _no_progress_bar():
            folder = Path(around) / "model"  # one deeper, since the outer folder is made for its owner alone
            folder.mkdir()
            model.save_pretrained(folder)
            tokenizer.save(folder)
            os.replace(folder, out)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror}; free space there or allow writing") from error


def _filled(weights: Mapping[str, Tensor], config: dict[str, Any]) -> Any:
    model = causal.build(config, seed=0)
    parameters = dict(model.named_parameters())
    strange = sorted(parameters.keys() ^ weights.keys())
    if strange:
        verdict = "missing" if strange[0] in parameters else "none of them"
        raise ConfigError(f"these are not the model's weights: '{strange[0]}' is {verdict}; use the run's own model")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != weights[name].shape:
                raise ConfigError(
                    f"these are not the model's weights: '{name}' is {tuple(weights[name].shape)} and should be "
                    f"{tuple(parameter.shape)}; use the run's own model"
                )
            parameter.copy_(weights[name])
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
