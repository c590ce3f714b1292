from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.hours import DAY_MINUTES, Hours
from peer.errors import ConfigError

NIGHT = Hours.parse("22:00-07:00")


def at(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


@pytest.mark.parametrize(
    ("text", "windows", "plain"),
    [
        ("22:00-07:00", ((1320, 420),), "22:00-07:00"),
        ("9:30-17:05", ((570, 1025),), "09:30-17:05"),
        (" 22:00 - 07:00 , 12:00-13:00", ((1320, 420), (720, 780)), "22:00-07:00,12:00-13:00"),
        ("18:00-24:00", ((1080, 0),), "18:00-00:00"),
        ("00:00-00:01", ((0, 1),), "00:00-00:01"),
    ],
)
def test_hours_are_read_as_people_write_them(text: str, windows: tuple[tuple[int, int], ...], plain: str) -> None:
    hours = Hours.parse(text)
    assert hours.windows == windows
    assert str(hours) == plain
    assert Hours.parse(plain) == hours


@pytest.mark.parametrize(
    "text",
    [
        "",
        "22-7",
        "22:00",
        "22:00-",
        "25:00-07:00",
        "22:60-07:00",
        "22:00-24:01",
        "22:00–07:00",
        "22:00-07:00,",
        "never",
        "10pm-7am",
        "22:00-07:00 12:00-13:00",
        "-1:00-07:00",
        "٢٢:00-07:00",
    ],
)
def test_what_is_not_hours_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hours.parse(text)
    assert str(caught.value) == (
        f"'{text}' is not hours of the day; write them such as 22:00-07:00, several with commas"
    )


@pytest.mark.parametrize("text", ["07:00-07:00", "00:00-24:00", "12:00-13:00,07:00-7:00"])
def test_a_window_that_ends_where_it_begins_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ends where it begins; leave hours out for the whole day"):
        Hours.parse(text)


@pytest.mark.parametrize(
    ("time", "is_open", "minutes"),
    [
        ("21:59", False, 1),
        ("22:00", True, 540),
        ("23:59", True, 421),
        ("00:00", True, 420),
        ("06:59", True, 1),
        ("07:00", False, 900),
        ("12:00", False, 600),
    ],
)
def test_a_window_goes_on_over_midnight(time: str, is_open: bool, minutes: int) -> None:
    assert NIGHT.open_at(at(time)) is is_open
    assert NIGHT.minutes_to_change(at(time)) == minutes


def test_windows_that_touch_or_overlap_are_one() -> None:
    hours = Hours.parse("08:00-10:00,10:00-12:00,11:00-13:00")
    assert hours.minutes_to_change(at("08:00")) == 300


def test_windows_that_cover_the_day_never_change() -> None:
    hours = Hours.parse("00:00-12:00,12:00-00:00")
    assert all(hours.open_at(minute) for minute in range(DAY_MINUTES))
    assert hours.minutes_to_change(0) is None


minutes = st.integers(0, DAY_MINUTES - 1)
windows = st.tuples(minutes, minutes).filter(lambda window: window[0] != window[1])


@given(st.lists(windows, min_size=1, max_size=4), minutes)
def test_hours_are_the_union_of_their_windows_walked_minute_by_minute(chosen: list[tuple[int, int]], now: int) -> None:
    inside: set[int] = set()
    for start, end in chosen:
        minute = start
        while minute != end:
            inside.add(minute)
            minute = (minute + 1) % DAY_MINUTES
    hours = Hours(tuple(chosen))
    assert hours.open_at(now) is (now in inside)
    ahead = (step for step in range(1, DAY_MINUTES) if ((now + step) % DAY_MINUTES in inside) is not (now in inside))
    assert hours.minutes_to_change(now) == next(ahead, None)
