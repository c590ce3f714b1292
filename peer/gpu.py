"""Whether another program computes on the GPU that a peer trains on, as NVIDIA's NVML tells.

A program counts by its utilization of the multiprocessors, so a desktop that merely shows windows does not, nor does
one that holds memory and rests. Where NVML does not tell utilization by process, any other program with a compute
context counts. Without NVML, or on another kind of device, nobody is ever seen. Not yet run on a real GPU.

Processes are known by their ids in this process's own /proc. In a container, whose /proc shows none of the others,
nobody is seen either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

BUSY_PERCENT = 10.0
"""Mean utilization by one program from which on it is at work; a desktop at rest stays below."""

WINDOW_S = 3.0
NOT_SUPPORTED, NO_PERMISSION = 3, 4
"""NVML's numbers of the errors that say that it will never tell."""


class Sample(Protocol):
    """What one process did: smUtil in percent, timeStamp in microseconds of Unix time."""

    pid: int
    timeStamp: int
    smUtil: int


class Process(Protocol):
    """A process with a compute context."""

    pid: int


class Nvml(Protocol):
    """What is used of the module pynvml; all of these raise its NVMLError, which has a `value`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None:
        """Load the driver's library."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        """Find a GPU by "GPU-...", which no reordering by CUDA_VISIBLE_DEVICES changes."""

    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> Sequence[Sample]:
        """Return samples newer than timeStamp (microseconds); when there is none, that is an error, too."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Process]:
        """Return who has a compute context."""


def parent(pid: int) -> int | None:
    """Return the process that started this one; None if there is none of that id."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None


def is_peer(pid: int) -> bool:
    """Tell whether a process is a peer too: two that gave way to each other would both stand still."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.rpartition(b"/")[2] == b"peer" for word in words[:3])


class Gpu:
    """One GPU. ours: our process id, whose descendants are ours as well; uuid: without "GPU-"."""

    def __init__(
        self,
        nvml: Nvml,
        uuid: str,
        ours: int,
        parent: Callable[[int], int | None] = parent,
        is_peer: Callable[[int], bool] = is_peer,
    ) -> None:
        """Raise NVML's error if there is no such GPU."""
        nvml.nvmlInit()
        self._nvml, self._ours, self._parent, self._is_peer = nvml, ours, parent, is_peer
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        self._by_utilization = True

    def other(self, now_s: float) -> int | None:
        """Return the id of another process that computes on the GPU now (Unix time), None if there is none."""
        return next((pid for pid in self._busy(now_s) if self._is_foreign(pid)), None)

    def _busy(self, now_s: float) -> list[int]:
        try:
            if self._by_utilization:
                return self._at_work(now_s)
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]
        except self._nvml.NVMLError as error:
            if self._by_utilization and getattr(error, "value", None) in (NOT_SUPPORTED, NO_PERMISSION):
                self._by_utilization = False
                return self._busy(now_s)
            return []  # no sample since then: nobody did anything

    def _at_work(self, now_s: float) -> list[int]:
        """Return who used the GPU in the last seconds, the busiest first."""
        since_us = int((now_s - WINDOW_S) * 1e6)
        percents: dict[int, list[int]] = {}
        for sample in self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us):
            if sample.timeStamp > since_us and sample.smUtil <= 100:  # drivers also return old and impossible ones
                percents.setdefault(sample.pid, []).append(sample.smUtil)
        means = {pid: sum(several) / len(several) for pid, several in percents.items()}
        return sorted((pid for pid, mean in means.items() if mean >= BUSY_PERCENT), key=lambda pid: -means[pid])

    def _is_foreign(self, pid: int) -> bool:
        above: int | None = pid
        if self._parent(pid) is None:
            return False  # gone already, or not of this /proc
        if self._is_peer(pid):
            return False
        while above is not None and above > 1:
            if above == self._ours:
                return False
            above = self._parent(above)
        return True


def watch(device: str) -> Gpu | None:
    """Return the GPU that torch calls "cuda" or "cuda:1"; None if NVML does not know it, or isn't there."""
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    import torch

    nvml = cast(Nvml, pynvml)
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return Gpu(nvml, uuid, os.getpid())
    except (nvml.NVMLError, AttributeError):  # no driver, no such GPU; a torch for AMD's has no uuid
        return None


def name(pid: int) -> str:
    """Return what a process is called: "blender (process 1234)"."""
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} (process {pid})"
    except OSError:
        return f"process {pid}"
