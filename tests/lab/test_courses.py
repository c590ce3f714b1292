"""What a simulated round does, against torch's own outer optimizer, the printed equations and closed forms of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from peer.core.gossip import Form, Outer, laplacian, mix
from peer.core.state import Tensors
from peer.lab.algorithms import ALGORITHMS
from peer.lab.beside import Beside
from peer.lab.churn import Change
from peer.lab.experiment import Experiment
from peer.lab.links import Link, Links
from peer.lab.lockstep import Lockstep
from peer.lab.world import World
from peer.trainer import Trainer

from .test_population import CPU, TOKENS, real_peer, tiny_run

PEERS = 4
STEPS = 3


def experiment(algorithm: str, meetings: int = 1, codec: str = "none", **changes: Any) -> Experiment:
    peers = changes.pop("peers", PEERS)
    run = tiny_run(outer=changes.pop("outer", ALGORITHMS[algorithm].outer))
    run = replace(run, exchange=replace(run.exchange, meetings=meetings, codec=codec))
    return Experiment(label="test", algorithm=algorithm, peers=peers, run=run, evaluations=1, **changes)


def world(one: Experiment, links: Links | None = None, changes: tuple[Change, ...] = ()) -> World:
    return World(one, TOKENS, links or Links.ideal(one.peers), changes, CPU)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def weights(place: World) -> list[Tensors]:
    return [copied(state.weights) for state in place.population.states]


def mean(many: list[Tensors]) -> Tensors:
    return {name: torch.stack([one[name] for one in many]).mean(0) for name in many[0]}


def assert_close(one: Tensors, other: Tensors, atol: float = 1e-5) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name].detach(), rtol=0, atol=atol)


def train(real: list[Trainer]) -> None:
    for trainer in real:
        for _ in range(STEPS):
            trainer.step()


def place_at(trainer: Trainer, point: Tensors) -> None:
    """Begin a round from here."""
    with torch.no_grad():
        for name, weight in trainer.state.weights.items():
            weight.copy_(point[name])
            trainer.state.anchor[name].copy_(point[name])
    trainer.state.round += 1
    trainer.begin_round()


def test_diloco_is_nesterov_sgd_on_the_mean_drift_of_real_peers() -> None:
    one = experiment("diloco")
    place = world(one)
    course, real = Lockstep(place), [real_peer(one.run, shard) for shard in range(PEERS)]
    oracle = copied(real[0].state.weights)
    optimizer = torch.optim.SGD(oracle.values(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        train(real)
        ends = mean([copied(trainer.state.weights) for trainer in real])
        for name, point in oracle.items():
            point.grad = point - ends[name]
        optimizer.step()
        for trainer in real:
            place_at(trainer, oracle)
        course.period(number)
        for peer in weights(place):
            assert_close(peer, oracle)


def test_noloco_is_its_printed_equation_on_real_peers() -> None:
    one = experiment("noloco", peers=2)
    place = world(one)
    course, real = Lockstep(place), [real_peer(one.run, shard) for shard in range(2)]
    momenta = [{name: torch.zeros_like(w) for name, w in trainer.state.weights.items()} for trainer in real]
    for number in range(3):
        train(real)
        for_all = {}
        for name in momenta[0]:
            phi = torch.stack([trainer.state.anchor[name] for trainer in real])
            delta = torch.stack([trainer.state.weights[name].detach() for trainer in real]) - phi
            for_all[name] = (phi, delta.mean(0))
        for peer, trainer in enumerate(real):
            following = {}
            for name, (phi, delta) in for_all.items():
                momenta[peer][name] = 0.5 * momenta[peer][name] + 0.7 * delta + 0.7 * (phi.mean(0) - phi[peer])
                following[name] = phi[peer] + momenta[peer][name]
            place_at(trainer, following)
        course.period(number)
        for peer, trainer in enumerate(real):
            assert_close(weights(place)[peer], trainer.state.weights)


@pytest.mark.parametrize("inner", ["adamw", "lordo"])
def test_peers_alone_take_the_inner_and_outer_steps_of_real_ones(inner: str) -> None:
    one = experiment("alone") if inner == "adamw" else lordo("alone")
    place = world(one)
    course, real = Beside(place), [real_peer(one.run, shard) for shard in range(PEERS)]
    for number in range(3):
        train(real)
        for trainer in real:
            trainer.end_round()
        course.period(number)
    for peer, trainer in enumerate(real):
        assert_close(weights(place)[peer], trainer.state.weights)
    assert place.sent == [0.0] * PEERS


@pytest.mark.parametrize("form", [Form.OWN, Form.MIXED])
def test_on_the_complete_graph_gossip_is_diloco(form: Form) -> None:
    outer = Outer(form, eta=0.9, gamma=0.6)
    gossip = world(experiment("gasloc", outer=outer, graph="complete", spread=False))
    reduce = world(experiment("diloco", outer=replace(outer, form=Form.OWN)))
    meeting, reducing = Beside(gossip), Lockstep(reduce)
    for number in range(3):
        assert meeting.period(number) == pytest.approx(reducing.period(number), abs=1e-5)
    for peer in range(PEERS):
        assert_close(weights(gossip)[peer], weights(reduce)[peer])


def test_without_compression_pairs_after_the_round_mix_as_the_laplacian_says() -> None:
    """What each peer would be alone, times I − α Λ of some matching."""
    outer = Outer(gamma=0.6, alpha=0.5)
    gossip, alone = world(experiment("gasloc", outer=outer, spread=False)), world(experiment("alone", outer=outer))
    Beside(gossip).period(0)
    Beside(alone).period(0)
    name = "transformer.wte.weight"
    before = torch.stack([one[name].flatten() for one in weights(alone)])
    after = torch.stack([one[name].flatten() for one in weights(gossip)])
    matchings = ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)])
    errors = [float((mix(before, laplacian(pairs, PEERS), 0.5) - after).abs().max()) for pairs in matchings]
    assert min(errors) < 1e-6 < max(errors)


@pytest.mark.parametrize("graph", ["one-peer", "two-peer", "ring", "exponential", "complete"])
@pytest.mark.parametrize("codec", ["none", "rank2-int4"])
def test_meetings_leave_the_mean_of_all_peers_where_it_was(graph: Any, codec: str) -> None:
    place = world(experiment("gasloc", meetings=2, codec=codec, graph=graph, peers=5))
    course = Beside(place)
    course.period(0)
    before = weights(place)
    for caller in range(5):
        course._meet(caller, list(range(5)))
    after = weights(place)
    assert_close(mean(after), mean(before), atol=1e-6)
    name = "transformer.wte.weight"
    assert not torch.equal(after[0][name], before[0][name])


def test_two_peers_at_once_move_a_third_of_the_way() -> None:
    place = world(experiment("gasloc", meetings=1, graph="two-peer", peers=3))
    course = Beside(place)
    place.population.step([0, 1, 2], [1e-2] * 3)
    before = weights(place)
    course._meet(1, [0, 1, 2])
    assert_close(weights(place)[1], mean(before), atol=1e-6)
    expected = {name: w - (w - before[1][name]) / 3 for name, w in before[0].items()}
    assert_close(weights(place)[0], expected, atol=1e-6)


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    def outcome(seed: int) -> list[Tensors]:
        one = experiment("gasloc", meetings=2, codec="rank2-int8")
        place = world(replace(one, run=replace(one.run, seed=seed)))
        course = Beside(place)
        for number in range(2):
            course.period(number)
        return weights(place)

    first, second, other = outcome(1), outcome(1), outcome(2)
    name = "transformer.wte.weight"
    assert all(torch.equal(one[name], two[name]) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first[0][name], other[0][name])


# ------------------------------------------------------------------ low rank inside


def lordo(algorithm: str) -> Experiment:
    one = experiment(algorithm)
    return replace(one, run=replace(one.run, inner=replace(one.run.inner, optimizer="lordo", rank=2)))


def bases(place: World, name: str) -> list[torch.Tensor]:
    kept = zip(place.population.optimizers, place.population.states, strict=True)
    return [optimizer.state[state.weights[name]]["basis"] for optimizer, state in kept]


def test_global_bases_are_one_and_local_ones_are_each_peers_own() -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    shared, local = world(lordo("lordo")), world(lordo("lordo-local"))
    for place in (shared, local):
        Lockstep(place).period(0)
    first = bases(shared, name)
    assert all(torch.equal(basis, first[0]) for basis in first)
    assert not torch.allclose(bases(local, name)[0], bases(local, name)[1])


def test_a_newcomer_gets_its_donors_bases() -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    place = world(lordo("alone"))
    Beside(place).period(0)
    assert not torch.equal(bases(place, name)[0], bases(place, name)[1])
    place.population.copy(0, 1)
    assert torch.equal(bases(place, name)[0], bases(place, name)[1])
    place.population.step([1], [1e-3])
    assert not torch.equal(*(place.population.states[peer].weights[name] for peer in (0, 1)))


def test_a_newcomer_downloads_all_that_its_donor_hands_over() -> None:
    place = world(lordo("alone"))
    population = place.population
    place.welcome(1, [0])
    kept = [population.optimizers[0].state[weight] for weight in population.states[0].weights.values()]
    low_rank = sum(each.numel() for memory in kept if "basis" in memory for each in memory.values())
    assert low_rank > 0
    assert place.sent[0] == 2 * place.model_bytes + 4 * low_rank


# ------------------------------------------------------------------ time


def test_an_all_reduce_is_waited_for_and_meetings_are_not() -> None:
    slow = Links((Link(1.0, 1.0, 0.05), *[Link(20.0, 20.0, 0.05)] * (PEERS - 1)))
    reduce, gossip = world(experiment("diloco"), slow), world(experiment("gasloc"), slow)
    Lockstep(reduce).period(0)
    Beside(gossip).period(0)
    assert gossip.now_s == STEPS
    step_s = 0.1 + 8 * reduce.model_bytes / PEERS / 1e6  # one hop of the ring over the line of 1 Mbit/s
    assert reduce.now_s == pytest.approx(STEPS + 2 * (PEERS - 1) * step_s)
    assert reduce.sent == [2 * (PEERS - 1) / PEERS * reduce.model_bytes] * PEERS


def test_all_wait_for_the_slowest_processor_in_lockstep_and_nobody_beside() -> None:
    links = Links((Link(step_s=3.0), *[Link(step_s=1.0)] * (PEERS - 1)))
    reduce, gossip = world(experiment("diloco"), links), world(experiment("gasloc"), links)
    Lockstep(reduce).period(0)
    Beside(gossip).period(0)
    assert reduce.now_s == 3.0 * STEPS
    assert gossip.now_s == STEPS
    assert [state.step for state in gossip.population.states] == [1, 3, 3, 3]
    assert [state.step for state in reduce.population.states] == [3, 3, 3, 3]


def test_a_correction_arrives_when_the_links_have_carried_it() -> None:
    one = experiment("gasloc", peers=2)
    place = world(one, Links((Link(latency_s=0.3), Link(latency_s=0.3))))
    course = Beside(place)
    place.population.step([0, 1], [1e-2, 1e-2])
    course._meet(0, [0, 1])
    before = weights(place)
    assert_close(before[0], weights(place)[0], atol=0)
    place.now_s = 2.9  # five one-way latencies of 0.6 s are 3 s
    course._apply([0, 1])
    assert all(torch.equal(weights(place)[0][name], w) for name, w in before[0].items())
    assert len(course._due[0]) == len(course._due[1]) == 1
    place.now_s = 3.0
    course._apply([0, 1])
    assert_close(weights(place)[0], weights(place)[1], atol=1e-6)
    assert_close(weights(place)[0], mean(before), atol=1e-6)
    assert not course._due[0]


def test_who_meets_several_at_once_gives_each_less_weight_and_never_the_same_one_twice() -> None:
    place = world(experiment("gasloc", peers=5), Links((Link(latency_s=0.3),) * 5))
    course = Beside(place)
    place.population.step(list(range(5)), [1e-2] * 5)
    for _ in range(4):
        course._meet(0, [0])
    met = course._due[0]
    assert [abs(due.weight) for due in met] == [1 / 2, 1 / 3, 1 / 4]  # and a fourth one is too many
    assert len({due.other for due in met}) == 3


def test_peers_of_different_speeds_meet_as_often_as_those_of_one_speed() -> None:
    bytes_sent = []
    for steps_s in ((1.0, 1.0, 1.0, 1.0), (1.0, 0.93, 0.71, 1.37)):
        place = world(experiment("gasloc", meetings=2), Links(tuple(Link(step_s=each) for each in steps_s)))
        course = Beside(place)
        for number in range(6):
            course.period(number)
        bytes_sent.append(sum(place.sent))
    assert bytes_sent[1] == pytest.approx(bytes_sent[0], rel=0.25)


def test_a_peer_in_the_middle_of_a_step_is_met_and_corrected_when_the_step_is_done() -> None:
    place = world(experiment("gasloc", peers=2), Links((Link(step_s=1.0), Link(step_s=1.5))))
    course = Beside(place)
    place.population.step([0, 1], [1e-2, 1e-2])
    before = weights(place)
    place.now_s = 1.0
    course._meet(0, [0])
    assert_close(weights(place)[0], mean(before), atol=1e-6)
    assert_close(weights(place)[1], before[1], atol=0)
    assert not course._due[0]
    assert len(course._due[1]) == 1  # another exchange would read weights that lack it, so counts as at once
    place.now_s = 1.5
    course._apply([1])
    assert_close(weights(place)[1], mean(before), atol=1e-6)
    assert not course._due[1]


def test_meetings_after_the_round_wait_for_the_first_one_to_be_over() -> None:
    place = world(experiment("gasloc", meetings=2, spread=False))
    course = Beside(place)
    course.period(0)
    once = sum(place.sent)
    course.period(1)
    assert 0 < once == sum(place.sent) - once
    assert once == pytest.approx(2 * PEERS * place.model_bytes, rel=0.05)


def test_the_last_correction_of_the_landing_arrives_at_both_sides() -> None:
    slow = Links(tuple(Link(up_mbit=0.2, latency_s=0.01) for _ in range(PEERS)))
    place = world(experiment("gasloc", meetings=3, codec="rank2-int4"), slow)
    course = Beside(place)
    course.period(0)
    course._arrive()
    before = weights(place)
    course.land(1)
    assert not any(course._due)
    assert_close(mean(weights(place)), mean(before), atol=1e-6)
    assert place.now_s >= 2 * STEPS


# ------------------------------------------------------------------ churn


def test_who_comes_back_in_the_middle_of_the_others_steps_meets_again() -> None:
    place = world(experiment("gasloc", meetings=2), changes=(Change(2.3, 2, False), Change(2.8, 2, True)))
    course = Beside(place)
    for number in range(3):
        course.period(number)
    met = [course._last_met[2][other] for other in (0, 1, 3)]
    assert max(met) > course._meetings / 2


def test_who_is_away_does_not_train_and_comes_back_with_a_donors_anchor() -> None:
    changes = (Change(1.5, 2, False), Change(4.5, 2, True))
    place = world(experiment("gasloc", meetings=0), changes=changes)
    course = Beside(place)
    course.period(0)
    assert [state.step for state in place.population.states] == [3, 3, 1, 3]
    course.period(1)
    newcomer, others = place.population.states[2], [place.population.states[peer] for peer in (0, 1, 3)]
    assert newcomer.round == 1
    name = "transformer.wte.weight"
    assert sum(torch.equal(newcomer.anchor[name], other.outer["momentum"][name]) for other in others) == 0
    assert [other.round for other in others] == [2, 2, 2]
    assert sum(place.sent) == place.model_bytes * 2


def test_a_meeting_with_a_peer_that_leaves_leaves_no_trace() -> None:
    slow = Links((Link(latency_s=1.0), Link(latency_s=1.0)))
    place = world(experiment("gasloc", peers=2), slow, (Change(2.0, 1, False),))
    course = Beside(place)
    place.population.step([0, 1], [1e-2, 1e-2])
    course._meet(0, [0, 1])
    before = weights(place)
    place.now_s = 2.0
    course._welcome()
    place.now_s = 50.0
    course._apply([0])
    assert all(torch.equal(weights(place)[0][name], w) for name, w in before[0].items())
    assert course._is_free(0)
