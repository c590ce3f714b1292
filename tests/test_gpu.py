"""Who else computes on the GPU, by what NVML says; the fake below stands for NVIDIA's library."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peer import gpu
from peer.gpu import BUSY_PERCENT, NOT_SUPPORTED, WINDOW_S, Gpu, Nvml, is_peer

NOW_S = 1_800_000_000.0
UUID = "8e9c7f2a-0000-1111-2222-333344445555"
OURS, CHILD, GAME, DESKTOP, SHELL = 100, 101, 200, 300, 50
PARENTS = {OURS: SHELL, CHILD: OURS, GAME: SHELL, DESKTOP: 1, SHELL: 1}
NOT_FOUND = 6
HANDLE = object()


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass
class Sample:
    pid: int
    smUtil: int
    timeStamp: int = int(NOW_S * 1e6) - 500_000


@dataclass
class Driver:
    """One GPU with these samples, or this error, and these compute processes."""

    samples: list[Sample] = field(default_factory=list)
    error: int | None = None
    compute: list[Sample] = field(default_factory=list)
    NVMLError: type[Exception] = NvmlError

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        if uuid != f"GPU-{UUID}":
            raise NvmlError(NOT_FOUND)
        return HANDLE

    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> list[Sample]:
        assert handle == HANDLE
        assert timeStamp == int((NOW_S - WINDOW_S) * 1e6)
        if self.error is not None or not self.samples:
            raise NvmlError(NOT_FOUND if self.error is None else self.error)
        return self.samples

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Sample]:
        assert handle == HANDLE
        return self.compute


def look(driver: Driver) -> int | None:
    return Gpu(driver, UUID, OURS, PARENTS.get).other(NOW_S)


def test_a_gpu_that_nobody_uses_is_ours() -> None:
    assert look(Driver()) is None


def test_what_we_and_our_children_do_does_not_count() -> None:
    assert look(Driver([Sample(OURS, 95), Sample(CHILD, 40)])) is None


def test_another_program_that_computes_counts_beside_us() -> None:
    assert look(Driver([Sample(OURS, 50), Sample(GAME, 50)])) == GAME


def test_another_peer_on_the_same_gpu_does_not_count() -> None:
    both = Driver([Sample(GAME, 50)])
    assert Gpu(both, UUID, OURS, PARENTS.get, is_peer={GAME}.__contains__).other(NOW_S) is None
    assert Gpu(both, UUID, OURS, PARENTS.get, is_peer={OURS}.__contains__).other(NOW_S) == GAME


@pytest.mark.parametrize(("words", "peer"), [(["peer", "-c"], True), (["python", "-c"], False)])
def test_a_peer_is_known_by_its_command_line(words: list[str], peer: bool) -> None:
    with subprocess.Popen([*words, "import time; time.sleep(30)"], executable=sys.executable) as process:
        try:
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                pass  # the kernel is about to say
            assert is_peer(process.pid) == peer
        finally:
            process.kill()
    assert not is_peer(process.pid)


def test_a_desktop_at_rest_does_not_count() -> None:
    assert look(Driver([Sample(OURS, 95), Sample(DESKTOP, 3)], compute=[Sample(DESKTOP, 0)])) is None


def test_the_busiest_is_named() -> None:
    assert look(Driver([Sample(DESKTOP, 20), Sample(GAME, 70), Sample(OURS, 90)])) == GAME


def test_one_flash_is_less_than_work() -> None:
    flash = [Sample(DESKTOP, 100), *[Sample(DESKTOP, 0)] * 11]
    assert 100 / len(flash) < BUSY_PERCENT
    assert look(Driver(flash)) is None
    assert look(Driver(flash[:6])) == DESKTOP


def test_old_and_impossible_samples_do_not_count() -> None:
    old = int((NOW_S - WINDOW_S) * 1e6)
    assert look(Driver([Sample(GAME, 90, old), Sample(GAME, 4_000_000_000)])) is None


def test_a_process_that_is_gone_or_not_of_this_proc_does_not_count() -> None:
    assert look(Driver([Sample(999, 90)])) is None


def test_where_utilization_is_not_told_any_other_compute_process_counts() -> None:
    driver = Driver(error=NOT_SUPPORTED, compute=[Sample(OURS, 0), Sample(CHILD, 0)])
    one = Gpu(driver, UUID, OURS, PARENTS.get)
    assert one.other(NOW_S) is None
    driver.compute.append(Sample(GAME, 0))
    assert one.other(NOW_S) == GAME
    assert one.other(NOW_S) == GAME


def test_a_gpu_that_nvml_does_not_know_is_its_error() -> None:
    with pytest.raises(NvmlError):
        Gpu(Driver(), "another", OURS)


def test_a_uuid_may_have_its_prefix() -> None:
    assert Gpu(Driver(), f"GPU-{UUID}", OURS).other(NOW_S) is None


def test_parents_are_read_from_proc() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert gpu.parent(child.pid) == os.getpid()
        assert gpu.name(child.pid).endswith(f" (process {child.pid})")
        child.kill()
    assert gpu.parent(child.pid) is None
    assert gpu.name(child.pid) == f"process {child.pid}"


@pytest.mark.parametrize("device", ["cpu", "mps", "auto"])
def test_other_devices_are_not_watched(device: str) -> None:
    assert gpu.watch(device) is None


def test_nvml_has_what_is_used_of_it() -> None:
    module = importlib.import_module("pynvml")
    assert issubclass(module.NVMLError, Exception)
    assert module.NVML_ERROR_NOT_SUPPORTED == gpu.NOT_SUPPORTED
    assert module.NVML_ERROR_NO_PERMISSION == gpu.NO_PERMISSION
    assert module.NVMLError(NOT_FOUND).value == module.NVML_ERROR_NOT_FOUND == NOT_FOUND
    for name, used in inspect.getmembers(Nvml, inspect.isfunction):
        if name.startswith("nvml"):
            arguments = [each for each in inspect.signature(used).parameters if each != "self"]
            inspect.signature(getattr(module, name)).bind(*arguments)
