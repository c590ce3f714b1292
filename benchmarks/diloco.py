"""DiLoCo over hivemind's averager: this project's inner steps, then a blocking all-reduce of what they came to.

    python -m benchmarks.diloco node ADDRESS
    python -m benchmarks.diloco join RUN HOME ADDRESS NUMBER PEERS BOOTSTRAP

Model, data, inner optimizer and outer step are those of the run's manifest, and so are the inner steps of a round. Then
all peers average their drifts in fp16 and take the outer step with the mean, which is SGD with Nesterov momentum. Into
the home go events as a daemon writes them, where stall_s is what the averaging took and bytes are those of all packets;
a checkpoint every round; and what each averaging was to find and found (`Averaging`).
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peer import __version__, checkpoint
from peer.config import Config
from peer.core.state import Tensors
from peer.events import Checkpoint, EventLog, Round, Start
from peer.home import Home
from peer.loading import load
from peer.manifest import Manifest
from peer.trainer import Trainer

FILE = "averagings.jsonl"
UP, DONE = "up", "done"
GROUP_S, REQUEST_S = 5.0, 3.0
"""hivemind's own: for how long it looks for a group that is not complete yet, and waits for an answer meanwhile."""

PATIENCE_S = 900.0
POLL_S = 0.005
SAMPLES = 2000
DEVICE = "wan0"


@dataclass(frozen=True)
class Averaging:
    """One peer's part of one averaging. began_s, found_s, ended_s: on the clock that all processes share.

    found_s: the group was complete and the all-reduce began. own, mean: some numbers of this peer's drift, and the same
    ones of what it got for the mean of all.
    """

    round: int
    began_s: float
    found_s: float
    ended_s: float
    own: list[float]
    mean: list[float]


class Averager:
    """One of so many peers on so many hosts. hivemind keeps processes of its own, which end with this one's group."""

    def __init__(self, weights: Tensors, address: str, peers: int, bootstrap: str, prefix: str) -> None:
        import hivemind

        logging.getLogger("hivemind").setLevel(logging.ERROR)
        self._peers = peers
        self._averager: Any = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(weight.shape) for weight in weights.values()],
            dht(address, [bootstrap]),
            start=True,
            prefix=prefix,
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=GROUP_S,
            request_timeout=REQUEST_S,
            allreduce_timeout=PATIENCE_S,
            compression=hivemind.compression.Float16Compression(),
        )

    def mean(self, drift: list[torch.Tensor], round: int) -> tuple[list[torch.Tensor], Averaging]:
        """Return the mean of all peers' drifts of a round, once all are there."""
        began_s, found_s = time.monotonic(), 0.0
        with self._averager.get_tensors() as tensors:
            for tensor, each in zip(tensors, drift, strict=True):
                tensor.copy_(each)
        control, running = self._averager.step(wait=False, timeout=PATIENCE_S), False
        while not control.done():
            was_running, running = running, control.stage.name == "RUNNING_ALLREDUCE"
            if running and not was_running:  # anew when it failed and is tried again
                found_s = time.monotonic()
            time.sleep(POLL_S)
        if len(control.result() or ()) != self._peers:
            sys.exit(f"round {round} was not averaged by all {self._peers} peers")
        with self._averager.get_tensors() as tensors:
            mean = [tensor.clone() for tensor in tensors]
        ended_s = time.monotonic()
        return mean, Averaging(round, began_s, found_s or ended_s, ended_s, samples(drift), samples(mean))


def dht(address: str, known: list[str]) -> Any:
    """Return a node of hivemind's DHT at this IPv4 address."""
    import hivemind

    return hivemind.DHT(
        initial_peers=known,
        start=True,
        host_maddrs=[f"/ip4/{address}/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        startup_timeout=60,
    )


def await_all(name: str, home: Home, last: int) -> None:
    """Return once all peers up to this number have a file of this name in their homes, which lie beside this one.

    Nodes come up one after another, since two that call each other at the same moment both fail, and then stay apart;
    training begins when all are there; and nobody leaves while others still wait for a part of the last mean.
    """
    others = [home.path.parent / f"peer-{number}" / name for number in range(1, last + 1)]
    while not all(other.exists() for other in others):
        time.sleep(POLL_S)


def samples(tensors: list[torch.Tensor]) -> list[float]:
    """Return some numbers of these tensors, the same places every time."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    values: list[float] = flat[:: max(1, len(flat) // SAMPLES)].tolist()
    return values


def traffic() -> tuple[int, int]:
    """Return the bytes of all packets that this host has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    return 0, 0


def join(run: Manifest, home: Home, address: str, number: int, peers: int, bootstrap: str) -> None:
    """Train the whole run on the shard of this number."""
    events = EventLog(home.events)
    loaded = load(Config(home=home.path), run, home, print)
    trainer, weights = loaded.trainer, loaded.trainer.state.weights
    await_all(UP, home, number - 1)
    averager = Averager(weights, address, peers, bootstrap, run.run_id)
    (home.path / UP).touch()
    await_all(UP, home, peers)
    trainer.state.origin = loaded.origin
    trainer.claim(number % run.data.shards)
    events.write(_start(run, trainer, loaded.parameters, address))
    trainer.begin_round()
    while trainer.round < run.rounds:
        trainer.step()
        if trainer.round_is_over:
            events.write(_end_round(trainer, averager, home, peers))
            saved = checkpoint.save(home.path, trainer.state, run.run_id)
            events.write(Checkpoint(trainer.round, str(saved.path), saved.size_bytes, saved.seconds))
    (home.path / DONE).touch()
    await_all(DONE, home, peers)


def _end_round(trainer: Trainer, averager: Averager, home: Home, peers: int) -> Round:
    """Average, take the outer step with the mean, and return what the round came to."""
    weights, anchor = trainer.state.weights, trainer.state.anchor
    drift = [weight.detach() - anchor[name] for name, weight in weights.items()]
    mean, averaging = averager.mean(drift, trainer.round)
    with torch.no_grad():
        for (name, weight), each in zip(weights.items(), mean, strict=True):
            weight.copy_(anchor[name] + each)
    tally = trainer.end_round()
    with (home.path / FILE).open("a") as file:
        file.write(json.dumps(asdict(averaging)) + "\n")
    sent, received = traffic()
    return Round(
        round=trainer.round,
        **asdict(tally),
        peers=peers - 1,
        meetings=0,
        declined=0,
        failed=0,
        bytes_sent=sent,
        bytes_received=received,
        partner=None,
        stall_s=averaging.ended_s - averaging.began_s,
    )


def _start(run: Manifest, trainer: Trainer, parameters: int, address: str) -> Start:
    return Start(
        peer_id=address,
        run_id=run.run_id,
        name=run.name,
        model=run.model,
        parameters=parameters,
        device=str(trainer.device),
        dtype=str(trainer.dtype).removeprefix("torch."),
        round=0,
        rounds=run.rounds,
        how="fresh",
        addresses=(address,),
        bootstraps=(),
        pid=os.getpid(),
        version=__version__,
    )


def main() -> None:
    """Do as the arguments say."""
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes can be made in no other way
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["node", address]:
            node = dht(address, [])
            print(f"--bootstrap {node.get_visible_maddrs()[0]}", flush=True)
            node.join()
        case ["join", run, home, address, number, peers, bootstrap]:
            join(Manifest.load(Path(run)), Home(Path(home)), address, int(number), int(peers), bootstrap)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
