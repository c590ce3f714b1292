"""Who may touch the weights when, with real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from peer.still import Still

DEADLINE_S = 20.0


@contextmanager
def threads(*jobs: Callable[[], None]) -> Iterator[None]:
    """Run jobs beside what stands inside, and fail if one of them raises or does not end."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  for the thread that waits
            errors.append(error)

    running = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a thread waits for ever"
    assert errors == []


def until(condition: Callable[[], bool]) -> None:
    wait = threading.Event()
    for _ in range(int(DEADLINE_S / 0.001)):
        if condition():
            return
        wait.wait(0.001)
    pytest.fail("it never came to that")


def test_many_readers_and_a_changer_never_overlap() -> None:
    still, numbers, inside = Still(), [0] * 64, list[str]()
    done, step = threading.Event(), threading.Event()
    faults, reads = list[str](), list[int]()

    def enter(side: str) -> None:
        inside.append(side)
        if inside != [side]:
            faults.append(f"{inside} at once")

    def change() -> None:
        number = 0
        while number < 200 or len(reads) < 200:
            number += 1
            with still.changing():
                enter("changing")
                for index in range(len(numbers)):
                    numbers[index] = number
                inside.clear()
            step.wait(0.0005)  # training computes
        done.set()

    def read() -> None:
        while not done.is_set():
            with still.reading():
                enter("reading")
                if len(set(numbers)) > 1:
                    faults.append("half of a change was seen")
                reads.append(numbers[0])
                inside.clear()

    with threads(change, *[read] * 5):
        pass
    assert faults == []
    assert len(set(reads)) > 10


def test_training_goes_before_readers_that_come_after_it() -> None:
    still, order = Still(), []
    held, go = threading.Event(), threading.Event()

    def read_first() -> None:
        with still.reading():
            held.set()
            assert go.wait(DEADLINE_S)
            order.append("first reader")

    def change() -> None:
        with still.changing():
            order.append("training")

    def read() -> None:
        with still.reading():
            order.append("reader")

    with threads(read_first):
        assert held.wait(DEADLINE_S)
        with threads(change):
            until(lambda: still._wanted > 0)
            with threads(*[read] * 4):
                go.set()
    assert order == ["first reader", "training", *["reader"] * 4]


def test_what_training_waited_for_a_reader_is_counted_once() -> None:
    still, held, go = Still(), threading.Event(), threading.Event()

    def read() -> None:
        with still.reading():
            held.set()
            until(lambda: still._wanted > 0)
            go.wait(0.1)

    with threads(read):
        assert held.wait(DEADLINE_S)
        with still.changing():
            pass
    assert 0.1 <= still.take_waited_s() < DEADLINE_S
    assert still.take_waited_s() == 0.0


def test_where_nobody_reads_nobody_waits() -> None:
    still = Still()
    for _ in range(100):
        with still.changing():
            pass
    assert still.take_waited_s() < 0.1


@pytest.mark.parametrize("outer", ["reading", "changing"])
@pytest.mark.parametrize("inner", ["reading", "changing"])
def test_whoever_holds_it_may_enter_again_even_while_training_wants_it(outer: str, inner: str) -> None:
    still, held, wanted, order = Still(), threading.Event(), threading.Event(), []

    def enter_twice() -> None:
        with getattr(still, outer)():
            held.set()
            assert wanted.wait(DEADLINE_S)
            with getattr(still, inner)():
                order.append("inner")
            order.append("outer")

    def change() -> None:
        with still.changing():
            order.append("training")

    with threads(enter_twice):
        assert held.wait(DEADLINE_S)
        with threads(change):
            until(lambda: still._wanted > 0)
            wanted.set()
    assert order == ["inner", "outer", "training"]


@pytest.mark.parametrize("side", ["reading", "changing"])
def test_it_is_free_again_after_an_error(side: str) -> None:
    still = Still()
    with pytest.raises(ValueError, match="broken"), getattr(still, side)():
        raise ValueError("broken")

    def both() -> None:
        with still.changing():
            pass
        with still.reading():
            pass

    with threads(both):
        pass
