"""Atomic save and load of State: HOME/checkpoints/round-R-step-S-save-N/{state.safetensors, state.json}.

A checkpoint is written into a folder beside its place, flushed to the disk, and then renamed: it is there as a whole or
not at all. None is ever overwritten; the one with the highest N is the newest. state.json holds

    format   1
    run_id, origin, round, step, cursor, time (ISO-8601, UTC)
    tensors  names in the model's order: "weights/P", "anchor/P", "outer/SLOT/P", "inner/SLOT/P"
    slots    {"outer": [...], "inner": [...]}
    size_bytes, sha256    of state.safetensors
    check    SHA-256 of all the other fields (as JSON with sorted keys and no spaces)

`format` and `check` keep their meaning in every later format. Nothing is deleted because it cannot be read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peer.core.state import Cursor, State, Tensors
from peer.errors import ConfigError

FORMAT = 1
KEPT = 2
PARTS = ("weights", "anchor", "outer", "inner")

_NAME = re.compile(r"round-\d{8,}-step-\d{8,}-save-(\d{8,})")
_NEW, _OLD = ".new-", ".old-"


@dataclass(frozen=True)
class Saved:
    """What `save` wrote; size_bytes of the tensors, seconds of wall time."""

    path: Path
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """What `load` found; warnings tell of newer checkpoints that were passed over, age_s is how old it is."""

    state: State
    path: Path
    warnings: tuple[str, ...]
    age_s: float


@dataclass(frozen=True)
class Entry:
    """A checkpoint as its state.json describes it; time is Unix time, size_bytes of the tensors."""

    path: Path
    run_id: str
    round: int
    step: int
    time: float
    size_bytes: int


class _Damaged(Exception):
    """A checkpoint that cannot be read; the text says why."""


def save(home: Path, state: State, run_id: str) -> Saved:
    """Write a checkpoint, then remove those older than the two newest whole ones.

    The tensors are written from where they are, without a copy. Only the daemon that holds the home's lock may call it.
    Raises `OSError` when the disk is full or refuses; earlier checkpoints are untouched then.
    """
    started_s = time.monotonic()
    folder = home / "checkpoints"
    name = f"round-{state.round:08d}-step-{state.step:08d}-save-{_last_number(folder) + 1:08d}"
    place, unfinished = folder / name, folder / f"{_NEW}{name}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(home)
        unfinished.mkdir(mode=0o700)
        size_bytes = _write(unfinished, state, run_id)
        unfinished.rename(place)
        _flush(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _prune(folder, run_id)
    return Saved(place, size_bytes, time.monotonic() - started_s)


def load(home: Path, run_id: str, parts: Collection[str] = PARTS) -> Loaded | None:
    """Return the newest checkpoint that can be read, on the CPU; None if there is none at all.

    Only the parts asked for are brought into memory, the others stay empty. Raises `ConfigError` when there are
    checkpoints but none can be read, when they belong to another run, or when a newer peerloom wrote them.
    """
    while True:
        paths, warnings = _paths(home / "checkpoints"), []
        for path in paths:
            try:
                about = _about(path)
                _admit(about, path, home, run_id)
                state = _state(path, about, parts)
            except _Damaged as damage:
                warnings.append(f"checkpoint '{path}' cannot be read ({damage}) and is passed over")
                continue
            return Loaded(state, path, tuple(warnings), max(0.0, time.time() - _time(about)))
        if not paths:
            return None
        if paths == _paths(home / "checkpoints"):  # else a daemon saved and pruned meanwhile: look again
            raise ConfigError(
                f"none of the checkpoints in '{home / 'checkpoints'}' can be read: {'; '.join(warnings)}; "
                "put a good copy there, or move that folder away to begin anew"
            )


def newest(home: Path) -> Entry | None:
    """Describe the newest checkpoint that looks whole, without reading its tensors."""
    for path in _paths(home / "checkpoints"):
        if (entry := _entry(path)) is not None:
            return entry
    return None


def sweep(home: Path) -> None:
    """Remove what a save that was cut short left behind; only for the daemon that holds the home's lock."""
    folder = home / "checkpoints"
    for left in [*folder.glob(f"{_NEW}*"), *folder.glob(f"{_OLD}*")]:
        shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------- writing


def _write(folder: Path, state: State, run_id: str) -> int:
    tensors = _flat(state)
    path = folder / "state.safetensors"
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise _os_error(error, path) from error
    with ThreadPoolExecutor(1) as beside:  # hashing takes about as long as the disk does
        flushed = beside.submit(_flush, path)
        digest = _hash(path)
        flushed.result()
    about: dict[str, Any] = {
        "format": FORMAT,
        "run_id": run_id,
        "origin": state.origin,
        "round": state.round,
        "step": state.step,
        "cursor": asdict(state.cursor),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "tensors": list(tensors),
        "slots": {"outer": list(state.outer), "inner": list(state.inner)},
        "size_bytes": path.stat().st_size,
        "sha256": digest,
    }
    text = json.dumps({**about, "check": _check(about)}, indent=1)
    (folder / "state.json").write_text(text + "\n")
    _flush(folder / "state.json")
    _flush(folder)
    return int(about["size_bytes"])


