"""TOML from people: read it, and say in one sentence what is wrong with it."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from peer.errors import ConfigError

LIMIT_BYTES = 1 << 20
"""A file longer than this is no manifest and no configuration."""

_EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    bool: "true or false",
    Path: "a path in quotes",
}


def read(path: Path) -> str:
    """Return a file's text; raises `ConfigError` when it can't be read, is no text, or is too long."""
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    if len(raw) > LIMIT_BYTES:
        raise ConfigError(f"'{path}' is longer than {LIMIT_BYTES >> 20} MiB; give a TOML file")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not text in UTF-8; give a TOML file") from error


def parse(text: str) -> dict[str, Any]:
    """Return TOML as plain values; raises `ConfigError` with the place of a mistake."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}") from error


def typed(table: Mapping[str, Any], kinds: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return a table's values as the types that kinds gives for its keys.

    kinds: key → int, float, str, bool, Path, an Enum (by value), a Literal, tuple[str, ...], or one of these | None.
    where: how to name the table, such as "[data]". Raises `ConfigError` for a key that is not in kinds, naming the
    nearest one that is, and for a value of another type.
    """
    place = f" in {where}" if where else ""
    result = {}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"unknown key '{key}'{place}; did you mean '{nearest(key, kinds)}'?")
        try:
            result[key] = _convert(value, kinds[key])
        except _Mismatch as error:
            raise ConfigError(f"'{key}'{place} is {_quote(value)}; give {error}") from error
    return result


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the valid word that is most like the given one."""
    return difflib.get_close_matches(word, list(valid), n=1, cutoff=0.0)[0]


class _Mismatch(Exception):
    """A value of another type; the text is what to give instead."""


def _convert(value: Any, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise _Mismatch('a list of texts, such as ["…", "…"]')
    if get_origin(kind) is Literal:
        return _choose(value, {choice: choice for choice in get_args(kind)})
    if issubclass(kind, Enum):
        return _choose(value, {choice.value: choice for choice in kind})
    if kind is float and type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value):
        return float(value)
    if kind is Path and isinstance(value, str | Path):
        try:
            return Path(value).expanduser()
        except RuntimeError as error:
            raise _Mismatch("a path without ~ and the name of a user who does not exist") from error
    if kind is not float and type(value) is kind:
        return value
    raise _Mismatch(_EXPECTED[kind])


def _choose(value: Any, choices: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value in choices:
        return choices[value]
    words = " or ".join(f'"{choice}"' for choice in choices)
    hint = f' (did you mean "{nearest(value, choices)}"?)' if isinstance(value, str) and len(choices) > 1 else ""
    raise _Mismatch(words + hint)


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
