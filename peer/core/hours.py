"""The hours of the day in which a peer may take part: windows of minutes, over midnight too."""

from __future__ import annotations

import re
from dataclasses import dataclass

from peer.errors import ConfigError

DAY_MINUTES = 24 * 60

_WINDOW = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)", re.ASCII)


@dataclass(frozen=True)
class Hours:
    """Windows of a day, each (first minute that is in, first one that is not) in minutes from midnight, below 24 × 60.

    One that ends before it begins goes on over midnight.
    """

    windows: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read "22:00-07:00" or "22:00-07:00,12:00-13:00"; raises `ConfigError` with what to write instead."""
        return cls(tuple(_window(part.strip(), text) for part in text.split(",")))

    def __str__(self) -> str:
        """Write it as `parse` reads it."""
        return ",".join(f"{clock(start)}-{clock(end)}" for start, end in self.windows)

    def open_at(self, minute_of_day: int) -> bool:
        """Tell whether this minute, from 0 to 24 × 60 - 1, is in a window."""
        return any((minute_of_day - start) % DAY_MINUTES < (end - start) % DAY_MINUTES for start, end in self.windows)

    def minutes_to_change(self, minute_of_day: int) -> int | None:
        """Return in how many minutes, 1 or more, it opens or closes; None if it never does."""
        now = self.open_at(minute_of_day)
        edges = {(edge - minute_of_day) % DAY_MINUTES for window in self.windows for edge in window}
        changes = [ahead for ahead in edges if self.open_at((minute_of_day + ahead) % DAY_MINUTES) != now]
        return min(changes, default=None)


def clock(minute_of_day: int) -> str:
    """Return a minute as it stands on a clock: "07:00"."""
    return f"{minute_of_day // 60:02}:{minute_of_day % 60:02}"


def _window(part: str, text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(part)
    minutes = [60 * int(match[at]) + int(match[at + 1]) for at in (1, 3)] if match else [DAY_MINUTES + 1]
    if max(minutes) > DAY_MINUTES:
        raise ConfigError(f"'{text}' is not hours of the day; write them such as 22:00-07:00, several with commas")
    start, end = (minute % DAY_MINUTES for minute in minutes)
    if start == end:
        raise ConfigError(f"'{part}' ends where it begins; leave hours out for the whole day, or give another end")
    return start, end
