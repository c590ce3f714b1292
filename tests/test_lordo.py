"""The low-rank inner optimizer in a model, a trainer, a checkpoint and a swarm; its memory, measured."""

from __future__ import annotations

import asyncio
import copy
import math
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peer import checkpoint, tail
from peer.boundary import Boundary
from peer.catchup import Newcomer
from peer.config import Config
from peer.core import lordo
from peer.core.change import Change, Correction
from peer.core.codec import parse, parts
from peer.core.lordo import Rule
from peer.core.members import Member
from peer.core.state import State, Tensors
from peer.donor import Donor
from peer.errors import ConfigError
from peer.events import EventLog
from peer.lordo import Lordo, block_bytes, flaw_of, is_block, refresh, slots, state_bytes
from peer.manifest import Inner, Manifest
from peer.models import causal
from peer.net.base import Stream
from peer.net.memory import Hub, MemoryNetwork
from peer.process import main
from peer.trainer import Trainer, optimizer_for
from peer.wire.peer_pb2 import Message
from tests.swarm.memory_swarm import Swarm, tiny_run
from tests.test_trainer import CPU, one_round, sequences, tiny, weights

INNER = Inner(optimizer="lordo", lr=0.01, rank=2)
RULE = INNER.rule
ATTENTION = "transformer.h.0.attn.c_attn.weight"


def low_rank(run: Manifest, **keys: Any) -> Manifest:
    return replace(run, inner=replace(run.inner, optimizer="lordo", **keys)).check()


def small(**keys: Any) -> Manifest:
    return low_rank(tiny(), rank=3, **keys)


def trainer(run: Manifest) -> Trainer:
    return Trainer(run, causal.build(run.config, run.seed), sequences(run), CPU)


