from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer import checkpoint
from peer.core.state import Cursor, State
from peer.errors import ConfigError

RUN = "9f3a"


def a_state(seed: int = 0, round: int = 0, step: int = 0) -> State:
    """Make a state with all that it may hold: other shapes and dtypes inside, an empty slot, names with dots."""
    draw = torch.Generator().manual_seed(seed)

    def tensors() -> dict[str, Tensor]:
        return {
            "wte.weight": torch.randn(5, 3, generator=draw),
            "h.0.bias": torch.randn(7, generator=draw),
            "a": torch.randn((), generator=draw),
            "none": torch.empty(0, 4),
        }

    inner = {
        "exp_avg": {name: tensor.bfloat16() for name, tensor in tensors().items()},
        "step": {"a": torch.tensor(3.0), "wte.weight": torch.tensor(4, dtype=torch.int64)},
        "quantized": {"a": torch.arange(256, dtype=torch.uint8), "mask": torch.tensor([True, False])},
        "unused": {},
    }
    cursor = Cursor(shard=seed, lap=1, sequence=17)
    return State(tensors(), tensors(), {"momentum": tensors()}, inner, round, step, cursor, "ab12")


def assert_equal(one: State, other: State) -> None:
    """Compare to the bit, with the order of names."""
    flat = []
    for state in (one, other):
        groups = {"weights": state.weights, "anchor": state.anchor}
        groups |= {f"outer {slot}": tensors for slot, tensors in state.outer.items()}
        groups |= {f"inner {slot}": tensors for slot, tensors in state.inner.items()}
        flat.append([(group, name, tensor) for group, tensors in groups.items() for name, tensor in tensors.items()])
    assert [item[:2] for item in flat[0]] == [item[:2] for item in flat[1]]
    assert list(one.outer) == list(other.outer)
    assert list(one.inner) == list(other.inner)
    for (*_, left), (*_, right) in zip(*flat, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    rest = [(s.round, s.step, s.cursor, s.origin) for s in (one, other)]
    assert rest[0] == rest[1]


def loaded(home: Path) -> checkpoint.Loaded:
    found = checkpoint.load(home, RUN)
    assert found is not None
    return found


def names(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "checkpoints").iterdir())


def corrupt(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- in order


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    state = a_state(1, 42, 1234)
    saved = checkpoint.save(tmp_path, state, RUN)
    found = loaded(tmp_path)
    assert_equal(found.state, state)
    assert found.path == saved.path == tmp_path / "checkpoints" / "round-00000042-step-00001234-save-00000001"
    assert saved.size_bytes == (saved.path / "state.safetensors").stat().st_size
    assert found.warnings == ()
    assert 0 <= found.age_s < 3600


@settings(deadline=None)
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(0, 3), max_size=4),
    st.tuples(*[st.integers(0, 2**40)] * 5),
)
def test_any_name_and_any_number_survives(shapes: dict[str, int], numbers: tuple[int, ...]) -> None:
    tensors = {name: torch.randn([2] * dimensions) for name, dimensions in shapes.items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    state = State(tensors, copies, {}, {}, numbers[0], numbers[1], Cursor(*numbers[2:]))
    with tempfile.TemporaryDirectory() as home:
        checkpoint.save(Path(home), state, RUN)
        assert_equal(loaded(Path(home)).state, state)


def test_a_home_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, RUN) is None
    assert checkpoint.newest(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()
    assert checkpoint.load(tmp_path, RUN) is None


def test_live_parameters_and_slices_can_be_saved(tmp_path: Path) -> None:
    state = a_state()
    state.weights["wte.weight"] = torch.nn.Parameter(torch.randn(3, 5)).t()
    checkpoint.save(tmp_path, state, RUN)
    assert_equal(loaded(tmp_path).state, state)


def test_a_loaded_state_is_not_a_view_of_its_file(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, a_state(), RUN)
    found = loaded(tmp_path)
    for tensor in found.state.weights.values():
        tensor += 1
    found = loaded(tmp_path)
    with (saved.path / "state.safetensors").open("r+b") as file:
        file.write(bytes(saved.size_bytes))
    assert_equal(found.state, a_state())


def test_only_the_parts_asked_for_are_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_state(round=3), RUN)
    found = checkpoint.load(tmp_path, RUN, ["weights"])
    assert found is not None
    assert_equal(found.state, replace(a_state(round=3), anchor={}, outer={}, inner={}))


def test_the_two_newest_are_kept_and_the_last_one_written_is_the_newest(tmp_path: Path) -> None:
    # The same round and step twice (a correction came between), and a round that goes back (a damaged one was passed
    # over): what counts is the order of writing.
    for seed, (round, step) in enumerate([(1, 10), (2, 20), (2, 20), (2, 23), (1, 12)]):
        checkpoint.save(tmp_path, a_state(seed, round, step), RUN)
        assert_equal(loaded(tmp_path).state, a_state(seed, round, step))
    assert names(tmp_path) == [
        "round-00000001-step-00000012-save-00000005",
        "round-00000002-step-00000023-save-00000004",
    ]


