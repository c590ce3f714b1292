"""One daemon's settings: flags over HOME/config.toml over the defaults below, parsed once and then fixed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from peer import tables, units
from peer.core.hours import Hours
from peer.errors import ConfigError
from peer.net.addresses import MAX_PORT, parse_announce, parse_bootstrap

HOME = Path("~/.peerloom")
MODEL = "gpt-125m"
LEAST_SHARE = 0.01

BOOTSTRAP_HOME = HOME / "bootstrap"
BOOTSTRAP_PORT = 7700

FILE = "config.toml"
RUN_FILE = "run.toml"

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class Config:
    """What one daemon was told.

    home: the folder of all that it owns.
    run: a manifest's file; without one the model's preset is the run.
    model: a preset or a transformers config.json; empty when a run's file is given, which names its model itself.
    inner: the inner optimizer, in place of the preset's; None: the run's own.
    bootstraps: multiaddrs of DHT nodes to find the swarm through.
    data: what to read instead of the run's corpus.
    rounds: leave after this many of one's own; None: when the run is over.
    device: auto, or what torch calls it.
    port: 0 takes a free one.
    announce: HOST or HOST:PORT that others are to call; None: found out.
    max_upload, max_download: bits a second of all streams together; None: no limit.
    quota: bytes a month, sent and received together; None: no limit.
    hours: when the peer may take part, by the local clock; None: always.
    share: the part of the link's measured bandwidth that meetings may use, from `LEAST_SHARE` up to 1.
    json: print events as JSON.
    """

    home: Path = field(default_factory=HOME.expanduser)
    run: Path | None = None
    model: str = MODEL
    inner: Literal["adamw", "lordo"] | None = None
    bootstraps: tuple[str, ...] = ()
    data: str | None = None
    rounds: int | None = None
    device: str = "auto"
    port: int = 0
    announce: str | None = None
    max_upload: float | None = None
    max_download: float | None = None
    quota: int | None = None
    hours: Hours | None = None
    share: float = 0.5
    json: bool = False

    def __post_init__(self) -> None:
        if not self.model and self.run is None:
            raise ConfigError(
                "model is empty; give a preset such as gpt-125m, or the path of a transformers config.json"
            )
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; give 1 or more")
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port is {self.port}; give 0 (any free one) to {MAX_PORT}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device is '{self.device}'; give auto, cpu, cuda, cuda:0 (or another number) or mps")
        if not LEAST_SHARE <= self.share <= 1.0:
            raise ConfigError(f"share is {self.share:g}; give a part from {LEAST_SHARE}, up to 1 for all of the link")
        if self.announce is not None:
            parse_announce(self.announce)
        # Frozen, but two spellings of one address are one address.
        plain = dict.fromkeys(parse_bootstrap(address) for address in self.bootstraps)
        object.__setattr__(self, "bootstraps", tuple(plain))

    @classmethod
    def load(cls, flags: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Config:
        """Put flags over HOME/config.toml over the defaults; raises `ConfigError`.

        flags: names as on the command line, without dashes; None and empty tuples are flags that were not given.
        Where neither a run nor a model is given, a home that belongs to a run goes on with that.
        defaults: in place of Config's own, such as another home.
        """
        kinds = {"home": Path, **_KEYS}
        preset = _typed({"home": HOME} | dict(defaults or {}), kinds)
        given = _typed({flag: value for flag, value in flags.items() if value is not None and value != ()}, kinds)
        home = given.get("home", preset["home"])
        written = _read(home / FILE)
        if "run" in given:
            for key in ("model", "inner"):  # of a run that the file may know nothing of
                written.pop(key, None)
        values = preset | written | given | {"home": home}
        if not {"run", "model"} & {*written, *given} and (home / RUN_FILE).is_file():
            values["run"] = home / RUN_FILE  # a peer goes on with the run that its home belongs to
        if "run" in values:
            values.setdefault("model", "")
        return cls(**values)


_FIELDS = {"bootstrap": "bootstraps"}
"""Flag → field, where they differ: a flag is given once for each address."""

_FLAGS = {name: flag for flag, name in _FIELDS.items()}

_TEXTS: dict[str, Callable[[str], Any]] = {
    "max_upload": units.parse_rate,
    "max_download": units.parse_rate,
    "quota": units.parse_size,
    "hours": Hours.parse,
}
"""Flag whose value is written as text → what reads that."""

_KEYS = {
    _FLAGS.get(name, name): str if name in _TEXTS else kind
    for name, kind in get_type_hints(Config).items()
    if name != "home"
}
"""Flag, and key of config.toml → type. The home says where config.toml is, so it can't stand in it."""


def _typed(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of Config's fields, and as its types."""
    return {_FIELDS.get(key, key): _parsed(key, value) for key, value in tables.typed(values, kinds).items()}


def _parsed(key: str, value: Any) -> Any:
    if key not in _TEXTS:
        return value
    try:
        return _TEXTS[key](value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a config.toml, none if there is no such file; a run's path starts from its folder."""
    if not os.path.exists(path):  # not path.exists(), which raises for a folder that may not be entered
        return {}
    try:
        values = _typed(tables.parse(tables.read(path)), _KEYS)
        Config(**values)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error
    if "run" in values:
        values["run"] = path.parent / values["run"]
    return values
