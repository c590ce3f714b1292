"""The run's manifest: presets, files, what is refused, and the run id."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.gossip import Form, Outer
from peer.core.schedule import Schedule
from peer.data import corpus
from peer.data.stream import Sequences
from peer.errors import ConfigError
from peer.inner import LORDO
from peer.manifest import SECTIONS, Data, Exchange, Inner, Manifest
from peer.models import presets, tokenizer

NANO = 'model = "gpt-nano"\n'


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "vocab_size": 50257,
        "max_position_embeddings": 96,
    } | changes


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# ------------------------------------------------------------------ presets


@pytest.mark.parametrize("model", presets.names())
def test_every_preset_is_a_complete_run_of_its_own_model(model: str) -> None:
    manifest = Manifest.preset(model)
    assert (manifest.version, manifest.name, manifest.model) == (1, model, model)
    assert manifest.config == presets.resolve(model)
    assert manifest.tokenizer == presets.tokenizer_for(model)
    assert manifest.outer == Outer(Form.OWN, 0.7, 0.65, 1.0)


def test_the_smallest_preset_counts_steps_and_the_others_time() -> None:
    paces = {model: Manifest.preset(model) for model in presets.names()}
    assert (paces["gpt-nano"].local_steps, paces["gpt-nano"].round_seconds) == (25, None)
    assert all(m.local_steps is None and m.round_seconds == 120 for name, m in paces.items() if name != "gpt-nano")


@pytest.mark.parametrize("words", ["bytes", "gpt2"])
def test_the_corpus_that_comes_along_is_enough_for_every_preset(words: str, tmp_path: Path) -> None:
    for manifest in map(Manifest.preset, presets.names()):
        if manifest.tokenizer == words:
            texts = corpus.load(manifest.data.corpus, tokenizer.load(words), tmp_path)
            Sequences(texts.train, manifest.data.sequence_length, manifest.data.shards, manifest.seed)


def test_presets_are_different_runs() -> None:
    assert len({Manifest.preset(model).run_id for model in presets.names()}) == len(presets.names())


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-125'.*'gpt-125m'"):
        Manifest.preset("gpt-125")


# ------------------------------------------------------------------ the run id


def test_the_run_id_is_the_hash_of_everything_but_where_the_model_came_from() -> None:
    manifest = Manifest.preset("gpt-nano")
    said = json.loads(manifest.canonical())
    assert manifest.run_id == hashlib.sha256(manifest.canonical().encode()).hexdigest()[:32]
    assert set(said) == {field.name for field in dataclasses.fields(Manifest)} - {"model"}
    for name, kind in SECTIONS.items():
        unused = LORDO if name == "inner" else ()
        assert set(said[name]) == {field.name for field in dataclasses.fields(kind)} - set(unused)


def test_the_keys_of_another_inner_optimizer_are_no_part_of_a_run() -> None:
    """So what is added to one leaves the ids of the other's runs, and with them their checkpoints, as they were."""
    manifest = Manifest.preset("gpt-nano")
    assert set(json.loads(manifest.canonical())["inner"]) == {
        *("optimizer", "lr", "beta1", "beta2", "epsilon", "weight_decay", "clip")
    }
    low_rank = manifest.trained_by("lordo")
    assert set(json.loads(low_rank.canonical())["inner"]) == {field.name for field in dataclasses.fields(Inner)}
    for key in LORDO:
        assert f"{key} = " not in manifest.to_toml()
        assert f"{key} = " in low_rank.to_toml()


