"""Whether a peer may take part now, as a guest on its owner's machine, or why not and until when.

reason   the peer waits                                        until
paused   since `peer pause`                                    `peer resume`
hours    outside the hours that its owner gave                 they begin
quota    once the month's bytes are used up                    the next month
gpu      while another program computes on its GPU             that has rested for a while
"""

from __future__ import annotations

import shlex
from datetime import datetime, timedelta
from typing import Protocol

from peer import gpu
from peer.config import HOME, Config
from peer.core.decision import ALLOWED, Decision
from peer.core.hours import DAY_MINUTES, clock
from peer.home import Home
from peer.quota import Quota
from peer.units import written_size

BUSY_CHECKS = 3
IDLE_S = 30.0


class Watch(Protocol):
    """A look at our GPU; `peer.gpu.Gpu` is one."""

    def other(self, now_s: float) -> int | None:
        """Return the id of another process that computes on it now (Unix time), None if there is none."""


class Guest:
    """Answers for one peer; about once a second it is asked. watch: None where nobody else can be seen."""

    def __init__(self, config: Config, home: Home, quota: Quota, watch: Watch | None = None) -> None:
        self._config, self._home, self._quota = config, home, quota
        self._courtesy = None if watch is None else _Courtesy(watch)

    def why_not(self, now: datetime) -> Decision:
        """Allow taking part, or say why not; now: the local time, aware of its zone."""
        courtesy = ALLOWED if self._courtesy is None else self._courtesy.look(now.timestamp())
        return next((no for no in (self._paused(), self._hours(now), self._spent(now)) if not no), courtesy)

    def _paused(self) -> Decision:
        since_s = self._home.paused_s
        if since_s is None:
            return ALLOWED
        home = self._home.path
        where = "" if home == HOME.expanduser() else f" --home {shlex.quote(str(home))}"
        since = f"{datetime.fromtimestamp(since_s):%Y-%m-%d %H:%M}"
        return Decision(False, "paused", f"paused since {since}; it goes on after: peer resume{where}")

    def _hours(self, now: datetime) -> Decision:
        hours, minute = self._config.hours, 60 * now.hour + now.minute
        if hours is None or hours.open_at(minute):
            return ALLOWED
        opens = clock((minute + (hours.minutes_to_change(minute) or 0)) % DAY_MINUTES)
        return Decision(False, "hours", f"outside the hours {hours}; it goes on at {opens}")

    def _spent(self, now: datetime) -> Decision:
        limit_bytes, today = self._config.quota, now.date()
        if limit_bytes is None or self._quota.left_bytes(limit_bytes, today):
            return ALLOWED
        next_month = (today.replace(day=1) + timedelta(days=31)).replace(day=1)
        return Decision(
            False,
            "quota",
            f"the month's {written_size(limit_bytes)} are used up; it goes on on {next_month}, "
            "or when started with a larger --quota",
        )


class _Courtesy:
    """Gives way to another program after a few looks that saw it, and goes on once it has rested for a while."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._checks = 0
        self._busy_s = 0.0
        self._to: str | None = None

    def look(self, now_s: float) -> Decision:
        other = self._watch.other(now_s)
        if other is not None:
            self._checks, self._busy_s = self._checks + 1, now_s
            if self._checks >= BUSY_CHECKS:
                self._to = gpu.name(other)
        else:
            self._checks = 0
            if not 0.0 <= now_s - self._busy_s < IDLE_S:  # also when the clock was put back
                self._to = None
        if self._to is None:
            return ALLOWED
        return Decision(False, "gpu", f"{self._to} uses the GPU; it goes on when that has rested for {IDLE_S:.0f} s")
