"""How many cores torch takes in which thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
import torch

from peer.aside import aside, compute_with_one_core


def cores() -> tuple[int, int]:
    """Return how many threads this thread's operations take: torch's own, and those of MKL, where torch has it."""
    mkl = re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    return torch.get_num_threads(), int(mkl[1]) if mkl else torch.get_num_threads()


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_training_takes_all_the_cores_it_was_given_and_the_rest_takes_one() -> None:
    async def found() -> list[tuple[int, int]]:
        compute_with_one_core(asyncio.get_running_loop())
        beside = await asyncio.gather(*(asyncio.to_thread(cores) for _ in range(4)))
        # in this order: what a pool's thread has set is not to become training's
        training = await aside("training", cores)
        return [*beside, training, cores()]

    *beside, training, here = asyncio.run(found())
    assert set(beside) == {(1, 1)}
    assert training == here == (3, 3)
