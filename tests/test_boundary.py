"""The step boundary: where the event loop's wishes and training's state meet."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from peer.boundary import Boundary
from peer.core.state import State
from peer.errors import Unreachable

STATE = State({}, {}, {}, round=7)


async def test_jobs_run_only_when_training_serves_them_and_in_order() -> None:
    boundary, seen = Boundary(), []

    def note(number: int, state: State) -> None:
        seen.append((number, state.round))

    futures = [boundary.post(partial(note, number)) for number in range(3)]
    assert not seen
    assert not any(future.done() for future in futures)
    boundary.serve(STATE)
    assert seen == [(0, 7), (1, 7), (2, 7)]
    assert all(future.done() for future in futures)


async def test_a_visitor_gets_the_result_from_another_thread() -> None:
    boundary = Boundary()
    visit = asyncio.create_task(boundary.visit(lambda state: (state.round, threading.get_ident()), 10))
    await asyncio.sleep(0)
    training = threading.Thread(target=boundary.serve, args=(STATE,))
    training.start()
    round, thread = await visit
    training.join()
    assert round == 7
    assert thread != threading.get_ident()


async def test_a_job_that_fails_is_its_visitors_concern_and_not_trainings() -> None:
    boundary = Boundary()

    def fail(state: State) -> None:
        raise ValueError("broken")

    visit = asyncio.create_task(boundary.visit(fail, 10))
    await asyncio.sleep(0)
    after = boundary.post(lambda state: "ran")
    boundary.serve(STATE)
    with pytest.raises(ValueError, match="broken"):
        await visit
    assert after.result(0) == "ran"


async def test_a_job_runs_even_when_its_visitor_has_been_cancelled_or_has_given_up() -> None:
    boundary, seen = Boundary(), []
    visit = asyncio.create_task(boundary.visit(lambda state: seen.append("cancelled"), 10))
    await asyncio.sleep(0)
    visit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visit
    with pytest.raises(Unreachable, match="no step boundary"):
        await boundary.visit(lambda state: seen.append("late"), 0.01)
    boundary.serve(STATE)
    assert seen == ["cancelled", "late"]


async def test_closing_runs_what_was_posted_and_refuses_what_comes_later() -> None:
    boundary = Boundary()
    before = boundary.post(lambda state: state.round)
    boundary.close(STATE)
    assert before.result(0) == 7
    with pytest.raises(Unreachable, match="stopping"):
        await boundary.visit(lambda state: state.round, 1)
    boundary = Boundary()
    refused = boundary.post(lambda state: state.round)
    boundary.close(None)
    with pytest.raises(Unreachable, match="stopping"):
        refused.result(0)
