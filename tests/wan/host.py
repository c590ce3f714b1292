"""A host: an unnamed network namespace whose only way out is a TUN device. Linux, and only as root.

Namespace and device live as long as this process holds them, or any process runs inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DEVICE = "wan0"
TUN = "/dev/net/tun"
QUEUE_PACKETS = 10_000
"""What the kernel keeps for us while others have the processor; the queue that is emulated is not this one."""

KILL_WITHIN_S = 5.0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_OWN = "/proc/self/ns/net"
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """A namespace with a loopback and one device; routes say cubic, whatever this machine's default is.

    address: IPv4. mtu: bytes. tun: file descriptor that gives and takes one IP packet a time, without waiting.
    Raises OSError and `subprocess.CalledProcessError` where this is not allowed or not there.
    """

    def __init__(self, address: str, mtu: int) -> None:
        with _somewhere_else():
            self.namespace = os.open(_OWN, os.O_RDONLY)
            self.tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self.tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            orders = (
                "link set lo up",
                f"link set {DEVICE} mtu {mtu} txqueuelen {QUEUE_PACKETS} addrgenmode none",
                f"addr add {address}/32 dev {DEVICE}",
                f"link set {DEVICE} up",
                f"route add default dev {DEVICE} src {address} congctl cubic",
            )
            subprocess.run(["ip", "-batch", "-"], input="\n".join(orders).encode(), check=True, capture_output=True)


def kill_all(hosts: Sequence[Host]) -> None:
    """End all processes on these hosts, and those that they start meanwhile."""
    theirs = {_identity(os.stat(host.namespace)) for host in hosts}
    end_s = time.monotonic() + KILL_WITHIN_S
    while (found := list(_inside(theirs))) and time.monotonic() < end_s:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _inside(namespaces: set[tuple[int, int]]) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if _identity(os.stat(entry / "ns" / "net")) in namespaces:
                yield int(entry.name)


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


@contextlib.contextmanager
def _somewhere_else() -> Iterator[None]:
    """Be in a new network namespace for a while."""
    home = os.open(_OWN, os.O_RDONLY)
    _try(_libc.unshare, _CLONE_NEWNET)
    try:
        yield
    finally:
        _try(_libc.setns, home, _CLONE_NEWNET)
        os.close(home)


def _try(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "network namespace")
