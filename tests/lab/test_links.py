"""The link model against closed forms and against what must hold for any lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.lab.links import Link, Links, allreduce_bytes

MB = 1_000_000

RATES = st.floats(0.1, 1e4)
SIZES = st.floats(0, 1e10)
LINKS = st.builds(Link, up_mbit=RATES, down_mbit=RATES, latency_s=st.floats(0, 1), step_s=st.floats(0.1, 10))
FOUR = st.lists(LINKS, min_size=4, max_size=4).map(lambda links: Links(tuple(links)))


def load(folder: Path, text: str, peers: int = 4) -> Links:
    path = folder / "links.toml"
    path.write_text(text)
    return Links.load(path, peers)


# ---------------------------------------------------------------- transfers and exchanges


def test_a_transfer_takes_both_latencies_and_its_size_over_the_slower_end() -> None:
    links = Links((Link(10, 100, 0.02), Link(50, 5, 0.03)))
    assert links.transfer_s(0, 1, MB) == pytest.approx(0.05 + 8 / 5)
    assert links.transfer_s(1, 0, MB) == pytest.approx(0.05 + 8 / 50)
    assert links.transfer_s(0, 1, 0) == pytest.approx(0.05)


def test_over_ideal_lines_everything_takes_no_time_and_a_step_a_second() -> None:
    links = Links.ideal(3)
    assert len(links.peers) == 3
    assert links.transfer_s(0, 2, 1e15) == 0
    assert links.exchange_s(0, 1, 1e15, 1e15, turns=3) == 0
    assert links.allreduce_s([0, 1, 2], 1e15) == 0
    assert {link.step_s for link in links.peers} == {1.0}


def test_both_directions_of_an_exchange_flow_at_the_same_time() -> None:
    links = Links((Link(8, 16, 0.1), Link(4, 80, 0.2)))
    there_s, back_s = 6.0, 2.0  # 6 MB at 8 Mbit/s, 1 MB at 4
    assert links.exchange_s(0, 1, 6 * MB, MB, turns=3) == pytest.approx(max(there_s, back_s) + 3 * 0.3)
    assert links.exchange_s(0, 1, 0, MB, turns=0) == pytest.approx(back_s)


@settings(deadline=None)
@given(FOUR, SIZES, SIZES, st.integers(0, 9))
def test_an_exchange_takes_both_sides_equally_long(links: Links, there: float, back: float, turns: int) -> None:
    assert links.exchange_s(0, 1, there, back, turns) == links.exchange_s(1, 0, back, there, turns)


@settings(deadline=None)
@given(FOUR, SIZES)
def test_an_exchange_of_one_direction_and_one_turn_is_a_transfer(links: Links, size: float) -> None:
    assert links.exchange_s(2, 3, size, 0, turns=1) == links.transfer_s(2, 3, size)


@settings(deadline=None)
@given(FOUR, SIZES, SIZES)
def test_more_bytes_never_arrive_sooner(links: Links, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert links.transfer_s(0, 1, less) <= links.transfer_s(0, 1, more)
    assert links.exchange_s(0, 1, less, less, 2) <= links.exchange_s(0, 1, less, more, 2)
    assert links.allreduce_s(range(4), less) <= links.allreduce_s(range(4), more)


# ---------------------------------------------------------------- all-reduce


@pytest.mark.parametrize("n", [2, 3, 16])
def test_a_ring_of_equal_lines_takes_2_n_minus_1_steps_of_an_nth(n: int) -> None:
    links = Links((Link(20, 100, 0.01),) * n)
    assert links.allreduce_s(range(n), 100 * MB) == pytest.approx(2 * (n - 1) * (0.02 + 800 / n / 20))


def test_one_peer_alone_reduces_in_no_time_and_sends_nothing() -> None:
    links = Links((Link(1, 1, 1),))
    assert links.allreduce_s([0], 100 * MB) == 0
    assert allreduce_bytes(1, 100 * MB) == 0


@pytest.mark.parametrize("n", [2, 3, 7])
def test_what_each_peer_sends_is_what_the_steps_of_the_ring_add_up_to(n: int) -> None:
    # Chunk by chunk: n − 1 steps that add up and n − 1 that hand round, a chunk of size / n in each.
    assert allreduce_bytes(n, 10 * MB) == pytest.approx(sum(10 * MB / n for _ in range(n - 1)) * 2)


def test_the_ring_goes_by_the_order_of_its_members() -> None:
    far, near = Link(latency_s=1.0), Link()
    links = Links((far, far, near, near))
    assert links.allreduce_s([0, 1, 2, 3], MB) == pytest.approx(6 * 2.0)  # the two far ones are neighbours
    assert links.allreduce_s([0, 2, 1, 3], MB) == pytest.approx(6 * 1.0)


def test_slow_up_and_slow_down_lines_hold_the_ring_up_once() -> None:
    links = Links((Link(100, 1), Link(1, 100), Link(100, 100)))
    assert links.allreduce_s([0, 1, 2], 3 * MB) == pytest.approx(4 * 8.0)


@settings(deadline=None)
@given(st.integers(2, 12), st.data(), RATES, st.floats(1, 1e9))
def test_one_line_20_times_slower_makes_everyone_wait_20_times_as_long(
    n: int, data: st.DataObject, mbit: float, size: float
) -> None:
    fast, slow = Link(mbit, mbit), Link(mbit / 20, mbit / 20)
    which = data.draw(st.integers(0, n - 1))
    before = Links((fast,) * n)
    after = Links((*before.peers[:which], slow, *before.peers[which + 1 :]))
    assert after.allreduce_s(range(n), size) == pytest.approx(20 * before.allreduce_s(range(n), size))
    for a in range(n):
        for b in range(n):
            if which not in (a, b):
                assert after.exchange_s(a, b, size, size, 2) == before.exchange_s(a, b, size, size, 2)


# ---------------------------------------------------------------- the file


def test_a_file_says_what_each_line_is(tmp_path: Path) -> None:
    text = """
    step_s = 0.6
    [[peers]]
    count = 2
    up_mbit = 10
    down_mbit = 50.5
    latency_ms = 40
    speed = 2
    [[peers]]
    """
    home = Link(10.0, 50.5, 0.04, 0.3)
    assert load(tmp_path, text, 3) == Links((home, home, Link(step_s=0.6)))


def test_a_key_that_is_left_out_means_no_limit_no_latency_and_a_step_a_second(tmp_path: Path) -> None:
    assert load(tmp_path, "[[peers]]", 2) == Links.ideal(2)
    assert load(tmp_path, "[[peers]]\nup_mbit = 1", 1).peers == (Link(1.0, math.inf, 0.0, 1.0),)


@pytest.mark.parametrize(("peers", "found"), [(1, "a"), (3, "aab"), (4, "aaba"), (8, "aabaabaa")])
def test_groups_repeat_from_the_first_on_or_are_cut(peers: int, found: str, tmp_path: Path) -> None:
    text = "[[peers]]\ncount = 2\nup_mbit = 1\n[[peers]]\nup_mbit = 2"
    names = {1.0: "a", 2.0: "b"}
    assert "".join(names[link.up_mbit] for link in load(tmp_path, text, peers).peers) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepp_s = 1", "unknown key 'stepp_s'; did you mean 'step_s'?"),
        ("[[peer]]", "unknown key 'peer'; did you mean 'peers'?"),
        ("[[peers]]\n[[peers]]\nupmbit = 1", "unknown key 'upmbit' in [[peers]] number 2; did you mean 'up_mbit'?"),
        ("[[peers]]\nlatency_ms = 'low'", "'latency_ms' in [[peers]] number 1 is \"low\"; give a number"),
        ("[[peers]]\ncount = 2.0", "'count' in [[peers]] number 1 is 2.0; give a whole number"),
        ("[[peers]]\ncount = 0", "'count' in [[peers]] number 1 is 0; give a number from 1 to 1e+06"),
        ("[[peers]]\nup_mbit = 0", "'up_mbit' in [[peers]] number 1 is 0.0; give a number from 0.001 to 1e+06"),
        ("[[peers]]\ndown_mbit = -1", "'down_mbit' in [[peers]] number 1 is -1.0"),
        ("[[peers]]\nlatency_ms = -1", "'latency_ms' in [[peers]] number 1 is -1.0"),
        ("[[peers]]\nspeed = 0", "'speed' in [[peers]] number 1 is 0.0"),
        ("[[peers]]\nup_mbit = inf", "'up_mbit' in [[peers]] number 1 is Infinity; give a number"),
        ("step_s = 0\n[[peers]]", "'step_s' is 0.0; give a number from 1e-06"),
        ("[peers]\nup_mbit = 1", "'peers' is a list of groups; write [[peers]]"),
        ("peers = 3", "'peers' is a list of groups; write [[peers]]"),
        ("peers = [1]", "'peers' is a list of groups; write [[peers]]"),
        ("step_s = 1", "no peers are described; write [[peers]]"),
        ("peers = []", "no peers are described; write [[peers]]"),
        ("step_s 1", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_the_file_and_what_to_write(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"links '{tmp_path / 'links.toml'}': ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read '.*nowhere\.toml': No such file"):
        Links.load(tmp_path / "nowhere.toml", 1)
