"""How meetings ended: remembered by who was asked for them, for a caller that lost the last message."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from peer.errors import Unreachable
from peer.net.base import Network
from peer.wire.peer_pb2 import Inquiry, Message, Outcome

REMEMBERED = 256
INQUIRIES = 3
DIAL_S = 5.0
ANSWER_S = 10.0
PAUSE_S = 0.2


class Endings:
    """The endings of the last meetings, by their ids."""

    def __init__(self) -> None:
        self._applied: OrderedDict[bytes, bool] = OrderedDict()

    def __contains__(self, meeting_id: bytes) -> bool:
        return meeting_id in self._applied

    def remember(self, meeting_id: bytes, applied: bool) -> None:
        """Keep how a meeting ended; the oldest is forgotten."""
        self._applied[meeting_id] = applied
        while len(self._applied) > REMEMBERED:
            self._applied.popitem(last=False)

    def of(self, meeting_id: bytes) -> bool | None:
        """Return whether a meeting's correction was applied, None for one that isn't remembered."""
        return self._applied.get(meeting_id)


def told(applied: bool | None) -> Message:
    """Return an ending as the answer to an inquiry."""
    ending = Outcome.UNKNOWN if applied is None else Outcome.APPLIED if applied else Outcome.UNTOUCHED
    return Message(outcome=Outcome(ending=ending))


async def inquire(network: Network, address: str, meeting_id: bytes) -> bool | None:
    """Ask the other side whether a meeting's correction was applied; None where it is gone, or doesn't know."""
    for attempt in range(INQUIRIES):
        try:
            stream = await network.dial(address, DIAL_S)
            try:
                await stream.send(Message(inquiry=Inquiry(meeting_id=meeting_id)), ANSWER_S)
                message = await stream.receive(ANSWER_S)
            finally:
                await stream.close()
        except Unreachable:
            await asyncio.sleep(PAUSE_S * 2**attempt)
            continue
        if not isinstance(message, Message) or message.outcome.ending == Outcome.UNKNOWN:
            return None
        return message.outcome.ending == Outcome.APPLIED
    return None
