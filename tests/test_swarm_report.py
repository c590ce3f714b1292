"""What `peer swarm` makes of its daemons' events and weights."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.nn import functional

from peer.cli.rows import WIDTH, Progress, outcome, progress, size, summary
from peer.core.state import Tensors
from peer.errors import ConfigError
from peer.events import CatchUp, Event, Meeting, Round, Skip, Start, Stop, record
from peer.heldout import Assessment, Spread, Survey, assess, mean_loss
from peer.manifest import Manifest
from peer.models import causal
from peer.swarm import plan
from peer.swarm_report import Report, Row, number_of

START = Start("me", "run", "n", "gpt-nano", 1, "cpu", "float32", 0, 200, "fresh", (), (), 1, "0")
FINISHED = Stop(10, "finished", "at round 10 of 10")


def a_round(number: int, loss: float, sent: int) -> Round:
    return Round(number, 25, loss, 1e-3, 25600, 5.0, 1.0, 3, 4, 0, 0, sent, sent, "you", 0.1, 8, 9, None)


def a_meeting(role: str, sent: int = 100) -> Meeting:
    return Meeting("you", role, 1, 1, "rank4-int8", 5000, 0.5, sent, sent, 0.2, 0.1, None, 1.0)


def row_of(*events: Event, number: int = 1) -> Row:
    row = Row(number)
    for event in events:
        row.take(record(event, 0.0))
    return row


# ---------------------------------------------------------------- rows


def test_a_row_tells_the_first_and_the_latest_round() -> None:
    row = row_of(START, a_round(1, 5.5, 1000), a_round(2, 4.0, 2500), a_round(3, 3.25, 3000))
    assert (row.stage, row.peer_id, row.how) == ("training", "me", "fresh")
    assert (row.round, row.rounds, row.first_loss, row.loss) == (3, 3, 5.5, 3.25)
    assert row.rate == 25600 / 5.0
    assert row.sent_per_round == 1000


def test_a_newcomer_counts_only_the_rounds_that_it_took() -> None:
    row = row_of(CatchUp("you", 7, 10, 0.1), a_round(8, 2.0, 600))
    assert (row.round, row.rounds, row.sent_per_round) == (8, 1, 600)


def test_a_loss_that_is_not_finite_is_no_loss() -> None:
    row = row_of(START, a_round(1, math.nan, 0), a_round(2, 4.0, 0))
    assert (row.first_loss, row.loss) == (None, 4.0)


def test_bytes_of_meetings_show_before_the_round_ends_and_are_not_counted_twice() -> None:
    row = row_of(START, a_meeting("caller", 300))
    assert row.bytes_sent == 300
    row.take(record(a_round(1, 5.0, 320), 0.0))
    assert row.bytes_sent == 320


def test_reasons_are_counted_apart_and_what_names_no_partner_is_no_meeting() -> None:
    row = row_of(
        Skip("you", "declined", "busy", ""),
        Skip("you", "declined", "busy", ""),
        Skip("you", "failed", "lost", ""),
        Skip(None, "declined", "alone", ""),
    )
    assert (row.declined, row.failed) == (Counter(busy=2), Counter(lost=1))


def test_events_of_a_later_version_are_passed_over() -> None:
    row = row_of(START)
    row.take({"time": "", "event": "eclipse"})
    assert row == row_of(START)


@pytest.mark.parametrize(
    ("events", "status", "asked", "stage", "why"),
    [
        ([START, FINISHED], 0, False, "done", ""),
        ([START, FINISHED], 0, True, "done", ""),
        ([START, Stop(3, "signal", "")], 0, True, "stopped", ""),
        ([], -signal.SIGTERM, True, "stopped", ""),
        ([], -signal.SIGTERM, False, "failed", "it was killed by SIGTERM"),
        ([START], -signal.SIGKILL, False, "failed", "it was killed by SIGKILL"),
        ([START], -signal.SIGKILL, True, "failed", "it was killed by SIGKILL"),
        ([START], 0, False, "failed", "it ended with exit status 0 and did not say why"),
        ([START, FINISHED], 1, False, "failed", "it ended with exit status 1 and did not say why"),
        ([START, Stop(3, "error", "the disk is gone")], 1, False, "failed", "the disk is gone"),
    ],
)
def test_only_a_peer_that_finished_and_exits_with_0_is_done(
    events: list[Event], status: int, asked: bool, stage: str, why: str
) -> None:
    row = row_of(*events)
    row.end(status, asked)
    assert (row.stage, row.why, row.ended) == (stage, why, True)


def test_partners_are_told_by_their_number() -> None:
    rows = [row_of(START, number=1), Row(2)]
    assert (number_of("me", rows), number_of("you", rows), number_of(None, rows)) == (1, None, None)


# ---------------------------------------------------------------- the report


def a_report() -> Report:
    one = row_of(START, a_meeting("caller"), a_meeting("callee"), a_round(1, 5.0, 500), a_round(2, 4.0, 900), FINISHED)
    two = row_of(
        START, a_meeting("callee"), a_meeting("caller"), a_meeting("caller"), a_round(1, 5.0, 150), FINISHED, number=2
    )
    one.take(record(Skip("you", "declined", "busy", ""), 0.0))
    two.take(record(Skip("me", "failed", "lost", ""), 0.0))
    two.take(record(Skip("me", "failed", "busy", ""), 0.0))
    silent = Row(3)
    one.end(0)
    two.end(0)
    silent.end(-9)
    return Report(2, (one, two, silent), Assessment(5.5, (2.0, math.nan, None), 1.9, 0.01), 12.34, ("peer 3 failed",))


def test_a_report_is_one_json_object() -> None:
    assert json.loads(json.dumps(a_report().record(), allow_nan=False)) == {
        "peers": 3,
        "rounds": 2,
        "heldout_start": 5.5,
        "heldout_end": [2.0, None, None],
        "heldout_average_end": 1.9,
        "meetings": 3,  # each has one caller
        "skipped": {"busy": 2, "lost": 1},
        "bytes_sent_per_round": 300,  # of 450 and 150; the third took no round
        "disagreement": 0.01,
        "wall_s": 12.3,
    }


def test_a_swarm_of_which_nothing_is_left_still_makes_a_report() -> None:
    report = Report(2, (Row(1),), Assessment(5.5, (None,), None, None), 1.0).record()
    assert (report["bytes_sent_per_round"], report["heldout_average_end"], report["disagreement"]) == (None, None, None)


def test_all_is_well_only_if_every_peer_is_done_and_nothing_failed() -> None:
    done, stopped = row_of(START, FINISHED), row_of(START, Stop(1, "signal", ""))
    done.end(0)
    stopped.end(0)
    found = Assessment(5.5, (None,), None, None)
    assert Report(2, (done, done), found, 1.0).well
    assert not Report(2, (done, stopped), found, 1.0).well
    assert not Report(2, (done, done), found, 1.0, ("the bootstrap node ended before the peers did",)).well


# ---------------------------------------------------------------- weights


def models(seed: int, count: int, apart: float) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    base = {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator)}
    return [
        {name: tensor + apart * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
        for _ in range(count)
    ]


@given(seed=st.integers(0, 999), count=st.integers(1, 6), apart=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]))
def test_one_model_at_a_time_gives_the_mean_and_the_distance_from_it(seed: int, count: int, apart: float) -> None:
    weights = models(seed, count, apart)
    spread = Spread()
    for each in weights:
        spread.add(each)
    rows = torch.stack([torch.cat([tensor.flatten() for tensor in each.values()]) for each in weights]).double()
    mean = rows.mean(0)
    found = torch.cat([tensor.flatten() for tensor in spread.mean.values()]).double()
    assert torch.allclose(found, mean, rtol=0, atol=1e-6)
    expected = (rows - mean).square().sum(1).mean().sqrt() / mean.norm()
    assert spread.disagreement == pytest.approx(float(expected), rel=1e-3, abs=1e-7)


def test_without_a_model_there_is_no_disagreement_and_nothing_that_was_given_changes() -> None:
    assert Spread().disagreement is None
    weights = models(0, 2, 1.0)
    before = [{name: tensor.clone() for name, tensor in each.items()} for each in weights]
    spread = Spread()
    for each in weights:
        spread.add(each)
    for mine, old in zip(weights, before, strict=True):
        assert all(torch.equal(mine[name], old[name]) for name in old)


def test_the_mean_loss_is_over_all_tokens_also_when_the_last_batch_is_short() -> None:
    run = plan("gpt-nano", 2)
    model = causal.build(run.config, 1).eval()
    windows = np.random.default_rng(0).integers(0, 256, (5, 17))
    tokens = torch.from_numpy(windows)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    found = mean_loss(model, [windows[:4], windows[4:]], torch.device("cpu"))
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_models_that_are_the_same_are_judged_once() -> None:
    run = plan("gpt-nano", 2)
    window = np.random.default_rng(0).integers(0, 256, (1, 17))
    model, forwards = causal.build(run.config, 0), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    one, other = (
        {name: each.detach() for name, each in causal.build(run.config, n).named_parameters()} for n in (1, 2)
    )
    survey = Survey(model, [window], torch.device("cpu"))
    losses = [survey.add(weights) for weights in (one, dict(one), other, one)]
    assert losses[0] == losses[1] == losses[3] != losses[2]
    assert len(forwards) == 3


def test_peers_and_their_average_are_judged_by_the_same_tokens() -> None:
    run = plan("gpt-nano", 2)
    heldout = np.random.default_rng(0).integers(0, 256, 1025, dtype=np.uint16)
    first = {name: weight.detach() for name, weight in causal.build(run.config, run.seed).named_parameters()}
    other = {name: weight.detach() for name, weight in causal.build(run.config, 7).named_parameters()}
    mean = {name: (first[name] + other[name]) / 2 for name in first}
    both = assess(run, heldout, [first, None, other])
    alone = assess(run, heldout, [mean])
    assert both.peers[0] == both.start
    assert both.peers[1] is None
    assert both.average == pytest.approx(alone.peers[0], abs=1e-5)
    assert alone.disagreement == 0.0
    nobody = assess(run, heldout, [None])
    assert (nobody.start, nobody.average, nobody.disagreement) == (both.start, None, None)


# ---------------------------------------------------------------- the plan


def test_a_plan_is_the_preset_but_for_what_is_given() -> None:
    preset = Manifest.preset("gpt-nano")
    run = plan("gpt-nano", 4, rounds=3, codec="int4", seed=9)
    assert (run.rounds, run.exchange.codec, run.seed) == (3, "int4", 9)
    assert (run.inner, run.outer, run.local_steps) == (preset.inner, preset.outer, preset.local_steps)
    assert run.run_id != preset.run_id
    assert Manifest.parse(run.to_toml()).run_id == run.run_id


def test_data_means_the_same_to_every_daemon_and_each_finds_a_shard(tmp_path: Path) -> None:
    assert plan("gpt-nano", 4).data.corpus == "moby-dick"
    assert plan("gpt-nano", 4, data="moby-dick").data.corpus == "moby-dick"
    assert plan("gpt-nano", 4, data="some/*.txt").data.corpus == os.path.join(os.getcwd(), "some/*.txt")
    assert plan("gpt-nano", 100).data.shards == 100


def test_a_swarm_can_train_with_another_inner_optimizer() -> None:
    assert plan("gpt-nano", 4, inner="lordo").inner == Manifest.preset("gpt-nano").trained_by("lordo").inner
    assert plan("gpt-nano", 4, inner="adamw") == plan("gpt-nano", 4)


def test_a_manifest_may_be_tried_out_before_others_join(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "gpt-nano"\nname = "ours"\nrounds = 7\nseed = 5\n[exchange]\ncodec = "int4"\n')
    run = plan("", 2, file=file)
    assert (run.name, run.rounds, run.seed, run.exchange.codec) == ("swarm-ours", 7, 5, "int4")
    assert plan("", 2, rounds=2, seed=1, file=file).seed == 1
    with pytest.raises(ConfigError, match="is for model 'gpt-nano', not 'gpt-10m'"):
        plan("gpt-10m", 2, file=file)


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"peers": 0}, "peers is 0"),
        ({"peers": 4, "rounds": 0}, "rounds is 0"),
        ({"peers": 4, "codec": "rank0"}, "'rank0'"),
        ({"peers": 4, "seed": -1}, "seed is -1"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(wish: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan("gpt-nano", **wish)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the leash


@pytest.mark.slow
def test_a_process_on_a_leash_ends_with_the_one_that_holds_it() -> None:
    code = "from peer import leash; import signal; leash.hold(); print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGTERM


# ---------------------------------------------------------------- how it looks


def text_of(shown: object) -> list[list[str]]:
    """Return what rich makes of something, as words a line."""
    console = Console(width=WIDTH, file=io.StringIO())
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_progress_is_one_line_for_each_peer() -> None:
    rows = [row_of(replace(START, peer_id="you"), a_meeting("caller", 1500)), Row(2)]
    lines = text_of(progress(rows, 10))
    assert lines[0] == ["peer", "state", "round", "loss", "partner", "meetings", "sent", "tokens/s"]
    assert lines[1:] == [
        ["1", "training", "0/10", "-", "1", "1", "1.5", "kB", "-"],
        ["2", "waiting", "0/10", "-", "-", "0", "0", "B", "-"],
    ]


def test_without_a_terminal_progress_is_a_line_for_each_round() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    row = row_of(START)
    with Progress(console, 10) as shown:
        for _ in range(3):
            shown.show([row])
        row.take(record(a_round(1, 5.25, 2_500_000), 0.0))
        for _ in range(3):
            shown.show([row, Row(2)])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "peer 1 training (fresh) from round 0",
        "peer 1 training: round 1/10, loss 5.250, partner you, 0 meetings, 2.5 MB sent, 5,120 tokens/s",
    ]


def test_the_outcome_tells_of_each_peer_of_the_average_and_of_the_start() -> None:
    lines = text_of(outcome(a_report()))
    assert lines[1:4] == [
        ["1", "2", "5.000", "→", "4.000", "2.000", "2", "1", "(busy", "1)", "0", "450", "B"],
        ["2", "1", "5.000", "→", "5.000", "nan", "3", "0", "2", "(lost", "1,", "busy", "1)", "150", "B"],
        ["3", "0", "-", "→", "-", "-", "0", "0", "0", "-"],
    ]
    assert lines[-2:] == [["average", "1.900"], ["at", "start", "5.500"]]
    assert "3 meetings" in summary(a_report())
    assert "1.00 % apart" in summary(a_report())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_345_678, "2.3 MB"), (5e12, "5000.0 GB")]
)
def test_bytes_have_a_unit(count: float, text: str) -> None:
    assert size(count) == text


def test_a_shorter_swarm_has_a_shorter_warm_up_and_decay() -> None:
    whole, short = plan("gpt-10m", 2), plan("gpt-10m", 2, rounds=1)
    for key in ("warmup_rounds", "decay_rounds"):
        assert getattr(short.schedule, key) == pytest.approx(getattr(whole.schedule, key) / whole.rounds)
