"""Which directions of which tensors a meeting is about."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.core.allocation import CURIOSITY, Allocation
from peer.core.change import Correction
from peer.core.codec import Look, answer, parse, parts, probe, reply, settle
from peer.core.codec import part as cut_to
from peer.core.prior import Prior, Priors, guesses, next_priors, start_priors
from peer.core.state import Tensors
from peer.errors import ProtocolError

Shapes = dict[str, tuple[int, ...]]


def known(energy: list[float]) -> Prior:
    return Prior(energy=torch.tensor(energy))


def size(allocation: Allocation, ranks: list[int]) -> int:
    return sum(sum(part.leg_bytes) for part in allocation.parts(ranks))


def budget(shapes: Shapes, spec: str) -> int:
    """All matrices at the codec's rank, and a quarter of every vector; and room for any tensor's first direction."""
    cut = parts(shapes, parse(spec))
    least = [sum(cut_to(name, shape, parse(spec), 1).leg_bytes) for name, shape in shapes.items()]
    return max(int(sum(sum(each.leg_bytes) * (1 if len(each.shape) > 1 else 0.25) for each in cut)), *least)


def at(x: Tensor) -> Look:
    return lambda product: product(x)


def meet(allocation: Allocation, ranks: list[int], priors: Priors, ours: Tensors, theirs: Tensors) -> Correction:
    changes = []
    cut, codec = allocation.parts(ranks), allocation.codec
    start = guesses(cut, priors, len(ranks))
    for part, guess in zip(cut, start, strict=True):
        leg1 = probe(part, codec, at(ours[part.name]), guess)
        leg2, found = reply(part, codec, at(theirs[part.name]), leg1)
        leg3, _ = answer(part, codec, at(ours[part.name]), leg2)
        changes.append(settle(part, codec, found, leg3))
    return Correction(tuple(changes))


def test_a_first_meeting_cuts_all_matrices_evenly() -> None:
    shapes: Shapes = {"a": (96, 64), "b": (64, 128), "c": (80, 80)}
    assert Allocation(shapes, parse("rank3-int4")).ranks(start_priors(shapes), {}) == [3, 3, 3]


@pytest.mark.parametrize("spec", ["none", "int4"])
def test_under_a_full_codec_everything_travels_and_there_is_nothing_to_say(spec: str) -> None:
    shapes: Shapes = {"a": (96, 64), "bias": (64,)}
    allocation = Allocation(shapes, parse(spec))
    ranks = allocation.ranks(start_priors(shapes), {})
    assert ranks == []
    assert allocation.parts(ranks) == parts(shapes, parse(spec))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_budget_is_kept_and_used_up(data: st.DataObject) -> None:
    side, energies = st.integers(1, 90), st.lists(st.floats(0, 1e3), min_size=1, max_size=9)
    dimensions = data.draw(st.lists(st.lists(side, min_size=1, max_size=2), min_size=1, max_size=6))
    shapes: Shapes = {f"t{number}": tuple(each) for number, each in enumerate(dimensions)}
    spec = data.draw(st.sampled_from(["rank1-int4", "rank4-int4", "rank4", "rank16-int8"]))
    allocation = Allocation(shapes, parse(spec))
    priors = {
        name: known(sorted(data.draw(energies), reverse=True)) if data.draw(st.booleans()) else Prior()
        for name in shapes
    }
    ranks = allocation.ranks(priors, {name: data.draw(st.floats(1e-6, 1e3)) for name in shapes})
    spent, whole = size(allocation, ranks), budget(shapes, spec)
    assert spent <= whole
    for rank, (name, prior) in zip(ranks, priors.items(), strict=True):
        if rank == 0:  # there was no room for it
            assert spent + sum(cut_to(name, shapes[name], parse(spec), 1).leg_bytes) > whole
        seen = (parse(spec).rank or 0) if prior.energy is None else len(prior.energy)
        assert rank <= seen + max(1, seen // CURIOSITY)


def test_directions_of_one_price_are_chosen_by_what_they_are_worth() -> None:
    """As by sorting all of them: the best choice there is, where all take the same bytes."""
    draw = torch.Generator().manual_seed(3)
    shapes: Shapes = {f"w{number}": (96, 64) for number in range(6)}
    energies = {name: sorted((torch.rand(12, generator=draw) ** 4).tolist(), reverse=True) for name in shapes}
    sensitivity = {name: 0.1 + 3 * number for number, name in enumerate(shapes)}
    ranks = Allocation(shapes, parse("rank4-int8")).ranks({n: known(e) for n, e in energies.items()}, sensitivity)
    worths = sorted(((sensitivity[n] * e, n) for n in shapes for e in energies[n]), reverse=True)[: 6 * 4]
    assert sum(ranks) in (24, 23)  # the bytes of a direction grow by a few at times
    chosen = [sum(name == other for _, other in worths[: sum(ranks)]) for name in shapes]
    assert sum(abs(a - b) for a, b in zip(ranks, chosen, strict=True)) <= 1
    assert ranks != [4] * 6


def test_a_tensor_gets_few_more_directions_than_were_ever_seen() -> None:
    shapes: Shapes = {"loud": (96, 64), "quiet": (96, 64)}
    priors = {"loud": known([1e6] * 8), "quiet": known([1e-6] * 2)}
    ranks = Allocation(shapes, parse("rank30-int4")).ranks(priors, {})
    assert ranks == [8 + 8 // CURIOSITY, 3]


def test_a_model_of_one_vector_can_be_met_about() -> None:
    shapes: Shapes = {"v": (96,)}
    allocation = Allocation(shapes, parse("rank4-int4"))
    assert allocation.ranks(start_priors(shapes), {}) == [1]
    assert [part.name for part in allocation.parts([1])] == ["v"]


def test_offers_can_not_fill_the_memory() -> None:
    allocation = Allocation({"w": (96, 64), "v": (96,)}, parse("rank4-int4"))
    for number in range(1000):
        with pytest.raises(ProtocolError):
            allocation.parts([10**6 + number, 10**6 + number])
    assert len(allocation._cuts) <= 64 + 1


def test_bytes_go_where_the_difference_is() -> None:
    """Two matrices that differ in eight directions, and two that are the same: twice as much is found as evenly."""
    draw = torch.Generator().manual_seed(0)
    shapes: Shapes = {f"w{number}": (96, 64) for number in range(4)}
    ours = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    for name in ("w1", "w2"):
        theirs[name] += 0.1 * torch.randn(96, 8, generator=draw) @ torch.randn(8, 64, generator=draw)
    distance = math.sqrt(sum(float((ours[name] - theirs[name]).square().sum()) for name in shapes))
    allocation, found = Allocation(shapes, parse("rank4-int8")), {}
    for choose in ("evenly", "by worth"):
        priors = start_priors(shapes)
        for _ in range(20):
            ranks = [4] * 4 if choose == "evenly" else allocation.ranks(priors, {})
            correction = meet(allocation, ranks, priors, ours, theirs)
            priors = next_priors(correction, priors)
        found[choose] = correction.norm() ** 2 / distance**2
    assert found["evenly"] < 0.75
    assert found["by worth"] > 0.98


def test_what_was_left_out_for_long_is_looked_at_again() -> None:
    """A matrix with nothing to tell falls out; when it begins to differ, that is found without being told."""
    draw = torch.Generator().manual_seed(1)
    shapes: Shapes = {"a": (96, 64), "b": (96, 64)}
    ours = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    theirs = {"a": ours["a"] + 0.1 * torch.randn(96, 64, generator=draw), "b": ours["b"] + 1e-4}
    allocation, priors = Allocation(shapes, parse("rank2-int4")), start_priors(shapes)
    history = []
    for meeting in range(60):
        if meeting == 20:
            theirs["b"] = ours["b"] + 0.3 * torch.randn(96, 64, generator=draw)
        history.append(allocation.ranks(priors, {}))
        priors = next_priors(meet(allocation, history[-1], priors, ours, theirs), priors)
    assert [ranks[1] for ranks in history[10:20]].count(0) >= 5
    assert all(ranks[1] >= 2 for ranks in history[50:])


@pytest.mark.parametrize(
    ("spec", "ranks", "why"),
    [
        ("rank4-int4", [], "0 ranks for 3 tensors"),
        ("rank4-int4", [4, 4], "2 ranks for 3 tensors"),
        ("rank4-int4", [4, 4, 4, 4], "4 ranks for 3 tensors"),
        ("rank4-int4", [0, 0, 0], "come to 0 bytes"),
        ("rank4-int4", [9, 9, 1], "are allowed"),
        ("rank4-int4", [2**32 - 1, 0, 0], "are allowed"),
        ("none", [1, 1, 1], "which has none"),
    ],
)
def test_ranks_that_no_honest_caller_offers_are_refused(spec: str, ranks: list[int], why: str) -> None:
    shapes: Shapes = {"a": (96, 64), "b": (64, 128), "bias": (96,)}
    with pytest.raises(ProtocolError, match=why):
        Allocation(shapes, parse(spec)).parts(ranks)
