"""Threads beside the event loop's own, and how many cores torch's operations may take in each.

Torch counts its threads anew in every thread of ours, and what was set in one does not hold in another. So whoever
computes in a thread of its own says there how many: training as many as the process has, all else, which goes on beside
training, one. With more, two teams of threads contend for the same cores, and both are many times slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def aside(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a thread of its own, with the torch threads of this one; nobody waits for it when the loop ends."""
    executor = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    executor.shutdown(wait=False)
    return future


def compute_with_one_core(loop: asyncio.AbstractEventLoop) -> None:
    """Have every thread of the loop's pool, that of `asyncio.to_thread`, compute with one core."""
    pool = ThreadPoolExecutor(thread_name_prefix="beside", initializer=torch.set_num_threads, initargs=(1,))
    loop.set_default_executor(pool)
