"""Settings become experiments, a TOML file becomes a grid of them, and what is wrong is said in a sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from peer.core import stability
from peer.core.gossip import Form, Outer
from peer.errors import ConfigError
from peer.lab.algorithms import ALGORITHMS
from peer.lab.experiment import Experiment
from peer.lab.grid import Grid, folder_name
from peer.lab.links import Links
from peer.lab.settings import experiment, settled
from peer.manifest import Manifest

ROOT = Path(__file__).parents[2]
HERE = Path("/somewhere")
NANO = Manifest.preset("gpt-nano")


def make(base: Path = HERE, seed: int | None = 0, /, **table: Any) -> Experiment:
    return experiment("it", seed, settled(table, base))


def grid(text: str, base: Path = HERE) -> Grid:
    return Grid.of(tomllib.loads(text), base)


# ---------------------------------------------------------------- one experiment


def test_nothing_said_is_the_daemons_algorithm_on_the_smallest_preset() -> None:
    it = make()
    assert (it.algorithm, it.peers, it.run) == ("gasloc", 8, NANO)


def test_sections_lie_over_the_presets_key_by_key() -> None:
    run = make(exchange={"codec": "none"}, inner={"lr": 0.5}, data={"batch": 2}).run
    assert (run.exchange.codec, run.exchange.meetings) == ("none", NANO.exchange.meetings)
    assert (run.inner.lr, run.inner.clip) == (0.5, NANO.inner.clip)
    assert (run.data.batch, run.data.sequence_length) == (2, NANO.data.sequence_length)


def test_a_shorter_run_has_a_shorter_warm_up_and_decay_in_proportion() -> None:
    schedule = make(rounds=NANO.rounds // 2).run.schedule
    assert schedule.warmup_rounds == NANO.schedule.warmup_rounds / 2
    big = Manifest.preset("gpt-10m")
    schedule = make(model="gpt-10m", rounds=big.rounds // 4, local_steps=1).run.schedule
    assert schedule.decay_rounds == big.schedule.decay_rounds / 4


def test_a_schedule_that_is_given_stays_as_it_is() -> None:
    schedule = make(rounds=NANO.rounds // 2, schedule={"warmup_rounds": 3}).run.schedule
    assert schedule.warmup_rounds == 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_brings_its_outer_constants(name: str) -> None:
    assert make(algorithm=name).run.outer == ALGORITHMS[name].outer


def test_outer_constants_that_are_given_go_over_the_algorithms() -> None:
    assert make(algorithm="diloco", outer={"gamma": 0.8}).run.outer == Outer(eta=0.7, gamma=0.8)
    assert make(outer={"form": "mixed", "alpha": 0.25}).run.outer == Outer(Form.MIXED, alpha=0.25)


@pytest.mark.parametrize("name", ["ddp", "lordo-ddp", "pair-average"])
def test_an_algorithm_without_outer_step_takes_no_constants_of_one(name: str) -> None:
    assert make(algorithm=name, outer={"eta": 0.7, "gamma": 0.65}).run.outer == Outer(eta=1.0, gamma=0.0)


def test_outer_constants_that_no_daemon_takes_are_kept() -> None:
    outer = make(algorithm="gasloc-plain", outer={"alpha": 1.0, "gamma": 0.9}).run.outer
    assert not stability.check(outer)
    assert (outer.alpha, outer.gamma) == (1.0, 0.9)


def test_there_is_a_shard_for_every_peer() -> None:
    assert make(peers=100).run.data.shards == 100
    assert make(peers=2).run.data.shards == NANO.data.shards


def test_a_config_is_laid_over_the_models_before_anything_is_checked() -> None:
    longer = 2 * NANO.config["n_positions"]
    run = make(config={"n_layer": 1, "n_positions": longer}, data={"sequence_length": longer}).run
    assert run.config == NANO.config | {"n_layer": 1, "n_positions": longer}
    assert run.data.sequence_length == longer


def test_a_manifest_in_place_of_a_preset_says_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'model = "gpt-nano"\nseed = 7\nrounds = 20\nround_seconds = 5.0\n'
        "[outer]\ngamma = 0.3\n[schedule]\nwarmup_rounds = 4\n[data]\nbatch = 3\n"
    )
    it = make(tmp_path, None, run="run.toml", rounds=10, local_steps=5)
    assert (it.run.seed, it.run.rounds, it.run.local_steps, it.run.round_seconds) == (7, 10, 5, None)
    assert (it.run.data.batch, it.run.schedule.warmup_rounds, it.run.outer.gamma) == (3, 2.0, 0.3)
    assert make(tmp_path, 1, run="run.toml", local_steps=5).run.seed == 1
    # DiLoCo is DiLoCo, whatever the daemons of that run do.
    assert make(tmp_path, run="run.toml", local_steps=5, algorithm="diloco").run.outer == ALGORITHMS["diloco"].outer


def test_another_inner_optimizer_drops_what_the_manifest_says_of_lordo_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt-nano"\n[inner]\noptimizer = "lordo"\nrank = 3\nlr = 0.5\n')
    assert make(tmp_path, run="run.toml").run.inner.rank == 3
    inner = make(tmp_path, run="run.toml", inner={"optimizer": "adamw"}).run.inner
    assert (inner.optimizer, inner.rank, inner.lr) == ("adamw", NANO.inner.rank, 0.5)


def test_relative_paths_start_from_the_base(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "gpt-nano").mkdir()  # a preset's name stays one
    found = settled(
        {"links": "l.toml", "churn": "c.txt", "data": {"corpus": "texts"}, "model": "tiny", "run": "r.toml"}, tmp_path
    )
    assert found == {
        "links": str(tmp_path / "l.toml"),
        "churn": str(tmp_path / "c.txt"),
        "data": {"corpus": str(tmp_path / "texts")},
        "model": str(tmp_path / "tiny"),
        "run": str(tmp_path / "r.toml"),
    }
    assert settled({"model": "gpt-nano", "data": {"corpus": "moby-dick"}}, tmp_path) == {
        "model": "gpt-nano",
        "data": {"corpus": "moby-dick"},
    }


def test_settings_are_plain_and_settle_to_themselves(tmp_path: Path) -> None:
    once = settled({"links": "l.toml", "churn": 0.05, "graph": "ring", "outer": {"form": "mixed"}}, tmp_path)
    assert settled(once, Path("/elsewhere")) == once
    assert once["churn"] == "0.05"


def test_measurements_are_ten_or_one_for_each_round() -> None:
    assert make(rounds=40).evaluations == 10
    assert make(rounds=3).evaluations == 3
    assert make(rounds=40, evaluations=2).evaluations == 2


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"pears": 8}, "unknown key 'pears'; did you mean 'peers'"),
        ({"peers": 0}, "peers is 0; give a number from 1"),
        ({"peers": "8"}, "'peers' is \"8\"; give a whole number"),
        ({"seed": 1}, r"write seeds = \[0, 1, 2\] above the first table"),
        ({"meetings": 2}, "'meetings' stands in a section; write exchange = { meetings = ... }"),
        ({"optimizer": "lordo"}, "write inner = { optimizer = ... }"),
        ({"algorithm": "lordo", "inner": {"optimizer": "adamw"}}, "'lordo' trains by lordo; leave out .* adamw"),
        ({"graph": "rung"}, 'did you mean "ring"'),
        ({"algorithm": "diloko"}, "unknown algorithm 'diloko'; did you mean 'diloco'"),
        ({"exchange": {"meeting": 4}}, r"unknown key 'meeting' in \[exchange\]; did you mean 'meetings'"),
        ({"exchange": 4}, "'exchange' is a table; write exchange = "),
        ({"exchange": {"codec": "ranks"}}, "rank"),
        ({"outer": {"gama": 1}}, r"unknown key 'gama' in \[outer\]; did you mean 'gamma'"),
        ({"config": {"n_layers": 1}}, "unknown key 'n_layers' in config; did you mean 'n_layer'"),
        ({"config": {"n_layer": "one"}}, "'n_layer' in config is \"one\"; give a whole number"),
        ({"churn": True}, "'churn' is a number"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": 2, "evaluations": 3}, "evaluations is 3; give a number from 1 to 2"),
        ({"model": "gpt-10m"}, "give local_steps in place of round_seconds"),
        ({"model": "gpt-nan"}, "did you mean 'gpt-nano'"),
        ({"model": "gpt-nano", "run": "r.toml"}, "leave model out, or run"),
        ({"run": "r.toml"}, "cannot read '/somewhere/r.toml'"),
    ],
    ids=str,
)
def test_settings_that_can_not_be_are_refused_with_what_to_do(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(**table)


def test_the_links_of_the_benchmarks_are_a_file_of_links() -> None:
    lines = Links.load(ROOT / "benchmarks" / "links.toml", 8).peers
    assert len(set(lines)) == 4
    assert all(line.up_mbit < line.down_mbit for line in lines)


# ---------------------------------------------------------------- a grid


def test_common_keys_hold_for_every_run_and_its_own_go_over_them() -> None:
    found = grid("""
        seeds = [3, 5]
        [common]
        peers = 2
        rounds = 4
        exchange = { meetings = 1, codec = "none" }
        [[run]]
        label = "a"
        [[run]]
        label = "b"
        peers = 6
        exchange = { codec = "int4" }
    """)
    assert [(cell.label, cell.seed) for cell in found.cells] == [("a", 3), ("a", 5), ("b", 3), ("b", 5)]
    assert (found.labels, found.reference, found.seeds) == (("a", "b"), "a", (3, 5))
    assert [cell.experiment.peers for cell in found.cells] == [2, 2, 6, 6]
    assert {cell.experiment.run.rounds for cell in found.cells} == {4}
    exchanges = [cell.experiment.run.exchange for cell in found.cells[::2]]
    assert [(exchange.meetings, exchange.codec) for exchange in exchanges] == [(1, "none"), (1, "int4")]


def test_what_a_run_varies_gives_a_run_of_each_combination_named_after_its_values() -> None:
    found = grid("""
        reference = "b"
        [common]
        rounds = 4
        [[run]]
        label = "a"
        outer = { gamma = 0.1, eta = 0.9 }
        vary = { "exchange.codec" = ["none", "int4"], "outer.gamma" = [0.5, 0.7], spread = [false] }
        [[run]]
        label = "b"
    """)
    assert [(cell.label, cell.experiment.run.exchange.codec, cell.experiment.run.outer) for cell in found.cells] == [
        ("a, codec none, gamma 0.5, spread false", "none", Outer(eta=0.9, gamma=0.5)),
        ("a, codec none, gamma 0.7, spread false", "none", Outer(eta=0.9, gamma=0.7)),
        ("a, codec int4, gamma 0.5, spread false", "int4", Outer(eta=0.9, gamma=0.5)),
        ("a, codec int4, gamma 0.7, spread false", "int4", Outer(eta=0.9, gamma=0.7)),
        ("b", NANO.exchange.codec, Outer()),
    ]
    assert [cell.experiment.spread for cell in found.cells] == [False] * 4 + [True]
    assert found.reference == "b"
    assert set(found.references.values()) == {"b"}


def test_some_labels_and_seeds_can_be_chosen_and_unknown_ones_are_named() -> None:
    found = grid('seeds = [0, 1]\n[[run]]\nlabel = "first"\n[[run]]\nlabel = "second"')
    assert [(cell.label, cell.seed) for cell in found.chosen(["second"], [1])] == [("second", 1)]
    assert len(found.chosen()) == 4
    with pytest.raises(ConfigError, match="there is no run 'secnd'; did you mean 'second'"):
        found.chosen(["secnd"])
    with pytest.raises(ConfigError, match=r"seed 7 is none of the grid's \[0, 1\]"):
        found.chosen(seeds=[7])


def test_the_folder_of_a_label_has_nothing_that_leads_elsewhere() -> None:
    assert folder_name("4 × rank 4, γ = 0.5") == "4-rank-4-γ-=-0.5"
    assert folder_name("../../etc/passwd") == "etc-passwd"
    assert folder_name("..") == ""


RUN = '[[run]]\nlabel = "a"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "there is nothing to run"),
        ("sedes = [1]\n" + RUN, "unknown key 'sedes'; did you mean 'seeds'"),
        ("seeds = 1\n" + RUN, "seeds is 1; give a list of different whole numbers"),
        ("seeds = []\n" + RUN, r"seeds is \[\]"),
        ("seeds = [1, 1]\n" + RUN, r"seeds is \[1, 1\]"),
        ("seeds = [-1]\n" + RUN, r"seeds is \[-1\]"),
        ("seeds = [true]\n" + RUN, r"seeds is \[True\]"),
        ("common = 1\n" + RUN, r"'common' is a table; write \[common\]"),
        ("run = 1", r"'run' is a list of tables; write \[\[run\]\]"),
        ("[run]", r"'run' is a list of tables; write \[\[run\]\]"),
        ("[[run]]\npeers = 2", r"\[\[run\]\] number 1 has no label"),
        (RUN + "[[run]]\nlabel = 3", r"\[\[run\]\] number 2 has no label"),
        ('[common]\nlabel = "x"\n' + RUN, r"give each \[\[run\]\] one of its own"),
        (RUN + RUN, "there is label 'a' twice"),
        (RUN + '[[run]]\nlabel = "A "', "there is label 'A ' and 'a', which name the same folder"),
        ('[[run]]\nlabel = "!"', "label '!' can't name a folder"),
        (RUN + '\nreference = "b"', "reference is 'b', which is no run's label; did you mean 'a'"),
        ('reference = "b"\n' + RUN, "reference is 'b', which is no run's label; did you mean 'a'"),
        (RUN + "pears = 2", "run 'a': unknown key 'pears'; did you mean 'peers'"),
        (RUN + "data = { btch = 2 }", r"run 'a': unknown key 'btch' in \[data\]"),
        (RUN + "vary = 1", "run 'a': 'vary' is a table of lists"),
        (RUN + "vary = { seed = [3] }", r"run 'a': seeds are not varied; write seeds = \[0, 1, 2\]"),
        (RUN + "vary = { peers = 4 }", "run 'a': 'vary' is a table of lists"),
        (RUN + "vary = { peers = [] }", "run 'a': 'vary' is a table of lists"),
        (RUN + 'vary = { "exchagne.codec" = ["none"] }', "run 'a': unknown key 'exchagne.codec' in vary"),
        (RUN + 'vary = { "peers.x" = [1] }', "run 'a': unknown key 'peers.x' in vary; did you mean 'peers'"),
        (RUN + 'vary = { "exchange.codek" = ["none"] }', r"run 'a, codek none': unknown key 'codek' in \[exchange\]"),
        (RUN + "vary = { peers = [2, 2] }", "there is label 'a, peers 2' twice"),
    ],
)
def test_a_damaged_grid_is_refused_with_what_to_do(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        grid(text)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[[run]\n")
    with pytest.raises(ConfigError, match=r"grid '.*grid\.toml': not TOML"):
        Grid.load(path)
    path.write_text(RUN + 'links = "lines.toml"')
    assert Grid.load(path).cells[0].experiment.links == tmp_path / "lines.toml"
