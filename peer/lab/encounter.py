"""One meeting between two virtual peers: the daemon's exchange, both sides in one process, its bytes counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peer.core.admit import MEETING_ID_BYTES, admit_correction
from peer.core.allocation import Allocation
from peer.core.change import Correction
from peer.core.codec import Codec
from peer.core.exchange import Admit, Callee, Caller, Read
from peer.core.frame import packed
from peer.core.gossip import Outer, exchanged
from peer.core.legs import FRAME_BYTES
from peer.core.phase import Phase
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
    guesses: Sequence[Guess],
    caller: State,
    callee: State,
    budget_bytes: int | None = None,
) -> Encounter:
    """Hold one exchange of two States as they are now; applies nothing.

    ranks, guesses: what it is about, and what the caller starts from. budget_bytes: of all legs; None: the codec's.
    """
    codec, admit = allocation.codec, _proportionate(caller)
    asking = Caller(codec, ranks, allocation.parts(ranks, budget_bytes), guesses, admit)
    serving = Callee(codec, lambda cut: allocation.parts(cut, budget_bytes), admit)
    caller_bytes, callee_bytes = _invitation_bytes(codec)
    while asking.phase is not Phase.APPLIED:
        before = caller_bytes, callee_bytes
        try:
            caller_bytes += _turn(asking, serving, lambda name, product: product(exchanged(outer, caller, name)))
            callee_bytes += _turn(serving, asking, lambda name, product: product(exchanged(outer, callee, name)))
        except ProtocolError:
            return Encounter(None, caller_bytes, callee_bytes)
        if before == (caller_bytes, callee_bytes):
            raise RuntimeError(f"an exchange came to a standstill in phase {asking.phase.value}")
    return Encounter(asking.correction, caller_bytes, callee_bytes)


def _turn(speaker: Caller | Callee, listener: Caller | Callee, read: Read) -> int:
    """Let one side do what is due and the other hear of it; return the bytes that were said."""
    said_bytes = 0
    while True:
        said = speaker.say(FRAME_BYTES)
        if said is None and speaker.due:
            speaker.advance(read)
        elif said is None:
            return said_bytes
        else:
            said_bytes += len(packed(said))
            listener.receive(said)


def _proportionate(state: State) -> Admit:
    norm = math.sqrt(sum(float(weight.detach().norm()) ** 2 for weight in state.weights.values()))
    return lambda correction: admit_correction(correction, norm)


def _invitation_bytes(codec: Codec) -> tuple[int, int]:
    """Return the size of an offer and of its answer."""
    meeting_id = bytes(MEETING_ID_BYTES)
    offer = Offer(
        protocol=4, run_id=_ID[:32], origin=_ID, peer_id=_ID, round=10**6, meeting_id=meeting_id, codec=codec.spec
    )
    answer = Answer(accepted=True, peer_id=_ID, round=10**6, codec=codec.spec)
    for said in (offer, answer):
        said.weight, said.patience_ms, said.budget_bytes = 0.5, 10**5, 10**7
    return Message(offer=offer).ByteSize(), Message(answer=answer).ByteSize()