def test_the_newest_is_described_without_its_tensors(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_state(), RUN)
    saved = checkpoint.save(tmp_path, a_state(1, 5, 6), RUN)
    entry = checkpoint.newest(tmp_path)
    assert entry is not None
    assert (entry.path, entry.run_id, entry.round, entry.step) == (saved.path, RUN, 5, 6)
    assert entry.size_bytes == saved.size_bytes
    os.truncate(saved.path / "state.safetensors", 9)
    entry = checkpoint.newest(tmp_path)
    assert entry is not None
    assert entry.round == 0


def test_what_a_cut_save_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in (".new-round-00000001-step-00000001-save-00000001", ".old-x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "state.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    checkpoint.save(tmp_path, a_state(), RUN)
    assert names(tmp_path) == ["notes.txt", "round-00000000-step-00000000-save-00000001"]


# ---------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home with an earlier and a later checkpoint."""
    home = tmp_path_factory.mktemp("two")
    checkpoint.save(home, a_state(1, 1, 1), RUN)
    checkpoint.save(home, a_state(2, 2, 2), RUN)
    return home


@given(
    file=st.sampled_from(["state.json", "state.safetensors"]),
    position=st.floats(0, 1, exclude_max=True),
    bit=st.none() | st.integers(0, 7),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_damaged_checkpoint_is_passed_over_or_loads_to_the_bit(
    two: Path, file: str, position: float, bit: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        shutil.copytree(two, home)
        path = home / "checkpoints" / "round-00000002-step-00000002-save-00000002" / file
        data = bytearray(path.read_bytes())
        offset = int(position * len(data))
        if bit is None:
            del data[offset:]
        else:
            data[offset] ^= 1 << bit
        path.write_bytes(data)
        before = sorted(home.rglob("*"))
        found = loaded(home)
        if found.state.round == 2:  # white space in the JSON, or its last end of line
            assert_equal(found.state, a_state(2, 2, 2))
            assert found.warnings == ()
        else:
            assert_equal(found.state, a_state(1, 1, 1))
            assert len(found.warnings) == 1
            assert str(path.parent) in found.warnings[0]
        assert sorted(home.rglob("*")) == before
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path / "state.safetensors", 8), "state.safetensors has 8 bytes of "),
        (lambda path: corrupt(path / "state.safetensors", -1), "its SHA-256 is another"),
        (lambda path: (path / "state.safetensors").unlink(), "state.safetensors: No such file or directory"),
        (lambda path: (path / "state.json").unlink(), "state.json: No such file or directory"),
        (lambda path: (path / "state.json").write_text("{}"), "state.json is damaged"),
        (lambda path: (path / "state.json").write_text("[1]"), "state.json is damaged"),
        (lambda path: (path / "state.json").write_bytes(b"\xff"), "state.json is damaged"),
    ],
)
def test_when_no_checkpoint_can_be_read_the_error_says_why_and_what_to_do(
    tmp_path: Path, damage: object, words: str
) -> None:
    saved = checkpoint.save(tmp_path, a_state(), RUN)
    assert callable(damage)
    damage(saved.path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(tmp_path, RUN)
    assert str(caught.value).startswith(f"none of the checkpoints in '{tmp_path / 'checkpoints'}' can be read: ")
    assert words in str(caught.value)
    assert "move that folder away to begin anew" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_another_run_is_refused(two: Path) -> None:
    with pytest.raises(ConfigError, match=f"home '{two}' belongs to run 9f3a, not to run 77; .* --home"):
        checkpoint.load(two, "77")


def test_a_checkpoint_of_a_newer_format_is_refused_even_when_an_older_one_could_be_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_state(), RUN)
    saved = checkpoint.save(tmp_path, a_state(), RUN)
    about = json.loads((saved.path / "state.json").read_text())
    del about["check"]
    about["format"] = 2
    (saved.path / "state.json").write_text(json.dumps({**about, "check": checkpoint._check(about)}))
    with pytest.raises(ConfigError, match=f"checkpoint '{saved.path}' has format 2, .* install a newer peerloom"):
        checkpoint.load(tmp_path, RUN)


def test_pruning_spares_what_is_whole_and_foreign(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, a_state(1, 1, 1), RUN)
    bad = checkpoint.save(tmp_path, a_state(2, 2, 2), RUN)
    os.truncate(bad.path / "state.safetensors", 100)
    foreign = tmp_path / "checkpoints" / "round-00000000-step-00000000-save-00000000"
    shutil.copytree(checkpoint.save(tmp_path / "other", a_state(), "77").path, foreign)
    third = checkpoint.save(tmp_path, a_state(3, 3, 3), RUN)
    # The damaged one doesn't count as one of the two, and isn't older than them.
    assert names(tmp_path) == sorted(path.name for path in (foreign, good.path, bad.path, third.path))
    fourth = checkpoint.save(tmp_path, a_state(4, 4, 4), RUN)
    assert names(tmp_path) == sorted(path.name for path in (foreign, third.path, fourth.path))


