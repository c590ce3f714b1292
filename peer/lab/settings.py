"""The settings of one experiment: a table of them, as a TOML file or a command line gives it, made an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from peer import tables
from peer.core.gossip import Outer
from peer.data import corpus
from peer.errors import ConfigError
from peer.inner import LORDO
from peer.lab.algorithms import ALGORITHMS
from peer.lab.experiment import Experiment
from peer.lab.graphs import Graph
from peer.manifest import SECTIONS, Manifest
from peer.models import presets

MODEL = "gpt-nano"
PEERS = 8
ALGORITHM = "gasloc"
EVALUATIONS = 10

Settings = dict[str, Any]
"""What an experiment is made of, by the keys of `KINDS`, as plain values with absolute paths (`settled`)."""

KINDS: dict[str, Any] = {
    "algorithm": str,
    "peers": int,
    "rounds": int,
    "local_steps": int,
    "graph": Graph,
    "spread": bool,
    "links": Path,
    "churn": str,  # or a number
    "non_iid": bool,
    "evaluations": int,
    "model": str,
    "run": Path,  # a manifest's file, in place of the model's preset
    "tokenizer": str,
    "config": dict,  # laid over the model's
    **dict.fromkeys(SECTIONS, dict),  # laid over the manifest's
}

DEEP = ("config", *SECTIONS)
_NAMES = (*presets.names(), "bytes", "gpt2")  # of models and tokenizers; others are paths
_OF_EXPERIMENT = ("graph", "spread", "non_iid", "churn")
_OF_RUN = ("rounds", "local_steps", "tokenizer")


def settled(table: Mapping[str, Any], base: Path) -> Settings:
    """Return a table with the keys of `KINDS` as settings; raises `ConfigError` for what can't be one.

    base: where relative paths start.
    """
    found: Settings = {}
    for key, value in table.items():
        if key in DEEP:
            if not isinstance(value, dict):
                raise ConfigError(f"'{key}' is a table; write {key} = {{ ... }}")
            found[key] = dict(value)
        elif key == "churn":
            found[key] = _churn(value, base)
        else:
            _check_place(key)
            found |= tables.typed({key: value}, KINDS)
    for key in ("links", "run"):
        if key in found:
            found[key] = str((base / found[key]).absolute())
    for key in ("model", "tokenizer"):
        if key in found and found[key] not in _NAMES and (base / found[key]).exists():
            found[key] = str((base / found[key]).resolve())
    source = found.get("data", {}).get("corpus")
    if isinstance(source, str) and source != corpus.BUILT_IN:
        found["data"]["corpus"] = str((base / Path(source).expanduser()).absolute())
    return found


def experiment(label: str, seed: int | None, settings: Settings) -> Experiment:
    """Make an experiment of settings; seed: None takes the run's. Raises `ConfigError`.

    The model's preset, or the manifest named as `run`, says what they leave out. Its warm-up and decay shrink in
    proportion where `rounds` makes it shorter. Outer constants are the algorithm's own; where these are the
    daemon's default, the manifest's; over both go those of the settings, but for an algorithm without an outer step.
    Constants that the daemon refuses are kept: see `peer.core.stability`.
    """
    algorithm, peers = settings.get("algorithm", ALGORITHM), settings.get("peers", PEERS)
    if algorithm not in ALGORITHMS:
        near = tables.nearest(algorithm, ALGORITHMS)
        raise ConfigError(f"unknown algorithm '{algorithm}'; did you mean '{near}'? There are {', '.join(ALGORITHMS)}")
    method = ALGORITHMS[algorithm]
    if method.inner is not None:
        asked = settings.get("inner", {}).get("optimizer", method.inner)
        if asked != method.inner:
            raise ConfigError(f"'{algorithm}' trains by {method.inner}; leave out the inner optimizer {asked}")
        settings = over(settings, {"inner": {"optimizer": method.inner}})
    run = _run(settings, seed)
    outer = asdict(run.outer if method.outer == Outer() else method.outer)
    given = tables.typed(settings.get("outer", {}), get_type_hints(Outer), "[outer]")
    outer |= {} if method.fixed else given
    run = replace(run, outer=Outer(**outer), data=replace(run.data, shards=max(run.data.shards, peers)))
    return Experiment(
        label=label,
        algorithm=algorithm,
        peers=peers,
        run=run,
        links=Path(settings["links"]) if "links" in settings else None,
        evaluations=settings.get("evaluations", min(EVALUATIONS, run.rounds)),
        **{key: settings[key] for key in _OF_EXPERIMENT if key in settings},
    )


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one table over another, sections key by key."""
    merged = {**below, **above}
    for key in (*DEEP, "vary"):
        if isinstance(below.get(key), dict) and isinstance(above.get(key), dict):
            merged[key] = {**below[key], **above[key]}
    return merged


def _run(settings: Settings, seed: int | None) -> Manifest:
    """Return the manifest, with the outer constants of what it is made from."""
    if "run" not in settings:
        whole: dict[str, Any] = {"model": settings.get("model", MODEL)}
    elif "model" in settings:
        raise ConfigError("the run's manifest names its model itself; leave model out, or run")
    else:
        whole = tables.parse(Manifest.load(Path(settings["run"])).to_toml())
    if settings.get("inner", {}).get("optimizer", "lordo") != "lordo":
        whole |= {"inner": {key: value for key, value in whole.get("inner", {}).items() if key not in LORDO}}
    first = Manifest.of(whole)
    share = settings.get("rounds", first.rounds) / first.rounds
    timing = {key: share * getattr(first.schedule, key) for key in ("warmup_rounds", "decay_rounds")}
    whole = over(whole, {"schedule": timing})
    whole = over(whole, {key: settings[key] for key in (*_OF_RUN, *SECTIONS) if key in settings and key != "outer"})
    if "local_steps" in settings:
        whole.pop("round_seconds", None)
    known = {key: type(value) for key, value in first.config.items() if type(value) in (int, float, str, bool)}
    config = tables.typed(settings.get("config", {}), known, "config")
    return Manifest.of(whole if seed is None else whole | {"seed": seed}, None, config)


def _check_place(key: str) -> None:
    """Raise `ConfigError` for a key that belongs elsewhere."""
    if key == "seed":
        raise ConfigError("a seed is of all runs; write seeds = [0, 1, 2] above the first table")
    for section, kind in SECTIONS.items():
        if key not in KINDS and key in get_type_hints(kind):
            raise ConfigError(f"'{key}' stands in a section; write {section} = {{ {key} = ... }}")


def _churn(value: Any, base: Path) -> str:
    """Return a rate as it is, a path as an absolute one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError("'churn' is a number, such as 0.05, or a path in quotes")
    try:
        float(value)
    except ValueError:
        return str((base / Path(str(value)).expanduser()).absolute())
    return str(value)