CHANGES: list[dict[str, Any]] = [
    {"name": "other"},
    {"tokenizer": "gpt2"},
    {"seed": 1},
    {"rounds": 11},
    {"local_steps": 26},
    {"local_steps": None, "round_seconds": 2.0},
    {"config": presets.resolve("gpt-10m")},
    {"data": Data(corpus="other", shards=16, sequence_length=128, batch=8)},
    {"data": Data(shards=17, sequence_length=128, batch=8)},
    {"data": Data(shards=16, sequence_length=127, batch=8)},
    {"data": Data(shards=16, sequence_length=128, batch=9)},
    {"inner": Inner(lr=2.1e-3)},
    {"inner": Inner(lr=2e-3, beta1=0.8)},
    {"inner": Inner(lr=2e-3, beta2=0.9)},
    {"inner": Inner(lr=2e-3, epsilon=1e-7)},
    {"inner": Inner(lr=2e-3, weight_decay=0.0)},
    {"inner": Inner(lr=2e-3, clip=0.5)},
    {"inner": Inner(lr=2e-3, optimizer="lordo")},
    {"schedule": Schedule("constant", 1.5, 0.0, 0.1)},
    {"schedule": Schedule("cosine", 0.25, 0.0, 0.1)},
    {"schedule": Schedule("cosine", 1.5, 1.0, 0.1)},
    {"schedule": Schedule("cosine", 1.5, 0.0, 0.2)},
    {"outer": Outer(Form.MIXED, 1.0, 0.7, 0.5)},
    {"outer": Outer(eta=0.6)},
    {"outer": Outer(gamma=0.5)},
    {"outer": Outer(alpha=0.5)},
    {"exchange": Exchange(5, "rank4-int8", 4)},
    {"exchange": Exchange(4, "none", 4)},
    {"exchange": Exchange(4, "rank4-int8", 5)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_any_change_makes_another_run(change: dict[str, Any]) -> None:
    manifest = Manifest.preset("gpt-nano")
    assert dataclasses.replace(manifest, **change).check().run_id != manifest.run_id


@pytest.mark.parametrize(
    "change",
    [{"rank": 3}, {"omega": 0.45}, {"mu": "scalar"}, {"projection": "random"}, {"feedback": "int8"}, {"beta1": 0.8}],
    ids=str,
)
def test_any_change_makes_another_low_rank_run(change: dict[str, Any]) -> None:
    manifest = Manifest.preset("gpt-nano").trained_by("lordo")
    changed = dataclasses.replace(manifest, inner=dataclasses.replace(manifest.inner, **change)).check()
    assert changed.run_id != manifest.run_id
    assert Manifest.parse(changed.to_toml()) == changed


def test_an_inner_optimizer_is_taken_on_and_off_again() -> None:
    manifest = Manifest.parse(NANO + '[inner]\noptimizer = "lordo"\nrank = 3')
    assert manifest.trained_by("lordo") == manifest
    assert manifest.trained_by("adamw") == Manifest.preset("gpt-nano")
    with pytest.raises(ConfigError, match=r'is "lord"; give "adamw" or "lordo" .did you mean "lordo"'):
        manifest.trained_by("lord")


def test_a_run_knows_the_flags_that_make_it() -> None:
    preset = Manifest.preset("gpt-nano")
    assert preset.flags == "--model gpt-nano"
    assert preset.trained_by("lordo").flags == "--model gpt-nano --inner lordo"
    assert dataclasses.replace(preset, seed=1).flags is None
    assert Manifest.parse(NANO + '[inner]\noptimizer = "lordo"\nrank = 3').flags is None


def test_the_order_and_the_notation_of_a_file_do_not_matter() -> None:
    one = Manifest.parse(NANO + "seed = 7\nrounds = 20\n[inner]\nlr = 1\nclip = 2.0\n")
    two = Manifest.parse("rounds = 20\n" + NANO + "seed = 0x7\n[inner]\nclip = 2\nlr = 1e0\n")
    assert one.run_id == two.run_id


def test_whole_numbers_given_by_a_program_are_the_same_run_as_in_a_file() -> None:
    manifest = dataclasses.replace(
        Manifest.preset("gpt-10m"), round_seconds=3, inner=Inner(lr=1, clip=2), outer=Outer(eta=1, gamma=0, alpha=1)
    )
    assert Manifest.parse(manifest.to_toml()).run_id == manifest.run_id


def test_a_model_is_the_same_run_by_name_and_by_file(tmp_path: Path) -> None:
    by_name = Manifest.preset("gpt-nano")
    path = write_config(tmp_path, presets.resolve("gpt-nano"))
    by_file = Manifest.parse(by_name.to_toml().replace('model = "gpt-nano"', f'model = "{path}"'))
    assert by_file.model == str(path)
    assert by_file.run_id == by_name.run_id


def test_a_tokenizer_file_counts_by_its_content(tmp_path: Path) -> None:
    ids = []
    for folder, kind in [("a", "bytes"), ("b", "bytes"), ("c", "gpt2")]:
        tokenizer.load(kind).save(tmp_path / folder)
        ids.append(Manifest.parse(NANO + f'tokenizer = "{folder}"', tmp_path).run_id)
    assert ids[0] == ids[1] != ids[2]


# ------------------------------------------------------------------ files


def test_what_a_file_leaves_out_is_the_presets() -> None:
    assert Manifest.parse(NANO) == Manifest.preset("gpt-nano")
    changed = Manifest.parse(NANO + "seed = 3\n[data]\nbatch = 4\n")
    preset = Manifest.preset("gpt-nano")
    assert changed == dataclasses.replace(preset, seed=3, data=dataclasses.replace(preset.data, batch=4))


def test_one_pace_in_a_file_replaces_the_other_of_the_preset() -> None:
    manifest = Manifest.parse(NANO + "round_seconds = 5")
    assert (manifest.local_steps, manifest.round_seconds) == (None, 5.0)


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    corpus=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(2, 10**9),
    lr=st.floats(1e-9, 10.0),
    gamma=st.floats(0.0, 0.999),
    floor=st.floats(0.0, 1.0),
    steps=st.none() | st.integers(1, 10**6),
    meetings=st.integers(0, 1000),
)
def test_a_written_manifest_reads_back_as_the_same_run(
    name: str,
    corpus: str,
    seed: int,
    rounds: int,
    lr: float,
    gamma: float,
    floor: float,
    steps: int | None,
    meetings: int,
) -> None:
    preset = Manifest.preset("gpt-nano")
    manifest = dataclasses.replace(
        preset,
        name=name,
        seed=seed,
        rounds=rounds,
        local_steps=steps,
        round_seconds=None if steps else lr + 0.1,
        data=dataclasses.replace(preset.data, corpus=corpus),
        inner=dataclasses.replace(preset.inner, lr=lr),
        schedule=dataclasses.replace(preset.schedule, floor=floor),
        outer=dataclasses.replace(preset.outer, gamma=gamma),
        exchange=dataclasses.replace(preset.exchange, meetings=meetings),
    ).check()
    again = Manifest.parse(manifest.to_toml())
    assert again == manifest
    assert again.run_id == manifest.run_id


def test_a_config_file_is_found_beside_the_manifest_and_takes_a_preset_near_its_size(tmp_path: Path) -> None:
    write_config(tmp_path, llama())
    run = tmp_path / "run.toml"
    run.write_text('model = "config.json"\n')
    manifest = Manifest.load(run)
    assert manifest.config == llama()
    assert (manifest.name, manifest.tokenizer) == ("llama", "gpt2")
    assert manifest.inner == Manifest.preset("gpt-10m").inner
    assert manifest.data.sequence_length == 96
    assert Manifest.parse(manifest.to_toml()).run_id == manifest.run_id


def test_a_file_goes_before_the_model_unless_they_disagree(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(NANO + "seed = 5")
    assert Manifest.choose(None, "gpt-nano").seed == 0
    assert Manifest.choose(run, "").seed == Manifest.choose(run, "gpt-nano").seed == 5
    with pytest.raises(ConfigError, match=r"run.toml' is for model 'gpt-nano', not 'gpt-10m'; leave --model out"):
        Manifest.choose(run, "gpt-10m")


@pytest.mark.parametrize(("written", "asked"), [("adamw", "lordo"), ("lordo", "adamw")])
def test_a_file_goes_before_the_inner_optimizer_unless_they_disagree(written: str, asked: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(NANO + f'[inner]\noptimizer = "{written}"')
    assert Manifest.choose(None, "gpt-nano", asked) == Manifest.preset("gpt-nano").trained_by(asked)
    assert Manifest.choose(run, "", written) == Manifest.choose(run, "")
    sentence = f'run.toml\' trains with {written}, not {asked}; leave --inner out .* or write optimizer = "{asked}"'
    with pytest.raises(ConfigError, match=sentence):
        Manifest.choose(run, "", asked)


# ------------------------------------------------------------------ what is refused

REFUSED = [
    ("", "no model is named"),
    ("model = \nseed = 1", "not TOML: .*line 1"),
    (NANO + "version = 2", "version is 2; this peerloom reads version 1"),
    (NANO + "version = true", "'version' is true; give a whole number"),
    (NANO + "sed = 2", r"unknown key 'sed'; did you mean 'seed'\?"),
    (NANO + "[dat]\nbatch = 2", r"unknown key 'dat'; did you mean 'data'\?"),
    (NANO + "[data]\nbatches = 2", r"unknown key 'batches' in \[data\]; did you mean 'batch'\?"),
    (NANO + "[outer]\ngama = 0.5", r"unknown key 'gama' in \[outer\]; did you mean 'gamma'\?"),
    (NANO + "data = 3", r"'data' is a table; write \[data\]"),
    (NANO + 'seed = "2"', "'seed' is \"2\"; give a whole number"),
    (NANO + "seed = 2.0", "'seed' is 2.0; give a whole number"),
    (NANO + "seed = true", "'seed' is true; give a whole number"),
    (NANO + "name = 3", "'name' is 3; give text in quotes"),
    (NANO + 'name = "a b"', "name is 'a b'; give 1 to 64 letters"),
    (NANO + "seed = -1", "seed is -1; give a number from 0 to 4294967295"),
    (NANO + "rounds = 0", "rounds is 0; give a number from 1 to"),
    (NANO + "local_steps = 0", "local_steps is 0; give a number from 1 to"),
    (NANO + "round_seconds = 0", "round_seconds is 0.0; give a number from 0.1 to"),
    (NANO + "local_steps = 1\nround_seconds = 1", "either local_steps or round_seconds"),
    (NANO + "[data]\nshards = 0", "data.shards is 0; give a number from 1 to"),
    (NANO + "[data]\nsequence_length = 257", "data.sequence_length is 257, but the model has 256 positions"),
    (NANO + "[inner]\nlr = 0", "inner.lr is 0.0; give a number from 1e-09 to"),
    (NANO + "[inner]\nlr = nan", "'lr' in .inner. is NaN; give a number"),
    (NANO + "[inner]\nlr = inf", "'lr' in .inner. is Infinity; give a number"),
    (NANO + "[inner]\nlr = true", "'lr' in .inner. is true; give a number"),
    (NANO + '[inner]\noptimizer = "sgd"', '\'optimizer\' in .inner. is "sgd"; give "adamw" or "lordo"'),
    (NANO + "[inner]\nrank = 4", 'inner.rank is for lordo; set optimizer = "lordo" under .inner., or remove rank'),
    (NANO + '[inner]\noptimizer = "lordo"\nrank = -1', "inner.rank is -1; give a number from 0 to 65536"),
    (NANO + '[inner]\noptimizer = "lordo"\nomega = 1.5', "inner.omega is 1.5; give a number from 0.01 to 1.0"),
    (NANO + '[inner]\noptimizer = "lordo"\nmu = "row"', 'give "scalar" or "column" or "fira" or "unit"'),
    (NANO + '[inner]\noptimizer = "lordo"\nprojection = "pca"', '"power" or "svd" or "random"'),
    (NANO + '[inner]\noptimizer = "lordo"\nfeedback = "fp32"', 'give "none" or "int8"'),
    (NANO + '[schedule]\nkind = "cos"', '"cosine" or "wsd" or "constant" .did you mean "cosine"'),
    (NANO + "[schedule]\nwarmup_rounds = 10", "leaves nothing of 10 rounds"),
    (NANO + "[schedule]\nfloor = 2", "floor is 2; give a number from 0 to 1"),
    (NANO + '[outer]\nform = "own"', '"own-momentum" or "mixed" or "plain" .did you mean "own-momentum"'),
    (NANO + "[outer]\neta = 0", "eta is 0; give a number above 0"),
    (NANO + '[outer]\nform = "mixed"\ngamma = 0.9', "drives peers apart.*take alpha 0.84 or less, or gamma"),
    (NANO + '[exchange]\ncodec = "rank4-int7"', "unknown codec 'rank4-int7'"),
    (NANO + "[exchange]\nmeetings = -1", "exchange.meetings is -1; give a number from 0 to 1000"),
    (NANO + "[exchange]\nmax_lag = -1", "exchange.max_lag is -1"),
    ('model = "gpt-nan"', "unknown model 'gpt-nan'; did you mean 'gpt-nano'"),
    ('model = "no/config.json"', "no model config at 'no/config.json'"),
    (NANO + "seed = " + "9" * 5000, "not TOML"),
    (NANO + "[inner]\nlr = " + "9" * 400, "'lr' in .inner. is 9+\\.\\.\\.; give a number"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[text[-40:] for text, _ in REFUSED])
def test_a_wrong_manifest_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        Manifest.load(run)
    assert str(caught.value).startswith(f"run manifest '{run}': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "No such file"), (b"\xff\xfe", "not text in UTF-8"), (b"#" * (1 << 20) + b"\n", "longer than 1 MiB")],
)
def test_a_file_that_is_none_is_refused_by_name(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    if content is not None:
        run.write_bytes(content)
    with pytest.raises(ConfigError, match=f"run.toml'.*{sentence}"):
        Manifest.load(run)


def test_a_config_that_json_cannot_say_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, llama(rms_norm_eps=float("nan")))
    with pytest.raises(ConfigError, match="holds what JSON cannot say"):
        Manifest.preset(str(path))
