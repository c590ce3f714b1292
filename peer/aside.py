"""Work in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def aside(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a thread of its own, which nobody waits for when the loop ends."""
    executor = ThreadPoolExecutor(1, name)
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    executor.shutdown(wait=False)
    return future
