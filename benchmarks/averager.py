"""The other way to do it: hivemind's DecentralizedAverager in fp16 on the same tensors, a family of processes a peer.

What is compared is the all-reduce alone. The search for a group before it, which hivemind pads to a fixed time so that
others can join, is reported beside it and left out of the ratios.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cost import Cost, Meter, loopback_bytes
from benchmarks.pair import Shapes, draw
from benchmarks.worker import Failed

GROUP_S = 2.0
"""How long hivemind looks for a group; the least that works reliably on a busy machine."""

STEP_S = 120.0
POLL_S = 0.002


@dataclass(frozen=True)
class Averaged:
    """One peer's part of one averaging. step_s: with the search for a group. wire_bytes: both ways, of both peers."""

    cost: Cost
    step_s: float
    wire_bytes: int


class Averager:
    """One of two peers."""

    def __init__(self, shapes: Shapes, number: int) -> None:
        warnings.simplefilter("ignore")
        multiprocessing.set_start_method("fork", force=True)  # hivemind's processes can be made in no other way
        import hivemind

        logging.getLogger("hivemind").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self._shapes, self._number = shapes, number
        self._hivemind = hivemind
        self._dht: Any = None
        self._averager: Any = None

    def join(self, prefix: str, known: list[str]) -> list[str]:
        """Come up, find the peers whose addresses are known, and return one's own."""
        self._dht = self._hivemind.DHT(
            initial_peers=known,
            start=True,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
            startup_timeout=60,
        )
        self._averager = self._hivemind.averaging.DecentralizedAverager(
            [torch.zeros(shape) for shape in self._shapes.values()],
            self._dht,
            start=True,
            prefix=prefix,
            target_group_size=2,
            min_group_size=2,
            min_matchmaking_time=GROUP_S,
            request_timeout=GROUP_S / 2,
            allreduce_timeout=STEP_S,
            compression=self._hivemind.compression.Float16Compression(),
        )
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def prepare(self) -> None:
        """Set the tensors to their first values."""
        with self._averager.get_tensors() as tensors:
            for index, (tensor, shape) in enumerate(zip(tensors, self._shapes.values(), strict=True)):
                tensor.copy_(draw(shape, index)[self._number])

    def step(self) -> Averaged:
        """Average with the other peer; raises `Failed`."""
        asked_s, began_s, running = time.monotonic(), None, False
        meter, wire_bytes = Meter(), loopback_bytes()
        control = self._averager.step(wait=False, timeout=STEP_S)
        while not control.done():
            was_running, running = running, control.stage.name == "RUNNING_ALLREDUCE"
            if running and not was_running:  # anew when it failed and is tried again
                began_s = time.monotonic()
            time.sleep(POLL_S)
        ended_s = time.monotonic()
        cost = meter.stop(began_s, ended_s)
        if began_s is None or len(control.result() or ()) != 2:
            raise Failed("the two averagers did not find each other")
        return Averaged(cost, ended_s - asked_s, loopback_bytes() - wire_bytes)

    def left(self) -> float:
        """Return twice the distance from the true mean, as a share of the distance between the two sides before."""
        before = after = 0.0
        with self._averager.get_tensors() as tensors:
            for index, (tensor, shape) in enumerate(zip(tensors, self._shapes.values(), strict=True)):
                a, b = draw(shape, index)
                before += float(torch.linalg.vector_norm(a - b)) ** 2
                after += float(torch.linalg.vector_norm(tensor - (a + b) / 2)) ** 2
        return 2.0 * math.sqrt(after / before)

    def close(self) -> None:
        """Go down, with all child processes."""
        for one in (self._averager, self._dht):
            if one is not None:
                one.shutdown()
