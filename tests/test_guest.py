"""When a peer may take part as a guest on its owner's machine, and what it says when it may not."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from peer.config import HOME, Config
from peer.core.hours import Hours
from peer.guest import BUSY_CHECKS, IDLE_S, Guest
from peer.home import Home
from peer.quota import Quota

NOON = datetime(2026, 11, 12, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)


class Screen:
    """A GPU of which the test says who else uses it."""

    def __init__(self) -> None:
        self.user: int | None = None

    def other(self, now_s: float) -> int | None:
        return self.user


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.create()
    return home


def guest(home: Home, screen: Screen | None = None, used_bytes: int = 0, **settings: Any) -> Guest:
    quota = Quota(home.traffic, pytest.fail)
    quota.add(used_bytes, NOON.date())
    return Guest(Config(home=home.path, **settings), home, quota, screen)


def test_without_limits_a_peer_takes_part(home: Home) -> None:
    assert guest(home).why_not(NOON)


def test_a_peer_waits_from_pause_to_resume(home: Home) -> None:
    one = guest(home)
    assert one.why_not(NOON)
    home.pause()
    os.utime(home.pause_file, (0.0, datetime(2026, 11, 12, 11, 30).timestamp()))
    no = one.why_not(NOON)
    assert (no.allowed, no.reason) == (False, "paused")
    assert no.detail == f"paused since 2026-11-12 11:30; it goes on after: peer resume --home {home.path}"
    home.resume()
    assert one.why_not(NOON)


def test_the_users_own_home_needs_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = Home(HOME)
    home.create()
    home.pause()
    assert guest(home).why_not(NOON).detail.endswith("it goes on after: peer resume")


@pytest.mark.parametrize(
    ("hours", "time", "detail"),
    [
        ("22:00-07:00", "06:59", ""),
        ("22:00-07:00", "07:00", "outside the hours 22:00-07:00; it goes on at 22:00"),
        ("22:00-07:00,12:00-13:00", "08:00", "outside the hours 22:00-07:00,12:00-13:00; it goes on at 12:00"),
        ("1:00-7:00", "23:59", "outside the hours 01:00-07:00; it goes on at 01:00"),
    ],
)
def test_a_peer_keeps_to_its_hours_by_the_local_clock(home: Home, hours: str, time: str, detail: str) -> None:
    now = datetime.fromisoformat(f"2026-11-12T{time}:30+05:00")
    no = guest(home, hours=Hours.parse(hours)).why_not(now)
    assert no.detail == detail
    assert no.reason == ("hours" if detail else "")


@pytest.mark.parametrize(
    ("now", "first"),
    [(NOON, "2026-12-01"), (NOON.replace(day=30), "2026-12-01")],
)
def test_a_peer_that_has_used_up_its_month_waits_for_the_next(home: Home, now: datetime, first: str) -> None:
    assert guest(home, used_bytes=199_999_999_999, quota=200 * 10**9).why_not(now)
    no = guest(home, used_bytes=200 * 10**9, quota=200 * 10**9).why_not(now)
    assert no.reason == "quota"
    assert no.detail == (
        f"the month's 200 GB are used up; it goes on on {first}, or when started with a larger --quota"
    )
    assert guest(home, used_bytes=200 * 10**9, quota=200 * 10**9).why_not(datetime.fromisoformat(first))


def test_december_is_followed_by_january(home: Home) -> None:
    quota = Quota(home.traffic, pytest.fail)
    now = datetime(2026, 12, 31, 23, 59, tzinfo=UTC)
    quota.add(10, now.date())
    no = Guest(Config(home=home.path, quota=10), home, quota).why_not(now)
    assert "it goes on on 2027-01-01" in no.detail


def looks(one: Guest, screen: Screen, users: list[int | None], start: datetime = NOON) -> list[bool]:
    """Ask once a second, with these users of the GPU; return what was allowed."""
    allowed = []
    for number, screen.user in enumerate(users):
        allowed.append(one.why_not(start + number * SECOND).allowed)
    return allowed


def test_a_program_that_is_seen_on_the_gpu_again_and_again_is_given_way_to(home: Home) -> None:
    screen = Screen()
    one = guest(home, screen)
    other = os.getpid()
    assert looks(one, screen, [None, *[other] * BUSY_CHECKS]) == [True, True, True, False]
    no = one.why_not(NOON)
    name = Path("/proc/self/comm").read_text().strip()
    assert no.reason == "gpu"
    assert no.detail == f"{name} (process {other}) uses the GPU; it goes on when that has rested for 30 s"


def test_a_program_that_is_seen_now_and_then_is_not(home: Home) -> None:
    screen = Screen()
    assert all(looks(guest(home, screen), screen, [7, 7, None] * 20))


def test_a_peer_goes_on_once_the_gpu_has_been_idle_for_a_while(home: Home) -> None:
    screen = Screen()
    one = guest(home, screen)
    assert looks(one, screen, [7] * BUSY_CHECKS)[-1] is False
    idle = int(IDLE_S)
    again = looks(one, screen, [None] * (idle - 2) + [7] + [None] * idle, NOON + BUSY_CHECKS * SECOND)
    assert again.index(True) == len(again) - 1
    assert all(looks(one, screen, [7] * (BUSY_CHECKS - 1), NOON + timedelta(hours=1)))


def test_a_clock_that_was_put_back_does_not_keep_a_peer_waiting(home: Home) -> None:
    screen = Screen()
    one = guest(home, screen)
    looks(one, screen, [7] * BUSY_CHECKS)
    assert looks(one, screen, [None], NOON - timedelta(hours=1)) == [True]


def test_what_lasts_longest_is_told_first(home: Home) -> None:
    screen = Screen()
    one = guest(home, screen, used_bytes=1, quota=1, hours=Hours.parse("01:00-02:00"))
    looks(one, screen, [7] * BUSY_CHECKS)
    home.pause()
    assert one.why_not(NOON).reason == "paused"
    home.resume()
    assert one.why_not(NOON).reason == "hours"
    assert one.why_not(NOON.replace(hour=1)).reason == "quota"
    assert one.why_not(NOON.replace(month=12, hour=1)).reason == "gpu"
