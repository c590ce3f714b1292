"""What keeps a process that we started from outliving us, even when we are killed with -9."""

from __future__ import annotations

import os
import signal
import threading

STANDARD_INPUT = 0


def hold() -> None:
    """End this process with SIGTERM once its standard input ends: a pipe that nobody but its parent holds open.

    A pipe, not the kernel's parent-death signal: that one is Linux's alone, and goes by threads, not by processes.
    """
    threading.Thread(target=_wait, name="leash", daemon=True).start()


def _wait() -> None:
    while os.read(STANDARD_INPUT, 4096):  # not sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