def _flat(state: State) -> Tensors:
    tensors = {f"weights/{name}": tensor for name, tensor in state.weights.items()}
    tensors |= {f"anchor/{name}": tensor for name, tensor in state.anchor.items()}
    for part, slots in (("outer", state.outer), ("inner", state.inner)):
        for slot, named in slots.items():
            tensors |= {f"{part}/{slot}/{name}": tensor for name, tensor in named.items()}
    return tensors


def _prune(folder: Path, run_id: str) -> None:
    """Remove what is older than the newest whole ones. A rename comes first, so that none is ever seen half removed."""
    whole = 0
    for path in _paths(folder):
        entry = _entry(path)
        if whole >= KEPT and (entry is None or entry.run_id == run_id):
            try:
                removed = path.rename(folder / f"{_OLD}{path.name}")
            except OSError:
                return  # the disk doesn't let us now; the next save tries again
            shutil.rmtree(removed, ignore_errors=True)
        whole += entry is not None and entry.run_id == run_id


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """Return the error of the system that safetensors wraps into text."""
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else errno.EIO
    return OSError(number, os.strerror(number), str(path))


# ---------------------------------------------------------------- reading


def _paths(folder: Path) -> list[Path]:
    """List the checkpoints, newest first."""
    found = [(int(match[1]), path) for path in folder.glob("round-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _last_number(folder: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in _paths(folder)), default=0)


def _about(path: Path) -> dict[str, Any]:
    """Read state.json and verify its own check."""
    try:
        about = json.loads((path / "state.json").read_bytes())
    except OSError as error:
        raise _Damaged(f"state.json: {error.strerror}") from error
    except ValueError as error:
        raise _Damaged("state.json is damaged") from error
    if not isinstance(about, dict) or about.pop("check", None) != _check(about):
        raise _Damaged("state.json is damaged")
    return about


def _admit(about: dict[str, Any], path: Path, home: Path, run_id: str) -> None:
    if about["format"] > FORMAT:
        raise ConfigError(
            f"checkpoint '{path}' has format {about['format']}, and this peerloom reads up to {FORMAT}; "
            "install a newer peerloom, or give another folder with --home"
        )
    if about["run_id"] != run_id:
        raise ConfigError(
            f"home '{home}' belongs to run {about['run_id']}, not to run {run_id}; "
            "give this run a folder of its own with --home"
        )


def _state(path: Path, about: dict[str, Any], parts: Collection[str]) -> State:
    file = path / "state.safetensors"
    try:
        size_bytes = file.stat().st_size
        if size_bytes != about["size_bytes"]:
            raise _Damaged(f"state.safetensors has {size_bytes} bytes of {about['size_bytes']}")
        if _hash(file) != about["sha256"]:
            raise _Damaged("state.safetensors is damaged: its SHA-256 is another")
        with safe_open(file, framework="pt") as tensors:
            return _assembled(about, parts, lambda name: tensors.get_tensor(name).clone())  # not a view of the file
    except OSError as error:
        raise _Damaged(f"state.safetensors: {error.strerror}") from error
    except SafetensorError as error:
        raise _Damaged(f"state.safetensors: {error}") from error


def _assembled(about: dict[str, Any], parts: Collection[str], tensor: Callable[[str], Tensor]) -> State:
    weights, anchor = Tensors(), Tensors()
    outer: dict[str, Tensors] = {slot: {} for slot in about["slots"]["outer"] if "outer" in parts}
    inner: dict[str, Tensors] = {slot: {} for slot in about["slots"]["inner"] if "inner" in parts}
    for full in about["tensors"]:
        part, _, name = full.partition("/")
        if part not in parts:
            continue
        if part in ("outer", "inner"):
            slot, _, name = name.partition("/")
            (outer if part == "outer" else inner)[slot][name] = tensor(full)
        else:
            (weights if part == "weights" else anchor)[name] = tensor(full)
    cursor = Cursor(**about["cursor"])
    return State(weights, anchor, outer, inner, about["round"], about["step"], cursor, about["origin"])


def _entry(path: Path) -> Entry | None:
    try:
        about = _about(path)
        if (path / "state.safetensors").stat().st_size != about["size_bytes"]:
            return None
    except (_Damaged, OSError):
        return None
    return Entry(path, about["run_id"], about["round"], about["step"], _time(about), about["size_bytes"])


def _time(about: dict[str, Any]) -> float:
    return datetime.fromisoformat(about["time"]).timestamp()


def _check(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
