"""An experiment from beginning to end, and what is measured of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.core.allocation import Allocation
from peer.core.codec import parse
from peer.core.gossip import Outer, start
from peer.core.prior import guesses, start_priors
from peer.core.state import State
from peer.data.corpus import Corpus
from peer.errors import ConfigError
from peer.heldout import assess
from peer.lab.algorithms import ALGORITHMS
from peer.lab.encounter import encounter
from peer.lab.experiment import Experiment
from peer.lab.simulation import Simulation

from .test_courses import experiment, weights
from .test_population import CPU, TOKENS, tiny_run

CORPUS = Corpus(TOKENS, np.random.default_rng(1).integers(0, 256, 3000).astype(np.uint16))


def finished(one: Experiment) -> Simulation:
    simulation = Simulation(one, CORPUS, CPU)
    while not simulation.over:
        simulation.advance()
    return simulation


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(algorithm: str) -> None:
    one = experiment(algorithm, codec="rank2-int8", meetings=2)
    one = replace(one, run=replace(one.run, rounds=6, inner=replace(one.run.inner, lr=1e-2)))
    uniform = float(np.log(257))
    simulation = Simulation(one, Corpus(np.tile(np.arange(16, dtype=np.uint16), 900), CORPUS.train[:100]), CPU)
    losses = [simulation.advance() for _ in range(6)]
    assert losses[0] is not None and losses[-1] is not None
    assert losses[-1] < 0.8 * losses[0] < uniform  # sixteen of 257 symbols, over and over, are soon learnt


def test_what_is_measured_is_what_the_daemons_own_assessment_says() -> None:
    one = experiment("gasloc", meetings=1)
    simulation = finished(one)
    point = simulation.point()
    truth = assess(one.run, CORPUS.heldout, [state.weights for state in simulation._world.population.states])
    assert point.heldout_average == pytest.approx(truth.average, abs=1e-5)
    assert point.heldout_peers == pytest.approx(truth.peers, abs=1e-5)
    assert point.disagreement == pytest.approx(truth.disagreement, rel=1e-5)
    outcome = simulation.outcome(point)
    assert (outcome.rounds, outcome.peers, outcome.seconds_simulated) == (4, 4, 15.0)  # and a landing


def test_after_the_last_round_peers_come_closer_without_training() -> None:
    one = experiment("gasloc", meetings=4)
    landed = finished(one)
    simulation = Simulation(one, CORPUS, CPU)
    simulation._course.land = lambda number: None  # type: ignore[method-assign]
    while not simulation.over:
        simulation.advance()
    before, after = simulation._world.population, landed._world.population
    assert [state.step for state in before.states] == [state.step for state in after.states]
    assert [state.round for state in before.states] == [state.round for state in after.states]
    for name in before.stack:
        torch.testing.assert_close(after.stack[name].mean(0), before.stack[name].mean(0), rtol=0, atol=1e-6)
    assert landed.point().disagreement < 0.5 * simulation.point().disagreement
    assert sum(landed._world.sent) > sum(simulation._world.sent)


def test_who_never_meets_does_not_land() -> None:
    assert finished(experiment("alone")).point().seconds == 12.0


def test_measuring_changes_nothing() -> None:
    looked, blind = (Simulation(experiment("gasloc", meetings=2), CORPUS, CPU) for _ in range(2))
    for _ in range(2):
        looked.advance()
        looked.point()
        blind.advance()
    for one, other in zip(weights(looked._world), weights(blind._world), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_optimizers_bytes_are_two_moments_of_the_model_and_its_counters() -> None:
    simulation = finished(experiment("alone"))
    state = simulation._world.population.states[0]
    model = 4 * sum(weight.numel() for weight in state.weights.values())
    assert simulation.outcome(simulation.point()).optimizer_bytes == 2 * model + 4 * len(state.weights)


def test_an_exchange_sends_what_its_parts_say_and_the_messages_around_them() -> None:
    codec = parse("rank2-int8")
    shapes = {"w": (32, 24), "bias": (24,)}
    allocation = Allocation(shapes, codec)
    cut = allocation.parts(ranks := [2, 0])
    generator = torch.Generator().manual_seed(0)

    def peer() -> State:
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return State(tensors, {name: t.clone() for name, t in tensors.items()}, start(Outer().form, tensors))

    found = encounter(Outer(), allocation, ranks, guesses(cut, start_priors(shapes), 0), peer(), peer())
    assert found.correction is not None
    legs = [sum(part.leg_bytes[leg] for part in cut) for leg in range(3)]
    assert legs[0] + legs[2] < found.caller_bytes < legs[0] + legs[2] + 400
    assert legs[1] < found.callee_bytes < legs[1] + 200


def test_a_diverged_peer_is_met_in_vain_and_the_simulation_goes_on() -> None:
    simulation = Simulation(experiment("gasloc", codec="rank2-int4", meetings=2), CORPUS, CPU)
    lost = simulation._world.population.states[1].weights["transformer.wte.weight"]
    lost.fill_(float("nan"))
    for _ in range(2):
        simulation.advance()
    point = simulation.point()
    assert [bool(np.isfinite(loss)) for loss in point.heldout_peers] == [True, False, True, True]
    assert min(simulation._world.sent) > 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"peers": 0}, "peers is 0"), ({"evaluations": 9}, "evaluations is 9"), ({"run": None}, "local_steps")],
)
def test_an_experiment_that_cannot_be_says_why(changes: dict[str, Any], word: str) -> None:
    one = experiment("gasloc")
    if "run" in changes:
        changes = {"run": replace(tiny_run(), local_steps=None, round_seconds=5.0)}
    with pytest.raises(ConfigError, match=word):
        replace(one, **changes)


def test_links_and_churn_are_read_from_files(tmp_path: Path) -> None:
    links, trace = tmp_path / "links.toml", tmp_path / "trace.txt"
    links.write_text("step_s = 0.5\n[[peers]]\nup_mbit = 10\n")
    trace.write_text("2.0 1 leave\n")
    simulation = finished(replace(experiment("gasloc"), links=links, churn=str(trace)))
    point = simulation.point()
    assert (4 + 1) * 3 * 0.5 <= point.seconds < (4 + 1) * 3 * 0.5 + 0.1  # and until the last correction is there
    assert len(point.heldout_peers) == 3
