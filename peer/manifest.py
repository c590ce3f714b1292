"""The run: model, data, optimizers, exchange, seed. Its hash is the run id, so peers of other runs are told apart.

A manifest is a TOML file (`peer join --run FILE`) or a preset's (peer/manifests/, one complete file for each model).
In a file only `model` is required; what it leaves out is taken from the preset of that model, or, for a model that
comes from a config file, from the preset nearest in size.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from peer import tables
from peer.core import schedule, stability, terms
from peer.core.gossip import Outer
from peer.core.schedule import Schedule
from peer.errors import ConfigError
from peer.inner import Inner as Inner
from peer.models import presets, tokenizer

VERSION = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read. shards: disjoint parts of the corpus, so that peers read different ones. batch: sequences a step.

    corpus: the name of one that the package ships, or a path, from which every peer must read the same.
    """

    corpus: str = "moby-dick"
    shards: int
    sequence_length: int  # tokens
    batch: int


@dataclass(frozen=True)
class Exchange:
    """How peers mix.

    meetings: aimed at, a round, where links afford it. codec: see `peer.core.codec`; "auto": as rich as links afford.
    max_lag: rounds that may lie between partners.
    """

    meetings: int
    codec: str
    max_lag: int


SECTIONS: dict[str, type] = {"data": Data, "inner": Inner, "schedule": Schedule, "outer": Outer, "exchange": Exchange}

_TOP = {
    "version": int,
    "name": str,
    "model": str,
    "tokenizer": str,
    "seed": int,
    "rounds": int,
    "local_steps": int,
    "round_seconds": float,
}

_SHIPPED = ("bytes", "gpt2")
"""Tokenizers that go by name; any other is the path of a tokenizer.json."""

_PACE = ("local_steps", "round_seconds")

_BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "rounds": (1, 10**9),
    "local_steps": (1, 10**6),
    "round_seconds": (0.1, 86400.0),
    "data.shards": (1, 2**20),
    "data.sequence_length": (2, 2**20),
    "data.batch": (1, 2**16),
    "inner.lr": (1e-9, 10.0),
    "inner.beta1": (0.0, 0.99999),
    "inner.beta2": (0.0, 0.99999),
    "inner.epsilon": (1e-20, 1.0),
    "inner.weight_decay": (0.0, 10.0),
    "inner.clip": (1e-6, 1e6),
    "inner.rank": (0, 2**16),
    "inner.omega": (0.01, 1.0),
    "exchange.meetings": (0, 1000),
    "exchange.max_lag": (0, 10**6),
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One run, complete.

    model: a preset's name, or the absolute path of a transformers config.json. config: what that resolves to.
    tokenizer: "bytes", "gpt2", or the absolute path of a tokenizer.json. A round takes local_steps inner steps, or as
    many as a peer can in round_seconds; exactly one of the two is given.
    """

    version: int = VERSION
    name: str
    model: str
    config: dict[str, Any]
    tokenizer: str
    seed: int
    rounds: int
    local_steps: int | None = None
    round_seconds: float | None = None
    data: Data
    inner: Inner
    schedule: Schedule
    outer: Outer
    exchange: Exchange

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest from a file; raises `ConfigError`, which names the file."""
        text = tables.read(path)
        try:
            return cls.parse(text, path.parent)
        except ConfigError as error:
            raise ConfigError(f"run manifest '{path}': {error}") from error

    @classmethod
    def parse(cls, text: str, base: Path | None = None) -> Manifest:
        """Read a manifest; base: the folder from which a relative path of a model's config starts."""
        return cls.of(tables.parse(text), base)

    @classmethod
    def of(
        cls, table: Mapping[str, Any], base: Path | None = None, config: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Make a manifest of the values of its file; base: as for `parse`.

        config: laid over the model's, for the lab; a file can't say it, so `to_toml` of such a run is another run.
        """
        table = dict(table)
        if table.get("version", VERSION) != VERSION:
            raise ConfigError(
                f"version is {table['version']!r}; this peerloom reads version {VERSION}, so use a matching one"
            )
        sections = {name: _section(name, table.pop(name, {})) for name in SECTIONS}
        top = tables.typed(table, {**_TOP, **SECTIONS})
        if "model" not in top:
            raise ConfigError('no model is named; add a line such as: model = "gpt-125m"')
        return _complete(top, sections, base, config)

    @classmethod
    def preset(cls, model: str, base: Path | None = None) -> Manifest:
        """Return the run that goes with a model: a preset's name, or the path of a transformers config.json."""
        return _complete({"model": model}, {name: {} for name in SECTIONS}, base)

    @classmethod
    def choose(cls, run: Path | None, model: str, inner: str | None = None) -> Manifest:
        """Return the manifest of a file if one is given, else a model's preset, trained by another inner optimizer.

        model: as for `preset`; may be empty beside a file. Raises `ConfigError` when a file names another model than
        model, or another optimizer than inner: a file is a run as it is.
        """
        if run is None:
            return cls.preset(model) if inner is None else cls.preset(model).trained_by(inner)
        manifest = cls.load(run)
        if model and _absolute(model, presets.names(), None) != manifest.model:
            raise ConfigError(f"run manifest '{run}' is for model '{manifest.model}', not '{model}'; leave --model out")
        if inner not in (None, manifest.inner.optimizer):
            raise ConfigError(
                f"run manifest '{run}' trains with {manifest.inner.optimizer}, not {inner}; leave --inner out to join "
                f'that run, or write optimizer = "{inner}" under [inner] in a copy of it, which is another run'
            )
        return manifest

    def trained_by(self, optimizer: str) -> Manifest:
        """Return this run with an inner optimizer, which may make it another run; raises `ConfigError`."""
        inner = replace(self.inner, **_section("inner", {"optimizer": optimizer}))
        return replace(self, inner=replace(inner, **inner.unused)).check()

    @property
    def flags(self) -> str | None:
        """What `peer join` needs to take part, such as "--model gpt-nano --inner lordo"; None: the file."""
        if self.model not in presets.names():
            return None
        preset, optimizer = Manifest.preset(self.model), self.inner.optimizer
        ways = {"": preset, f" --inner {optimizer}": preset.trained_by(optimizer)}
        return next((f"--model {self.model}{more}" for more, run in ways.items() if run.run_id == self.run_id), None)

    @cached_property
    def run_id(self) -> str:
        """The first 32 hex digits of the SHA-256 of everything that `canonical` returns."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:32]

    def canonical(self) -> str:
        """Return the run as JSON in one fixed form.

        All of it counts but `model`, which is only where `config` came from, and the keys of an inner optimizer that is
        not this run's; so does the content of a tokenizer's file.
        """
        values = asdict(self)
        del values["model"]
        if self.tokenizer not in _SHIPPED:
            values["tokenizer"] = tokenizer.load(self.tokenizer).fingerprint
        for name, kind in SECTIONS.items():
            hints = get_type_hints(kind)
            values[name] = {key: float(value) if hints[key] is float else value for key, value in values[name].items()}
        for key in self.inner.unused:
            del values["inner"][key]
        if self.round_seconds is not None:
            values["round_seconds"] = float(self.round_seconds)
        return json.dumps(
            values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain
        )

    def to_toml(self) -> str:
        """Return the manifest as a complete file; `parse` makes the same run of it."""
        lines = [_line(key, getattr(self, key)) for key in _TOP if getattr(self, key) is not None]
        for name, kind in SECTIONS.items():
            section = getattr(self, name)
            unused = section.unused if isinstance(section, Inner) else {}
            keys = [field.name for field in fields(kind) if field.name not in unused]
            lines += ["", f"[{name}]", *(_line(key, getattr(section, key)) for key in keys)]
        return "\n".join(lines) + "\n"

    def check(self) -> Manifest:
        """Return this manifest if a swarm can run by it; raises `ConfigError` with what to change."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}; give 1 to 64 letters, digits, dots, dashes or underscores")
        if (self.local_steps is None) == (self.round_seconds is None):
            raise ConfigError("give either local_steps or round_seconds, not both and not neither")
        for key, (low, high) in _BOUNDS.items():
            value: Any = self
            for part in key.split("."):
                value = getattr(value, part)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{key} is {value}; give a number from {low} to {high}")
        self.inner.check()
        positions = self.config.get("n_positions", self.config.get("max_position_embeddings"))
        if isinstance(positions, int) and self.data.sequence_length > positions:
            raise ConfigError(
                f"data.sequence_length is {self.data.sequence_length}, but the model has {positions} positions; "
                f"give {positions} or less"
            )
        try:
            self.canonical()
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"the model's config holds what JSON cannot say ({error}); remove it") from error
        terms.ladder(self.exchange.codec)
        for decision in (schedule.check(self.schedule, self.rounds), stability.check(self.outer)):
            if not decision:
                raise ConfigError(decision.detail)
        return self


