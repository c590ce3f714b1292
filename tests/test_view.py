"""What meetings see of the weights, beside training."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from peer.core.gossip import Form, Outer, start
from peer.core.state import State
from peer.still import Still
from peer.view import View

DEADLINE_S = 20.0


def state(form: Form = Form.OWN) -> State:
    draw = torch.Generator().manual_seed(3)
    weights = {"w": torch.randn(40, 30, generator=draw), "bias": torch.randn(30, generator=draw)}
    return State(weights, {name: weight.clone() for name, weight in weights.items()}, start(form, weights))


def view(state: State, form: Form = Form.OWN, still: Still | None = None) -> View:
    return View(Outer(form), state, still or Still())


@pytest.mark.parametrize("form", [Form.OWN, Form.MIXED])
def test_what_is_read_is_the_live_weight_and_no_copy(form: Form) -> None:
    ours = state(form)
    looking, live = view(ours, form), ours.weights["w"]
    for _ in range(3):
        live.add_(1)
        seen = looking.read("w", lambda tensor: tensor)
        assert torch.equal(seen, live)
        assert seen.data_ptr() == live.data_ptr()


def test_under_the_plain_form_the_push_is_no_part_of_it() -> None:
    ours = state(Form.PLAIN)
    ours.outer["push"]["w"].fill_(0.5)
    found = view(ours, Form.PLAIN).read("w", lambda tensor: tensor)
    assert torch.equal(found, ours.weights["w"] - 0.5)


def test_a_product_is_handed_back_and_leaves_no_trace_in_the_gradient() -> None:
    ours = state()
    weight = ours.weights["w"].requires_grad_()
    found = view(ours).read("w", lambda tensor: 2 * tensor)
    assert torch.equal(found, 2 * weight)
    assert not found.requires_grad


def test_training_changes_nothing_while_a_product_is_computed() -> None:
    ours, still = state(), Still()
    looking, begun = view(ours, still=still), threading.Event()

    def train() -> None:
        assert begun.wait(DEADLINE_S)
        with still.changing():
            ours.weights["w"].zero_()

    training = threading.Thread(target=train)
    training.start()

    def twice(tensor: Tensor) -> Tensor:
        before = tensor.clone()
        begun.set()
        while still._wanted == 0:  # until training wants to go on
            begun.wait(0.001)
        assert torch.equal(tensor, before)
        return before

    before = looking.read("w", twice)
    training.join(DEADLINE_S)
    assert before.any()
    assert not ours.weights["w"].any()
    assert still.take_waited_s() > 0


def test_an_error_in_a_product_lets_training_go_on() -> None:
    ours, still = state(), Still()

    def fail(tensor: Tensor) -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        view(ours, still=still).read("w", fail)
    training = threading.Thread(target=lambda: still.changing().__enter__(), daemon=True)
    training.start()
    training.join(DEADLINE_S)
    assert not training.is_alive()


def test_the_norm_is_that_of_all_weights_together() -> None:
    ours = state()
    everything = torch.cat([weight.flatten().double() for weight in ours.weights.values()])
    assert view(ours).norm() == pytest.approx(float(everything.norm()), rel=1e-6)


def test_the_norm_is_asked_for_once_a_round() -> None:
    ours = state()
    looking = view(ours)
    before = looking.norm()
    for weight in ours.weights.values():
        weight.mul_(2)
    assert looking.norm() == before
    ours.round += 1
    assert looking.norm() == pytest.approx(2 * before, rel=1e-6)


def test_a_norm_that_is_no_number_is_told_as_it_is() -> None:
    ours = state()
    ours.weights["bias"][3] = torch.nan
    assert math.isnan(view(ours).norm())