def parameters(dtype: torch.dtype = torch.float32) -> Tensors:
    """Make a wide block, a high one, an embedding, a vector."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"h.0.a.weight": (6, 9), "h.0.b.weight": (10, 7), "wte.weight": (11, 6), "h.0.a.bias": (9,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def set_gradients(several: Mapping[str, Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in several.values():
        weight.grad = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight.dtype)


# ---------------------------------------------------------------- what is low-rank

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "config", [tiny().config, LLAMA, LLAMA | {"tie_word_embeddings": True}], ids=["gpt2", "llama", "llama-tied"]
)
def test_blocks_are_the_matrices_of_the_layers_and_nothing_else(config: dict[str, Any]) -> None:
    model = causal.outline(config)
    expected = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head"
    }
    found = {name for name, weight in model.named_parameters() if is_block(name, tuple(weight.shape))}
    assert found == expected
    assert len(found) >= 4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("wte.weight", (50, 8)),
        ("lm_heads.0.weight", (50, 8)),
        ("h.0.ln_1.weight", (8,)),
        ("h.0.experts.weight", (4, 8, 8)),
        ("h.0.mixer.A_log", (8, 4)),
        ("h0.attn.weight", (8, 8)),
    ],
)
def test_embeddings_heads_norms_and_stacks_are_none(name: str, shape: tuple[int, ...]) -> None:
    assert not is_block(name, shape)


# ---------------------------------------------------------------- the optimizer


def test_all_but_the_blocks_takes_the_steps_of_torchs_adamw() -> None:
    ours, theirs = parameters(), parameters()
    inner = replace(INNER, weight_decay=0.1)
    mine, adam = optimizer_for(inner, ours), optimizer_for(replace(inner, optimizer="adamw", rank=0), theirs)
    for step in range(30):
        for several, optimizer in ((ours, mine), (theirs, adam)):
            set_gradients(several, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimizer.step()
    for name in ("wte.weight", "h.0.a.bias"):
        assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6)
    assert not torch.allclose(ours["h.0.a.weight"], theirs["h.0.a.weight"], atol=1e-2)


def test_at_full_rank_with_omega_1_and_the_identity_blocks_take_adams_steps_too() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    inner = replace(INNER, rank=100, omega=1.0, weight_decay=0.1)
    mine, adam = optimizer_for(inner, ours), optimizer_for(replace(inner, optimizer="adamw", rank=0), theirs)
    for name in ("h.0.a.weight", "h.0.b.weight"):
        basis = mine.state[ours[name]]["basis"]
        basis.copy_(torch.eye(min(ours[name].shape)))
    for step in range(30):
        for several, optimizer in ((ours, mine), (theirs, adam)):
            set_gradients(several, step)
            optimizer.step()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-10)


def test_the_memory_is_there_before_the_first_step_and_as_large_as_after_it() -> None:
    several = parameters()
    optimizer = Lordo(several, replace(RULE, feedback="int8"), 0.01, seed=4)
    before = state_bytes(optimizer)
    shapes = {
        name: {slot: tuple(tensor.shape) for slot, tensor in optimizer.state[weight].items()}
        for name, weight in several.items()
    }
    assert shapes == {name: slots(name, tuple(weight.shape), optimizer.rule) for name, weight in several.items()}
    assert shapes["h.0.b.weight"] == {
        "step": (),
        "exp_avg": (2, 10),
        "exp_avg_sq": (2, 10),
        "basis": (7, 2),
        "feedback": (70 + 2 * 2,),
    }
    for name in ("h.0.a.weight", "h.0.b.weight"):
        basis = optimizer.state[several[name]]["basis"]
        assert torch.equal(basis, lordo.drawn(tuple(basis.shape), 4, name, 0).float())
    set_gradients(several, 0)
    optimizer.step()
    assert state_bytes(optimizer) == before


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    several = parameters()
    before = copy.deepcopy(several)
    optimizer = Lordo(several, RULE, 0.01, 0)
    set_gradients({"wte.weight": several["wte.weight"]}, 0)
    optimizer.step()
    changed = {name for name, weight in several.items() if not torch.equal(weight, before[name])}
    assert changed == {"wte.weight"}
    assert int(optimizer.state[several["h.0.a.weight"]]["step"]) == 0


def test_weights_in_bfloat16_are_computed_in_float32_and_rounded_once() -> None:
    half = parameters(torch.bfloat16)
    single: Tensors = {name: nn.Parameter(weight.detach().float()) for name, weight in half.items()}
    optimizers = [Lordo(several, RULE, 0.1, 0) for several in (half, single)]
    for step in range(3):
        set_gradients(half, step)
        for rounded, exact in zip(half.values(), single.values(), strict=True):
            assert rounded.grad is not None
            exact.data.copy_(rounded)
            exact.grad = rounded.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for rounded, exact in zip(half.values(), single.values(), strict=True):
            assert torch.equal(rounded, exact.bfloat16())
            for slot, tensor in optimizers[0].state[rounded].items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, optimizers[1].state[exact][slot])


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("shape", "ratio"), [((768, 768), 8.0), ((768, 3072), 32 / 3), ((3072, 768), 32 / 3)])
def test_a_block_takes_an_eighth_of_adamws_memory_or_less(shape: tuple[int, int], ratio: float) -> None:
    several: Tensors = {"h.0.a.weight": nn.Parameter(torch.zeros(shape)), "wte.weight": nn.Parameter(torch.zeros(9, 2))}
    mine = optimizer_for(replace(INNER, rank=0), several)
    theirs = optimizer_for(Inner(lr=0.1), several)
    assert block_bytes(theirs, several) == 0  # torch makes it in the first step
    set_gradients(several, 0)
    for optimizer in (mine, theirs):
        optimizer.step()
    assert block_bytes(theirs, several) / block_bytes(mine, several) == pytest.approx(ratio, rel=1e-4)
    for optimizer in (mine, theirs):
        assert state_bytes(optimizer) - block_bytes(optimizer, several) == 2 * 4 * 9 * 2 + 4


def test_measuring_counts_what_is_there_for_any_optimizer() -> None:
    several = parameters()
    numbers = sum(weight.numel() for weight in several.values())
    set_gradients(several, 0)
    momentum = torch.optim.SGD(list(several.values()), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(list(several.values()), lr=0.1)
    for optimizer in (momentum, plain):
        optimizer.step()
    assert (state_bytes(momentum), state_bytes(plain)) == (4 * numbers, 0)
    assert block_bytes(momentum, several) == 4 * (54 + 70)


def test_error_feedback_costs_a_byte_a_weight() -> None:
    several = parameters()
    plain, kept = (Lordo(several, replace(RULE, feedback=how), 0.1, 0) for how in ("none", "int8"))
    assert state_bytes(kept) - state_bytes(plain) == 54 + 2 + 70 + 4


# ---------------------------------------------------------------- a new basis


def test_an_optimizer_of_full_rank_is_not_refreshed() -> None:
    several = parameters()
    optimizer = torch.optim.AdamW(list(several.values()))
    refresh(optimizer, lambda name: pytest.fail(f"asked for {name}"), 1)


def test_one_drift_at_a_time_is_asked_for_and_kept() -> None:
    several = parameters()
    optimizer = Lordo(several, RULE, 0.1, 0)
    alive: list[weakref.ref[Tensor]] = []

    def delta(name: str) -> Tensor:
        assert all(reference() is None for reference in alive)
        drift = torch.randn_like(several[name])
        alive.append(weakref.ref(drift))
        return drift

    refresh(optimizer, delta, 1)
    assert len(alive) == 2


def test_a_random_basis_is_the_same_for_all_peers_and_needs_no_drift() -> None:
    several = parameters()
    optimizer = Lordo(several, replace(RULE, projection="random"), 0.1, 7)
    refresh(optimizer, lambda name: pytest.fail(f"asked for {name}"), 3)
    for name in ("h.0.a.weight", "h.0.b.weight"):
        basis = optimizer.state[several[name]]["basis"]
        assert torch.equal(basis, lordo.drawn(tuple(basis.shape), 7, name, 3).float())


@pytest.mark.parametrize("how", ["power", "svd"])
def test_a_round_ends_with_bases_of_its_own_drift_without_the_corrections(how: Any) -> None:
    peer = trainer(small(projection=how))
    start = weights(peer)
    shapes = {name: tuple(weight.shape) for name, weight in start.items()}
    draw = torch.Generator().manual_seed(1)
    correction = Correction(
        tuple(
            Change(part, torch.randn(shapes[part.name], generator=draw), None) for part in parts(shapes, parse("none"))
        )
    )
    peer.step()
    drifts = {name: weight - start[name] for name, weight in weights(peer).items()}
    correction.add_(0.5, peer.state.weights, peer.state.anchor)
    middle = weights(peer)
    while not peer.round_is_over:
        peer.step()
    drifts = {name: drifts[name] + weight - middle[name] for name, weight in weights(peer).items()}
    before = {name: basis.clone() for name, basis in peer.state.inner["basis"].items()}
    momentum = peer.state.inner["exp_avg"][ATTENTION].clone()
    peer.end_round()
    for name, old in before.items():
        expected = lordo.project(lordo.upright(drifts[name]), old, how)
        new = peer.state.inner["basis"][name]
        assert torch.allclose(new @ new.mT, expected @ expected.mT, atol=1e-2)
        assert not torch.allclose(new @ new.mT, old @ old.mT, atol=1e-1)
    turn = peer.state.inner["basis"][ATTENTION].mT @ before[ATTENTION]
    assert torch.allclose(peer.state.inner["exp_avg"][ATTENTION], turn @ momentum, atol=1e-6)


# ---------------------------------------------------------------- training


def test_the_trainer_draws_the_first_bases_from_the_runs_seed() -> None:
    peer = trainer(replace(small(), seed=5))
    basis = peer.state.inner["basis"][ATTENTION]
    assert torch.equal(basis, lordo.drawn((16, 3), 5, ATTENTION, 0).float())


def test_the_state_is_the_live_optimizer_and_a_round_tells_its_size() -> None:
    peer = trainer(small(feedback="int8"))
    assert set(peer.state.inner) == {"step", "exp_avg", "exp_avg_sq", "basis", "feedback"}
    assert set(peer.state.inner["basis"]) == {name for name in peer.state.weights if ".c_" in name and "weight" in name}
    kept = [tensor for tensors in peer.state.inner.values() for tensor in tensors.values()]
    while not peer.round_is_over:
        peer.step()
    tally = peer.end_round()
    now = [tensor for tensors in peer.state.inner.values() for tensor in tensors.values()]
    assert all(one is other for one, other in zip(kept, now, strict=True))
    assert tally.optimizer_bytes == sum(tensor.numel() * tensor.element_size() for tensor in now)
    errors = [
        lordo.uncoded(code, lordo.upright(peer.state.weights[name]))
        for name, code in peer.state.inner["feedback"].items()
    ]
    assert tally.feedback == pytest.approx(float(torch.cat([error.flatten() for error in errors]).norm()))
    assert tally.feedback is not None
    assert tally.feedback > 0


def test_without_error_feedback_a_round_tells_of_none() -> None:
    for run in (small(), tiny()):
        peer = trainer(run)
        while not peer.round_is_over:
            peer.step()
        assert peer.end_round().feedback is None


@pytest.mark.parametrize("keys", [{}, {"feedback": "int8", "projection": "svd"}, {"projection": "random"}], ids=str)
@pytest.mark.parametrize("cut", [0, 2, 3, 7])
def test_a_checkpoint_continues_exactly(keys: dict[str, Any], cut: int, tmp_path: Path) -> None:
    run = small(**keys)
    straight, first = trainer(run), trainer(run)
    for peer in (straight, first):
        for _ in range(cut):
            peer.step()
            if peer.round_is_over:
                peer.end_round()
    checkpoint.save(tmp_path, first.state, run.run_id)
    loaded = checkpoint.load(tmp_path, run.run_id)
    assert loaded is not None
    second = trainer(run)
    second.adopt(loaded.state)
    second._losses = list(first._losses)  # steps of the round so far: a checkpoint in mid-round restarts the round
    for peer in (straight, second):
        while peer.round < 3:
            peer.step()
            if peer.round_is_over:
                peer.end_round()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(second).values(), strict=True))
    for slot, tensors in straight.state.inner.items():
        assert all(torch.equal(tensor, second.state.inner[slot][name]) for name, tensor in tensors.items())


def test_a_checkpoint_of_an_adamw_run_has_no_low_rank_slots_and_continues(tmp_path: Path) -> None:
    run = tiny()
    peer = trainer(run)
    one_round(peer)
    checkpoint.save(tmp_path, peer.state, run.run_id)
    loaded = checkpoint.load(tmp_path, run.run_id)
    assert loaded is not None
    assert set(loaded.state.inner) == {"step", "exp_avg", "exp_avg_sq"}
    again = trainer(run)
    again.adopt(loaded.state)
    assert one_round(again) == one_round(peer)


def test_what_a_donor_does_not_hand_over_begins_anew() -> None:
    run = small(feedback="int8")
    donor, newcomer = trainer(run), trainer(run)
    one_round(donor)
    one_round(newcomer)
    handed = {
        slot: {name: tensor.clone() for name, tensor in tensors.items() if name in donor.state.inner["basis"]}
        for slot, tensors in donor.state.inner.items()
        if slot != "feedback"
    }
    newcomer.adopt(replace(donor.state, inner=handed))
    for slot, tensors in handed.items():
        assert all(torch.equal(tensor, newcomer.state.inner[slot][name]) for name, tensor in tensors.items())
    assert not newcomer.state.inner["exp_avg"]["transformer.wte.weight"].any()
    assert int(newcomer.state.inner["step"]["transformer.wte.weight"]) == 0
    assert not newcomer.state.inner["feedback"][ATTENTION].any()
    assert one_round(newcomer) > 0


# ---------------------------------------------------------------- in a swarm


async def test_peers_of_a_low_rank_run_train_and_meet(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, low_rank(tiny_run(rounds=60), rank=4))
    for name in ("ann", "ben"):
        swarm.join(name)
    ends = await swarm.end()
    assert {stop.reason for stop in ends.values()} == {"finished"}
    for name in ("ann", "ben"):
        rounds = swarm.events(name, "round")
        assert rounds[-1]["loss"] < math.log(257) - 1  # a model that knows nothing is at the logarithm
        assert len({event["optimizer_bytes"] for event in rounds}) == 1
        assert swarm.events(name, "meeting")


async def test_a_newcomer_gets_the_low_rank_memory_and_none_of_adamws(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, low_rank(tiny_run(rounds=4000), rank=4, feedback="int8"))
    swarm.join("ann")
    await swarm.until(lambda: len(swarm.events("ann", "round")) >= 2)
    swarm.join("ben")
    await swarm.until(lambda: bool(swarm.events("ben", "round")))
    snapshot = swarm.stay("ann").donor._snapshot
    assert snapshot is not None
    assert swarm.events("ben", "start")[0]["how"] == "caught-up"
    shapes = {entry.name: tuple(entry.shape) for entry in snapshot.header.tensors if entry.name.startswith("inner/")}
    assert shapes[f"inner/exp_avg/{ATTENTION}"] == (4, 48)
    assert shapes[f"inner/basis/{ATTENTION}"] == (16, 4)
    assert shapes[f"inner/step/{ATTENTION}"] == ()
    assert not any("wte" in name or "feedback" in name for name in shapes)
    await swarm.stop()
    loaded = checkpoint.load(tmp_path / "ben", swarm.run.run_id)
    assert loaded is not None
    steps, mine = loaded.state.inner["step"], loaded.state.step
    given = dict(zip([entry.name for entry in snapshot.header.tensors], snapshot.tensors, strict=True))
    assert int(steps[ATTENTION]) == int(given[f"inner/step/{ATTENTION}"]) + mine
    assert int(steps["transformer.wte.weight"]) == mine


def _unheard(_: str) -> None:
    """Take what a newcomer tells its user."""


class Donating:
    """A donor on a network of its own, with a state that may be tampered with; how it is fetched from it."""

    def __init__(self, run: Manifest, state: State, folder: Path) -> None:
        self.run, self.state, self.folder = run, state, folder
        self.boundary, self.hub = Boundary(), Hub()
        self.donor = Donor(run, self.boundary)

    async def fetched(self) -> State | None:
        async def serve(stream: Stream) -> None:
            message = await stream.receive(10)
            assert isinstance(message, Message)
            await self.donor.serve(stream, message.state_request)

        async def train() -> None:
            while True:
                self.boundary.serve(self.state)
                await asyncio.sleep(0.001)

        ann, ben = MemoryNetwork(self.hub, "ann"), MemoryNetwork(self.hub, "ben")
        await ann.start(serve)
        await ben.start(serve)
        training = asyncio.create_task(train())
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.anchor.items()}
        newcomer = Newcomer(ben, self.run, shapes, "ben", EventLog(self.folder / "log"), _unheard)
        try:
            found = await newcomer.fetch([Member(self.run.run_id, "ann", ("ann:1",), 1, 0, 0.0)], 0, None)
            return None if found is None else found[0]
        finally:
            training.cancel()
            await ann.close()
            await ben.close()


async def test_what_is_fetched_is_the_donors_memory_to_the_bit(tmp_path: Path) -> None:
    run = small()
    peer = trainer(run)
    one_round(peer)
    state = await Donating(run, peer.state, tmp_path).fetched()
    assert state is not None
    assert set(state.inner) == {"step", "exp_avg", "exp_avg_sq", "basis"}
    for slot, tensors in state.inner.items():
        assert set(tensors) == set(peer.state.inner["basis"])
        assert all(torch.equal(tensor, peer.state.inner[slot][name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("slot", "factor", "words"),
    [
        ("basis", 1.1, f"the basis of {ATTENTION} is not orthonormal"),
        ("exp_avg_sq", -1.0, f"exp_avg_sq of {ATTENTION} is negative"),
        ("step", -1.0, f"step of {ATTENTION} is negative"),
    ],
)
async def test_a_memory_that_training_cannot_have_left_is_refused(
    slot: str, factor: float, words: str, tmp_path: Path
) -> None:
    run = small()
    peer = trainer(run)
    one_round(peer)
    peer.state.inner[slot][ATTENTION] *= factor
    donating = Donating(run, peer.state, tmp_path)
    assert await donating.fetched() is None
    assert words in list(tail.read(tmp_path / "log"))[-1]["detail"]


def test_every_memory_that_training_leaves_is_taken() -> None:
    peer = trainer(low_rank(tiny(), rank=1000))
    assert flaw_of(peer.state.inner) is None
    for _ in range(3):
        one_round(peer)
        assert flaw_of(peer.state.inner) is None


@pytest.mark.parametrize(("written", "asked"), [("adamw", "lordo"), ("lordo", "adamw")])
def test_join_refuses_another_optimizer_than_the_runs_file_has(written: str, asked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'model = "gpt-nano"\n[inner]\noptimizer = "{written}"')
    config = Config(home=tmp_path / "home", run=run, model="", inner=asked)
    with pytest.raises(ConfigError, match=f"trains with {written}, not {asked}; leave --inner out"):
        main(config, say=pytest.fail, echo=lambda record: None)


def test_rules_are_what_the_manifest_says() -> None:
    inner = Inner(optimizer="lordo", lr=0.1, rank=7, omega=0.3, mu="scalar", projection="svd", feedback="int8")
    assert inner.rule == Rule(
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        rank=7,
        omega=0.3,
        mu="scalar",
        projection="svd",
        feedback="int8",
    )