def _section(name: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"'{name}' is a table; write [{name}] and its keys below it")
    return tables.typed(table, get_type_hints(SECTIONS[name]), f"[{name}]")


def _complete(
    top: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    base: Path | None,
    over: Mapping[str, Any] | None = None,
) -> Manifest:
    """Fill what is left out from the preset; over: laid over the model's config."""
    model = top["model"]
    config = presets.resolve(model, base) | dict(over or {})
    preset = _preset(model, config)
    values: dict[str, Any] = {key: preset[key] for key in _TOP if key in preset}
    if any(key in top for key in _PACE):
        values = {key: value for key, value in values.items() if key not in _PACE}
    values |= top | {"config": config, "model": _absolute(model, presets.names(), base)}
    values["tokenizer"] = _absolute(values["tokenizer"], _SHIPPED, base)
    for name, kind in SECTIONS.items():
        values[name] = kind(**_section(name, preset[name]) | sections[name])
    return Manifest(**values).check()


def _absolute(name: str, known: tuple[str, ...], base: Path | None) -> str:
    return name if name in known else str(((base or Path()) / name).resolve())


def _preset(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the preset's tables; for a config file those of the preset nearest in size, made to fit."""
    if model in presets.names():
        return _tables(model)
    size = _parameters(config)
    near = min(presets.names(), key=lambda name: abs(math.log(_parameters(presets.resolve(name)) / size)))
    table = _tables(near) | {"name": str(config["model_type"]), "tokenizer": presets.tokenizer_for(model)}
    positions = config.get("n_positions", config.get("max_position_embeddings"))
    if isinstance(positions, int):
        table["data"]["sequence_length"] = min(table["data"]["sequence_length"], positions)
    return table


def _tables(name: str) -> dict[str, Any]:
    return tables.parse((resources.files("peer") / "manifests" / f"{name}.toml").read_text())


def _parameters(config: dict[str, Any]) -> float:
    """Estimate how many numbers a transformer has, well enough to tell presets apart."""
    width = config.get("n_embd", config.get("hidden_size"))
    layers = config.get("n_layer", config.get("num_hidden_layers"))
    vocabulary = config.get("vocab_size")
    if not (isinstance(width, int) and isinstance(layers, int) and isinstance(vocabulary, int)):
        return _parameters(presets.resolve("gpt-125m"))
    return max(1.0, 12.0 * layers * width**2 + vocabulary * width)


def _line(key: str, value: Any) -> str:
    value = _plain(value) if isinstance(value, Enum) else value
    if isinstance(value, str):
        # A TOML text is a JSON text, but for one character that JSON leaves as it is.
        return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
    return f"{key} = {value!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a {type(value).__name__} has no place in a manifest")
