"""One meeting between two virtual peers: the daemon's exchange, both sides in one process, its bytes counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer.core.admit import MEETING_ID_BYTES, admit_correction
from peer.core.allocation import Allocation
from peer.core.change import Correction
from peer.core.codec import Codec
from peer.core.exchange import Callee, Caller, Phase, Read
from peer.core.gossip import Outer, exchanged
from peer.core.prior import Guess
from peer.core.state import State
from peer.errors import ProtocolError
from peer.wire.peer_pb2 import Answer, Message, Offer

_ID = "x" * 64
"""As long as a peer's id, and the hash of the first weights, at most are."""


@dataclass(frozen=True)
class Encounter:
    """What a meeting came to. Bytes: of all messages that a side sends, without what gRPC, TLS and TCP add.

    correction: None if the exchange was aborted, as when a model has diverged.
    """

    correction: Correction | None
    caller_bytes: int
    callee_bytes: int


def encounter(
    outer: Outer,
    allocation: Allocation,
    ranks: Sequence[int],
    guesses: Mapping[str, Guess],
    caller: State,
    callee: State,
) -> Encounter:
    """Hold one exchange of two States as they are now; applies nothing.

    ranks, guesses: what it is about, and what the caller starts from.
    """
    parts, codec = allocation.parts(ranks), allocation.codec
    asking = Caller(parts, codec, guesses, admit_correction)
    serving = Callee(parts, codec, admit_correction)
    asking.receive(Message(answer=Answer(accepted=True)))
    caller_bytes, callee_bytes = _invitation_bytes(codec, ranks)
    while asking.phase is not Phase.APPLIED:
        before = caller_bytes, callee_bytes
        try:
            spoken, replied = _turn(asking, serving, lambda name: exchanged(outer, caller, name))
            caller_bytes, callee_bytes = caller_bytes + spoken, callee_bytes + replied
            spoken, replied = _turn(serving, asking, lambda name: exchanged(outer, callee, name))
            caller_bytes, callee_bytes = caller_bytes + replied, callee_bytes + spoken
        except ProtocolError:
            return Encounter(None, caller_bytes, callee_bytes)
        if before == (caller_bytes, callee_bytes):
            raise RuntimeError(f"an exchange came to a standstill in phase {asking.phase.value}")
    return Encounter(asking.correction, caller_bytes, callee_bytes)


def _turn(speaker: Caller | Callee, listener: Caller | Callee, read: Read) -> tuple[int, int]:
    """Let one side do what is due and the other hear of it; return the bytes that each sent."""
    spoken = replied = 0
    for message in speaker.advance(read):
        spoken += message.ByteSize()
        for reply in listener.receive(message):
            replied += reply.ByteSize()
            speaker.receive(reply)
    return spoken, replied


def _invitation_bytes(codec: Codec, ranks: Sequence[int]) -> tuple[int, int]:
    """Return the size of an offer and of its answer."""
    meeting_id = bytes(MEETING_ID_BYTES)
    offer = Offer(
        protocol=3, run_id=_ID[:32], origin=_ID, peer_id=_ID, round=10**6, meeting_id=meeting_id, codec=codec.spec
    )
    offer.weight, offer.patience_ms = 0.5, 10**5
    offer.ranks.extend(ranks)
    answer = Answer(accepted=True, peer_id=_ID, round=10**6, patience_ms=10**5)
    return Message(offer=offer).ByteSize(), Message(answer=answer).ByteSize()
