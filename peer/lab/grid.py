"""A grid of experiments, as a TOML file.

    seeds = [0, 1, 2]                              # left out: [0]
    reference = "DiLoCo"                           # the label that others are compared with; left out: the first. A run
                                                   # may name another one for itself
    [common]                                       # of every run; a run's own keys go over these
    peers = 8
    exchange = { codec = "rank4-int4", meetings = 4 }
    [[run]]
    label = "four meetings"
    vary = { "outer.gamma" = [0.5, 0.7] }          # one run for each combination, named after the values

The keys of a run are those of `peer.lab.settings.KINDS`. Relative paths start from the folder of the file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import tables
from peer.errors import ConfigError
from peer.lab.experiment import Experiment
from peer.lab.settings import DEEP, KINDS, Settings, experiment, over, settled

_TOP = {"seeds": list, "reference": str, "common": dict, "run": list}
_LABEL_LONGEST = 100
_MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Cell:
    """One simulation of a grid: an experiment with one seed, and the settings that it was made of."""

    experiment: Experiment
    settings: Settings

    @property
    def label(self) -> str:
        """Which run of the grid it belongs to."""
        return self.experiment.label

    @property
    def seed(self) -> int:
        """The seed."""
        return self.experiment.run.seed

    def folder(self, out: Path) -> Path:
        """Return where its results are kept, given the folder of the grid's."""
        return out / "runs" / folder_name(self.label) / f"seed-{self.seed}"


@dataclass(frozen=True)
class Grid:
    """All simulations of a file: label by label, and of each one for every seed.

    reference: the label of the run that others are compared with; references: of each label, where it may be another.
    """

    seeds: tuple[int, ...]
    reference: str
    references: Mapping[str, str]
    cells: tuple[Cell, ...]

    @classmethod
    def load(cls, path: Path) -> Grid:
        """Read a grid from a file; raises `ConfigError`, which names the file and the run."""
        text = tables.read(path)
        try:
            return cls.of(tables.parse(text), path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"grid '{path}': {error}") from error

    @classmethod
    def of(cls, table: Mapping[str, Any], base: Path) -> Grid:
        """Make a grid of the values of its file; base: where relative paths start."""
        for key in table:
            if key not in _TOP:
                raise ConfigError(f"unknown key '{key}'; did you mean '{tables.nearest(key, _TOP)}'?")
        seeds = _seeds(table.get("seeds", [0]))
        common, runs = table.get("common", {}), table.get("run", [])
        if not isinstance(common, dict):
            raise ConfigError("'common' is a table; write [common] and its keys below it")
        if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
            raise ConfigError("'run' is a list of tables; write [[run]] above the keys of each")
        if "label" in common:
            raise ConfigError("'label' in [common] would be that of every run; give each [[run]] one of its own")
        named = [each for number, run in enumerate(runs, 1) for each in _varied(over(common, run), number)]
        _check_labels([label for label, _ in named])
        reference = table.get("reference", named[0][0])
        references = {label: run.pop("reference", reference) for label, run in named}
        for each in (reference, *references.values()):
            if not isinstance(each, str) or each not in references:
                near = tables.nearest(str(each), references)
                raise ConfigError(f"reference is {each!r}, which is no run's label; did you mean '{near}'?")
        cells = tuple(cell for label, run in named for cell in _cells(label, run, seeds, base))
        return cls(seeds, reference, references, cells)

    @property
    def labels(self) -> tuple[str, ...]:
        """Each run's label, in the order of the file."""
        return tuple(dict.fromkeys(cell.label for cell in self.cells))

    def chosen(self, only: Collection[str] = (), seeds: Collection[int] = ()) -> tuple[Cell, ...]:
        """Return the cells of some labels and some seeds; none given: of all. Raises `ConfigError` for unknown ones."""
        for label in only:
            if label not in self.labels:
                raise ConfigError(f"there is no run '{label}'; did you mean '{tables.nearest(label, self.labels)}'?")
        for seed in seeds:
            if seed not in self.seeds:
                raise ConfigError(f"seed {seed} is none of the grid's {list(self.seeds)}; add it to seeds in the file")
        return tuple(
            cell
            for cell in self.cells
            if (not only or cell.label in only) and (not seeds or cell.experiment.run.seed in seeds)
        )


def folder_name(label: str) -> str:
    """Return a label as the name of a folder."""
    return re.sub(r"[^\w.+=-]+", "-", label).strip("-.")


def _cells(label: str, table: Mapping[str, Any], seeds: Iterable[int], base: Path) -> Iterator[Cell]:
    try:
        settings = settled(table, base)
        for seed in seeds:
            yield Cell(experiment(label, seed, settings), settings)
    except ConfigError as error:
        raise ConfigError(f"run '{label}': {error}") from error


def _varied(table: dict[str, Any], number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label and table of a run, or of each combination of what it varies."""
    label, vary = table.pop("label", None), table.pop("vary", {})
    if not isinstance(label, str) or not label.strip():
        raise ConfigError(f'[[run]] number {number} has no label; add a line such as: label = "4 × rank 4"')
    if not isinstance(vary, dict) or not all(isinstance(values, list) and values for values in vary.values()):
        raise ConfigError(f"run '{label}': 'vary' is a table of lists; write vary = {{ \"outer.gamma\" = [0.5, 0.7] }}")
    for path in vary:
        section, dot, _ = path.partition(".")
        if path == "seed":
            raise ConfigError(f"run '{label}': seeds are not varied; write seeds = [0, 1, 2] above the first table")
        if section not in KINDS or bool(dot) != (section in DEEP):
            names = [*(key for key in KINDS if key not in DEEP), *(f"{key}." for key in DEEP)]
            near = tables.nearest(path, names)
            raise ConfigError(f"run '{label}': unknown key '{path}' in vary; did you mean '{near}'?")
    for values in itertools.product(*vary.values()):
        one, words = table, [label]
        for path, value in zip(vary, values, strict=True):
            section, dot, key = path.partition(".")
            one = over(one, {section: {key: value} if dot else value})
            words.append(f"{key or section} {_spelled(value)}")
        yield ", ".join(words), dict(one)


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seeds(values: Any) -> tuple[int, ...]:
    good = isinstance(values, list) and all(type(seed) is int and 0 <= seed <= _MOST_SEED for seed in values)
    if not good or not values or len(set(values)) < len(values):
        raise ConfigError(f"seeds is {values!r}; give a list of different whole numbers from 0 on, such as [0, 1, 2]")
    return tuple(values)


def _check_labels(labels: list[str]) -> None:
    if not labels:
        raise ConfigError("there is nothing to run; write [[run]] and below it a label and what is special about it")
    before: dict[str, str] = {}
    for label in labels:
        folder = folder_name(label).casefold()
        if not folder or len(label) > _LABEL_LONGEST:
            raise ConfigError(f"label '{label}' can't name a folder; give 1 to {_LABEL_LONGEST} letters and digits")
        if folder in before:
            same = "twice" if before[folder] == label else f"and '{before[folder]}', which name the same folder"
            raise ConfigError(f"there is label '{label}' {same}; give every run a label of its own")
        before[folder] = label