# ---------------------------------------------------------------- cut short


def kill_at_call(number: int) -> None:
    """Kill this process at its number-th call to the system that Python tells its audit hooks of."""
    calls = iter(range(number))

    def count(event: str, _: object) -> None:
        if event.partition(".")[0] in ("open", "os", "shutil") and event != "os.kill" and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_at_time(number: int) -> None:
    """Kill this process after a while: no handler is set, so that nothing is cleaned up, as after kill -9."""
    signal.setitimer(signal.ITIMER_REAL, 0.0005 * number)


def leave_room(number: int) -> None:
    """Let no file grow past a size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * number, resource.RLIM_INFINITY))


MEANS = {means.__name__: means for means in (kill_at_call, kill_at_time, leave_room)}


def numbered(means: str, number: int) -> State:
    """Make the state that the number-th child saves: small where files are limited, else some megabytes."""
    size = 1 if means == leave_room.__name__ else 200_000
    tensors = {"w": torch.full((size,), float(number))}
    return State(tensors, {}, {"momentum": {"w": torch.full((size,), -float(number))}}, {}, number, number)


def save_in_children() -> None:
    """Fork a child for each line of standard input; each saves and is cut short; tell how it ended.

    All share the torch that this process has loaded. A line: the means, the number, the home.
    """
    torch.set_num_threads(1)
    for line in sys.stdin:
        means, digits, home = line.rstrip("\n").split(" ", 2)
        number = int(digits)
        state = numbered(means, number)
        if (pid := os.fork()) == 0:
            MEANS[means](number)
            try:
                checkpoint.save(Path(home), state, RUN)
            except OSError as error:
                os._exit(error.errno or 255)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        refused = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        print("killed" if os.WIFSIGNALED(status) else os.strerror(refused) if refused else "saved", flush=True)


CutSave = Callable[[Path, str, int], str]


@pytest.fixture(scope="module")
def cut_save() -> Iterator[CutSave]:
    """Provide a save in a process of its own that is cut short by some means; it returns how it ended."""
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def save(home: Path, means: str, number: int) -> str:
            print(means, number, home, file=asked, flush=True)
            return told.readline().strip()

        yield save
        asked.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(("means", "numbers"), [("kill_at_call", range(1, 45)), ("kill_at_time", range(1, 40))])
def test_a_kill_at_any_instant_leaves_the_previous_checkpoint_or_the_new_one(
    cut_save: CutSave, tmp_path: Path, means: str, numbers: range
) -> None:
    checkpoint.save(tmp_path, numbered(means, 0), RUN)
    checkpoint.save(tmp_path, numbered(means, 0), RUN)
    last, seen = 0, list[str]()
    for number in numbers:
        ending = cut_save(tmp_path, means, number)
        found = loaded(tmp_path)
        assert found.warnings == ()
        visible = [path for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")]
        assert all(len(list(path.iterdir())) == 2 for path in visible)
        assert found.state.round in ([number] if ending == "saved" else [last, number]), f"{ending} at {number}"
        assert_equal(found.state, numbered(means, found.state.round))
        last = found.state.round
        seen.append(f"{ending} {'new' if last == number else 'previous'}")
    # The kills fell before the rename and after it, and the last ones after everything.
    assert {"killed previous", "killed new", "saved new"} >= set(seen)
    if means == "kill_at_call":
        assert set(seen) == {"killed previous", "killed new", "saved new"}
    checkpoint.save(tmp_path, numbered(means, 1000), RUN)
    assert len(names(tmp_path)) == 2


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_litter(cut_save: CutSave, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, numbered("leave_room", 0), RUN)
    first = checkpoint.save(tmp_path, numbered("leave_room", 0), RUN)
    largest = max(file.stat().st_size for file in first.path.iterdir())
    ended = list[str]()
    for number in range(1, 30):
        ending = cut_save(tmp_path, "leave_room", number)
        ended.append(ending)
        assert len(names(tmp_path)) == 2
        assert loaded(tmp_path).state.round == (number if ending == "saved" else 0)
        if 40 * number >= largest + 8:
            assert ending == "saved"
        else:
            assert ending == "File too large", number
    assert {ended[0], ended[-1]} == {"File too large", "saved"}


def test_a_save_that_cannot_begin_raises_the_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path, a_state(), RUN)
    assert (tmp_path / "checkpoints").read_text() == "not a folder"


if __name__ == "__main__":
    save_in_children()
