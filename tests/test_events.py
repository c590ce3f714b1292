from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import events
from peer.events import EVENTS, Event, EventLog, Record, Tail
from peer.tail import generations

DOCS = Path(__file__).parents[1] / "docs" / "events.md"
START = events.Start(
    "12D3", "9f3a", "nano", "gpt-nano", 1000, "cpu", "float32", 3, 200, "fresh", ("h:1",), (), 42, "0.1.0"
)
SKIP = events.Skip("ab", "failed", "silent", "the partner said nothing for 10 s")

JSON_NAMES: dict[object, str] = {
    int: "integer",
    float: "number",
    str: "string",
    float | None: "number or null",
    str | None: "string or null",
    tuple[str, ...]: "array of strings",
}


def an_event() -> st.SearchStrategy[Event]:
    return st.one_of([st.builds(kind) for kind in EVENTS])


def numbered(number: int) -> Event:
    return events.Checkpoint(number, "somewhere", 0, 0.0)


def numbers(records: typing.Iterable[Record]) -> list[int]:
    return [entry["round"] for entry in records if entry["event"] == "checkpoint"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


# ---------------------------------------------------------------- one event


def documented(kind: type[Event]) -> str:
    """Print an event's fields as docs/events.md should."""
    first, _, rest = (kind.__doc__ or "").partition("\n")
    texts = {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", rest, re.M)}
    types = typing.get_type_hints(kind)
    assert list(texts) == [field.name for field in fields(kind)], f"the docstring of {kind.__name__} and its fields"
    rows = [f"| `{name}` | {JSON_NAMES[types[name]]} | {text} |" for name, text in texts.items()]
    return "\n".join([f"## `{kind.kind}`", "", first, "", "| field | type | |", "|---|---|---|", *rows])


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.kind)
def test_the_documentation_shows_every_event_as_its_class_declares_it(kind: type[Event]) -> None:
    section = re.search(rf"^## `{kind.kind}`$.*?(?=\n\n## |\n*\Z)", DOCS.read_text(), re.M | re.S)
    assert section is not None
    assert section[0] == documented(kind)


def test_the_documentation_names_no_event_that_does_not_exist() -> None:
    assert re.findall(r"^## `(.+)`$", DOCS.read_text(), re.M) == [kind.kind for kind in EVENTS]


def test_an_event_is_one_line_of_json(path: Path) -> None:
    log = EventLog(path, now=lambda: 1_700_000_000.25)
    log.write(START)
    log.close()
    assert path.read_text() == (
        '{"time": "2023-11-14T22:13:20.250Z", "event": "start", "peer_id": "12D3", "run_id": "9f3a", "name": "nano", '
        '"model": "gpt-nano", "parameters": 1000, "device": "cpu", "dtype": "float32", "round": 3, "rounds": 200, '
        '"how": "fresh", '
        '"addresses": ["h:1"], "bootstraps": [], "pid": 42, "version": "0.1.0"}\n'
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_null(path: Path, loss: float) -> None:
    log = EventLog(path)
    log.write(events.Round(1, 2, loss, 0.1, 3, 1.0, 1.0, 1, 1, 1, 1, 1, 1, None, 0.0, 8, 1, None))
    log.close()
    assert [entry["loss"] for entry in events.read(path)] == [None]


@settings(deadline=None)
@given(st.lists(an_event()), st.floats(0, 4e9))
def test_what_is_written_is_read_back(several: list[Event], now_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, echoed = Path(folder) / "events.jsonl", list[Record]()
        log = EventLog(path, echo=echoed.append, now=lambda: now_s)
        for event in several:
            log.write(event)
        log.close()
        assert list(events.read(path)) == echoed == [events.record(event, now_s) for event in several]
        assert path.read_bytes().count(b"\n") == len(several) if several else not path.exists()


def test_a_log_that_does_not_exist_holds_no_events(path: Path) -> None:
    assert list(events.read(path)) == []
    assert list(events.read(path / "below" / "nothing")) == []


# ---------------------------------------------------------------- rotation


def test_a_full_file_is_rotated_and_three_are_kept(path: Path) -> None:
    log = EventLog(path, limit_bytes=1000)
    for number in range(100):
        log.write(numbered(number))
    log.close()
    assert sorted(path.parent.iterdir()) == sorted(generations(path))
    assert all(file.stat().st_size <= 1000 for file in generations(path))
    kept = numbers(events.read(path))
    assert kept == list(range(kept[0], 100))
    per_file = path.with_name("events.jsonl.1").read_bytes().count(b"\n")
    assert len(kept) > 3 * per_file


def test_after_a_rotation_each_file_begins_with_the_last_start_and_readers_see_it_once(path: Path) -> None:
    tail = Tail(path)
    log = EventLog(path, limit_bytes=1500)
    log.write(START)
    for number in range(20):
        log.write(numbered(number))
    assert len([entry for entry in tail.new() if entry["event"] == "start"]) == 1
    for number in range(20, 100):
        log.write(numbered(number))
    log.close()
    assert [entry for entry in tail.new() if entry["event"] == "start"] == []
    for file in generations(path):
        assert json.loads(file.read_text().partition("\n")[0])["event"] == "start"
    first, *others = events.read(path)
    assert {**first, "time": ""} == {**events.record(START, 0.0), "time": ""}
    assert {entry["event"] for entry in others} == {"checkpoint"}
    tail.close()


def test_a_start_that_itself_causes_a_rotation_is_not_written_twice(path: Path) -> None:
    log = EventLog(path, limit_bytes=300)
    for _ in range(2):
        log.write(START)
    log.close()
    assert path.read_bytes().count(b"\n") == 1
    assert len(list(events.read(path))) == 2


# ---------------------------------------------------------------- what goes wrong


def test_events_that_a_full_disk_refused_are_counted_in_the_next_one(tmp_path: Path, path: Path) -> None:
    path.symlink_to("/dev/full")
    echoed = list[Record]()
    log = EventLog(path, echo=echoed.append)
    log.write(SKIP)
    log.write(SKIP)
    assert log.lost == 2
    path.unlink()
    log.write(SKIP)
    log.write(SKIP)
    log.close()
    assert [entry.get("lost") for entry in events.read(path)] == [2, None]
    assert len(echoed) == 4
    assert log.lost == 0


def test_a_line_for_which_half_the_room_is_left_leaves_no_torn_line(path: Path) -> None:
    # A limit on the size of files makes write() take a part of a line, as a disk does that fills up. It holds for a
    # whole process, so it gets one of its own.
    script = f"""
import resource, sys
from pathlib import Path
from peer import events
log = events.EventLog(Path({str(path)!r}))
event = events.Checkpoint(0, "x" * 100, 0, 0.0)
log.write(event)
size_bytes = Path({str(path)!r}).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 50, resource.RLIM_INFINITY))
log.write(event)
assert log.lost == 1
assert Path({str(path)!r}).stat().st_size == size_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write(event)
log.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert [entry.get("lost") for entry in events.read(path)] == [None, 1]


def test_a_folder_that_vanished_costs_events_and_nothing_else(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "nowhere" / "events.jsonl")
    log.write(SKIP)
    assert log.lost == 1
    log.close()


@settings(deadline=None)
@given(cut=st.integers(1, 120))
def test_a_line_torn_by_a_kill_is_passed_over_and_the_next_life_writes_on(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        log = EventLog(path)
        log.write(numbered(0))
        whole_bytes = path.stat().st_size
        log.write(numbered(1))
        log.close()
        os.truncate(path, max(whole_bytes + 1, path.stat().st_size - cut))
        assert numbers(events.read(path)) == [0]
        again = EventLog(path)
        again.write(numbered(2))
        again.close()
        # A line that lost nothing but its end of line is whole once it has one.
        assert numbers(events.read(path)) == ([0, 1, 2] if cut == 1 else [0, 2])


@pytest.mark.parametrize("line", ["", "null", "[]", '"start"', "{}", '{"event": "start"}', "\x00\x00", "nonsense"])
def test_a_line_that_is_no_event_is_passed_over(path: Path, line: str) -> None:
    path.write_text(f'{line}\n{{"time": "", "event": "checkpoint", "round": 7}}\n')
    assert numbers(events.read(path)) == [7]


def test_many_threads_write_whole_lines_in_the_order_of_their_echo(path: Path) -> None:
    echoed = list[Record]()
    log = EventLog(path, echo=echoed.append)

    def write() -> None:
        for number in range(200):
            log.write(numbered(number))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(echoed) == 800
    assert list(events.read(path)) == echoed


# ---------------------------------------------------------------- following


@settings(deadline=None)
@given(batches=st.lists(st.integers(0, 12), max_size=30))
def test_a_tail_sees_every_event_once_through_rotations(batches: list[int]) -> None:
    # A file holds 10 events or more, and a batch is at most 12, so that no more than 3 files pass between two looks.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        log, tail, count = EventLog(path, limit_bytes=1200), Tail(path), 0
        for batch in batches:
            for number in range(count, count + batch):
                log.write(numbered(number))
            assert numbers(tail.new()) == list(range(count, count + batch))
            count += batch
        log.close()
        tail.close()


def test_a_tail_left_behind_by_more_than_all_files_goes_on_with_what_there_is(path: Path) -> None:
    log, tail = EventLog(path, limit_bytes=1000), Tail(path)
    log.write(numbered(0))
    assert numbers(tail.new()) == [0]
    for number in range(1, 100):
        log.write(numbered(number))
    seen = numbers(tail.new())
    # The rest of the file it had open, though that is gone by now; then what `read` finds.
    found = numbers(events.read(path))
    assert seen[-len(found) :] == found
    assert seen[: -len(found)] == list(range(1, 1 + len(seen) - len(found)))
    log.close()
    tail.close()


def test_a_tail_waits_for_the_end_of_a_line(path: Path) -> None:
    log = EventLog(path)
    log.write(numbered(0))
    log.close()
    whole = path.read_bytes()
    tail = Tail(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert tail.new() == []
    path.write_bytes(whole)
    assert numbers(tail.new()) == [0]
    assert tail.new() == []
    tail.close()


def test_a_tail_can_be_abandoned_half_way_and_goes_on_there(path: Path) -> None:
    log = EventLog(path, limit_bytes=1000)
    for number in range(25):
        log.write(numbered(number))
    log.close()
    tail = Tail(path)
    each: Iterator[Record] = tail.each()
    assert numbers([next(each) for _ in range(5)]) == [0, 1, 2, 3, 4]
    del each
    assert numbers(tail.new()) == list(range(5, 25))
    tail.close()
