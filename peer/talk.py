"""One meeting, as this side sees it: from the offer to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from peer.conversation import Conversation
from peer.core.admit import admit_correction
from peer.core.decision import Decision
from peer.core.exchange import Callee, Caller
from peer.core.gauge import Gauge
from peer.core.phase import Phase
from peer.core.terms import Terms
from peer.net.base import Stream


@dataclass
class Talk:
    """One meeting.

    terms: None until both sides have agreed. declined: why it did not come about, if the partner said no, and for how
    long not to ask again (rest_s). broken: why it ended before the exchange began, if it did. rtt_s: of the invitation,
    None for the callee. model_norm: L2 norm of this side's weights. computed_s: what it took to prepare it.
    """

    role: str
    partner: str
    meeting_id: bytes
    terms: Terms | None = None
    began_s: float = field(default_factory=time.monotonic)
    partner_round: int = 0
    patience_ms: int = 0
    rtt_s: float | None = None
    stream: Stream | None = None
    exchange: Caller | Callee | None = None
    conversation: Conversation | None = None
    declined: Decision | None = None
    rest_s: float = 0.0
    broken: Decision | None = None
    model_norm: float = 0.0
    computed_s: float = 0.0

    @property
    def applied(self) -> bool:
        """Whether it ended as it should."""
        return self.exchange is not None and self.exchange.phase is Phase.APPLIED

    @property
    def doubted(self) -> bool:
        """Whether it is not known how it ended."""
        return self.exchange is not None and self.exchange.phase is Phase.DOUBTED

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return (self.stream.sent_bytes, self.stream.received_bytes) if self.stream else (0, 0)

    @property
    def all_computed_s(self) -> float:
        """What a processor core has worked for it."""
        return self.computed_s + (self.conversation.computed_s if self.conversation else 0.0)

    @property
    def flowing_s(self) -> float:
        """For how long frames came and went."""
        return self.conversation.flowing_s if self.conversation else 0.0

    @property
    def gauge(self) -> Gauge:
        """What it showed of the link."""
        return self.conversation.gauge if self.conversation else Gauge()

    def admit(self, norm: float) -> Decision:
        """Decide whether a correction of this norm may be applied."""
        return admit_correction(norm, self.model_norm)

    def lost(self, reason: str, detail: str) -> None:
        """Note that the partner can't be reached any more."""
        if self.exchange is not None:
            self.exchange.lost(reason, detail)
        elif self.broken is None:
            self.broken = Decision(False, reason, detail)

    def abandon(self) -> None:
        """End it without a correction, since this peer leaves; one that has not begun ends by itself."""
        if self.conversation is not None:
            self.conversation.abandon()
        elif self.exchange is not None:
            self.exchange.lost("stopping", "this peer is leaving the swarm")

    def why(self) -> Decision:
        """Return why nothing was applied."""
        if self.doubted:
            detail = self.exchange.detail if self.exchange else ""
            return Decision(False, "in-doubt", detail)
        if self.exchange is None:
            known = [decision for decision in (self.declined, self.broken) if decision is not None]  # both are false
            return known[0] if known else Decision(False, "lost", "this peer ended it before it began")
        return Decision(False, self.exchange.reason or "lost", self.exchange.detail)
