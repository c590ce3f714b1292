"""What became of meetings: counted, told in the events, and held for or against each partner."""

from __future__ import annotations

import time
from dataclasses import dataclass

from peer.core.decision import Decision
from peer.core.gauge import Line
from peer.core.partners import Ledger
from peer.core.plan import Plan
from peer.events import Choice, EventLog, Meeting, Skip

PASSING = ("busy", "crossing", "starting", "stopping", "spent")
"""Reasons that say nothing against a partner and will soon be over."""


NOTICEABLE = 1.25
"""A plan that is so many times larger or smaller than the last one told is told."""


@dataclass
class Counts:
    """Since the start: meetings held, declined by either side, failed; bytes of all of them; the last partner."""

    meetings: int = 0
    declined: int = 0
    failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    partner: str | None = None


class Account:
    """The one place that every meeting's ending goes through."""

    def __init__(self, events: EventLog) -> None:
        self.counts = Counts()
        self.ledger = Ledger()
        self._events = events
        self._idle = ""
        self._plan: Plan | None = None
        self._held = 0

    def met(self, meeting: Meeting) -> None:
        """Note a meeting that took place."""
        self.counts.meetings += 1
        self.counts.bytes_sent += meeting.bytes_sent
        self.counts.bytes_received += meeting.bytes_received
        self.counts.partner = meeting.partner
        self.ledger.succeeded(meeting.partner)
        self._idle = ""
        self._events.write(meeting)

    def take_held(self) -> int:
        """Return how many meetings took place since this was last asked."""
        held, self._held = self.counts.meetings - self._held, self.counts.meetings
        return held

    def declined(
        self, partner: str, decision: Decision, bytes_sent: int = 0, bytes_received: int = 0, rest_s: float = 0.0
    ) -> None:
        """Note an offer that was declined, by either side; rest_s: for how long it shall not be made again."""
        self.counts.declined += 1
        self.counts.bytes_sent += bytes_sent
        self.counts.bytes_received += bytes_received
        self._rest(partner, decision, rest_s)
        self._events.write(Skip(partner, "declined", decision.reason, decision.detail))

    def failed(self, partner: str, decision: Decision, bytes_sent: int, bytes_received: int) -> None:
        """Note a meeting that broke; nothing was applied, or it is in doubt."""
        self.counts.failed += 1
        self.counts.bytes_sent += bytes_sent
        self.counts.bytes_received += bytes_received
        self._rest(partner, decision)
        self._events.write(Skip(partner, "failed", decision.reason, decision.detail))

    def idle(self, decision: Decision) -> None:
        """Note why nobody can be asked, once for each reason; who is resting was noted when it failed."""
        if decision.reason not in (self._idle, "resting"):
            self._events.write(Skip(None, "declined", decision.reason, decision.detail))
            self._idle = decision.reason

    def planned(self, plan: Plan, line: Line, round: int) -> None:
        """Note what this peer means to do, where that has changed noticeably."""
        if self._plan is not None and not _differs(plan, self._plan):
            return
        self._plan = plan
        rates = {"up_bits_per_s": line.bits_per_s, "rtt_s": line.rtt_s}
        self._events.write(Choice(round, plan.meetings, plan.codec, plan.budget_bytes, **rates, why=plan.why))

    def _rest(self, partner: str, decision: Decision, rest_s: float = 0.0) -> None:
        if decision.reason in PASSING:
            self.ledger.busy(partner, time.time(), rest_s)
        else:
            self.ledger.failed(partner, time.time())


def _differs(new: Plan, old: Plan) -> bool:
    if new.codec != old.codec:
        return True
    pairs = ((new.meetings, old.meetings), (new.budget_bytes, old.budget_bytes))
    return any(max(pair) > NOTICEABLE * min(pair) for pair in pairs)
