"""One exchange as a state machine: messages and outcomes in, messages and one correction out. No sockets, no clock.

The machine is driven from two sides. The network hands it messages (`receive`) and bad news (`lost`); training lets it
read the live weights at a step boundary (`advance`), where it does every product that what has arrived so far allows.
All tensors flow through the three legs (see `peer.core.codec`) independently of one another, so that on a slow link
arithmetic and all three legs overlap.

What may happen in which phase is `TABLE`; a pair that is not in it is a `ProtocolError`, and nothing is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum

from torch import Tensor, linalg

from peer.core import codec as codecs
from peer.core.change import Change, Correction
from peer.core.codec import Codec, Found
from peer.core.decision import Decision
from peer.core.legs import Inbox, Outbox
from peer.core.part import Part
from peer.core.prior import Guess
from peer.errors import ProtocolError
from peer.wire.peer_pb2 import Abort, Answer, Commit, Done, Frame, Message

BUDGET_BYTES = 64 * 1024 * 1024


class Phase(Enum):
    """Where an exchange stands. The last four are endings."""

    OFFERED = "offered"  # caller: offer sent
    PROBING = "probing"  # caller: legs 1 and 3 go out, leg 2 comes in
    SETTLING = "settling"  # caller: all sent, Commit too; waits for Done
    SERVING = "serving"  # callee: accepted; legs 1 and 3 come in, leg 2 goes out
    APPLIED = "applied"
    DECLINED = "declined"
    ABORTED = "aborted"
    DOUBTED = "doubted"  # caller: everything was sent, but how it ended is not known


class Cue(Enum):
    """What can happen to an exchange."""

    ACCEPT = "accept"  # an Answer that accepts
    DECLINE = "decline"  # an Answer that declines
    FRAME = "frame"
    SENT = "sent"  # our last frame and Commit are on their way
    COMMIT = "commit"
    DONE = "done"
    ABORT = "abort"  # the partner's, or our own: a message that breaks the rules, a correction that is refused
    LOST = "lost"  # the stream ended, or was silent past its deadline


TABLE: dict[tuple[Phase, Cue], Phase] = {
    (Phase.OFFERED, Cue.ACCEPT): Phase.PROBING,
    (Phase.OFFERED, Cue.DECLINE): Phase.DECLINED,
    (Phase.OFFERED, Cue.ABORT): Phase.ABORTED,
    (Phase.OFFERED, Cue.LOST): Phase.ABORTED,
    (Phase.PROBING, Cue.FRAME): Phase.PROBING,
    (Phase.PROBING, Cue.SENT): Phase.SETTLING,
    (Phase.PROBING, Cue.ABORT): Phase.ABORTED,
    (Phase.PROBING, Cue.LOST): Phase.ABORTED,
    (Phase.SETTLING, Cue.DONE): Phase.APPLIED,
    (Phase.SETTLING, Cue.ABORT): Phase.ABORTED,
    (Phase.SETTLING, Cue.LOST): Phase.DOUBTED,
    (Phase.DOUBTED, Cue.DONE): Phase.APPLIED,
    (Phase.DOUBTED, Cue.ABORT): Phase.ABORTED,
    (Phase.SERVING, Cue.FRAME): Phase.SERVING,
    (Phase.SERVING, Cue.COMMIT): Phase.APPLIED,
    (Phase.SERVING, Cue.ABORT): Phase.ABORTED,
    (Phase.SERVING, Cue.LOST): Phase.ABORTED,
}
ENDINGS = frozenset({Phase.APPLIED, Phase.DECLINED, Phase.ABORTED, Phase.DOUBTED})

_CUES = {"frame": Cue.FRAME, "commit": Cue.COMMIT, "done": Cue.DONE, "abort": Cue.ABORT}


Read = Callable[[str], Tensor]
"""Parameter name → the live tensor that is exchanged."""

Admit = Callable[[float, float], Decision]
"""‖C‖ and the norm of one's own model → whether the correction may be applied."""


class Exchange:
    """What caller and callee share: the phase, the changes so far, and how messages move them."""

    def __init__(self, phase: Phase, parts: list[Part], codec: Codec, admit: Admit) -> None:
        self.phase = phase
        self.reason = ""
        self.detail = ""
        self._parts = parts
        self._codec = codec
        self._admit = admit
        self._changes: dict[int, Change] = {}
        self._squares, self._model_squares = 0.0, 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen, but for a doubt that is resolved."""
        return self.phase in ENDINGS

    @property
    def correction(self) -> Correction:
        """What both sides apply; only of an exchange that is `APPLIED`."""
        if self.phase is not Phase.APPLIED:
            raise RuntimeError(f"there is no correction in phase {self.phase.value}")
        return Correction(tuple(self._changes[index] for index in range(len(self._parts))))

    def receive(self, message: Message) -> list[Message]:
        """Take a message in and return what to say at once; a broken rule aborts, and raises `ProtocolError`."""
        try:
            return self._receive(message)
        except ProtocolError as error:
            self._give_up(error.reason, error.detail)
            raise

    def lost(self, reason: str, detail: str = "") -> None:
        """Note that the stream ended or fell silent; without effect once the exchange has ended."""
        if not self.ended:
            self._end(Cue.LOST, reason, detail)

    def abort(self, reason: str, detail: str = "") -> Message:
        """Give up, for a reason of our own; return what to tell the partner."""
        self._give_up(reason, detail)
        return Message(abort=Abort(reason=reason, detail=detail))

    def resolve(self, applied: bool) -> None:
        """Learn how a doubted exchange ended on the other side."""
        self._step(Cue.DONE if applied else Cue.ABORT)

    def _receive(self, message: Message) -> list[Message]:
        body = message.WhichOneof("body")
        if body == "answer":
            self._answered(message.answer)
            return []
        cue = _CUES.get(body or "")
        if cue is None:
            raise ProtocolError("malformed", f"a message {body!r} has no place in an exchange")
        if (self.phase, cue) not in TABLE:
            raise ProtocolError("late" if self.ended else "malformed", f"{body} in phase {self.phase.value}")
        if cue is Cue.ABORT:
            self._end(cue, message.abort.reason[:64], message.abort.detail[:256])
            return []
        if cue is Cue.FRAME:
            self._take(message.frame)
        elif cue is Cue.COMMIT:
            self._check_whole()
        self._step(cue)
        return [Message(done=Done())] if cue is Cue.COMMIT else []

    def _answered(self, answer: Answer) -> None:
        self._step(Cue.ACCEPT if answer.accepted else Cue.DECLINE)
        if not answer.accepted:
            self.reason, self.detail = answer.reason[:64], answer.detail[:256]

    def _take(self, frame: Frame) -> None:
        raise NotImplementedError

    def _check_whole(self) -> None:
        """Raise `ProtocolError` unless every change is there and together they are in proportion."""
        if len(self._changes) < len(self._parts):
            raise ProtocolError("truncated", f"{len(self._changes)} of {len(self._parts)} tensors arrived")
        decision = self._admit(math.sqrt(self._squares), math.sqrt(self._model_squares))
        if not decision:
            raise ProtocolError(decision.reason, decision.detail)

    def _give_up(self, reason: str, detail: str) -> None:
        # once Commit is out the partner may have applied, whatever we think of what it says now
        if not self.ended:
            self._end(Cue.LOST if self.phase is Phase.SETTLING else Cue.ABORT, reason, detail)

    def _weigh(self, x: Tensor) -> Tensor:
        self._model_squares += float(linalg.vector_norm(x.detach())) ** 2
        return x

    def _keep(self, index: int, change: Change) -> None:
        self._squares += change.squared_norm()
        self._changes[index] = change

    def _end(self, cue: Cue, reason: str, detail: str) -> None:
        self._step(cue)
        self.reason, self.detail = reason, detail

    def _step(self, cue: Cue) -> None:
        if (self.phase, cue) not in TABLE:
            raise ProtocolError("late" if self.ended else "malformed", f"{cue.value} in phase {self.phase.value}")
        self.phase = TABLE[self.phase, cue]


class Caller(Exchange):
    """The side that offered: legs 1 and 3 are its own. It applies −w C on Done."""

    def __init__(self, parts: list[Part], codec: Codec, guesses: Mapping[str, Guess], admit: Admit) -> None:
        super().__init__(Phase.OFFERED, parts, codec, admit)
        self._guesses = guesses
        self._probed = 0
        self._probes, self._answers = Outbox(1), Outbox(3)
        self._replies = Inbox(2, [part.leg_bytes[1] for part in parts])

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        return self.phase is Phase.PROBING and (self._probed < len(self._parts) or bool(self._replies.ready))

    def advance(self, read: Read, budget_bytes: int = BUDGET_BYTES) -> list[Message]:
        """At a step boundary: do the products that are due, at most budget_bytes of them; return what to send."""
        out: list[Message] = []
        while self._replies.ready and self.phase is Phase.PROBING:
            index, payload = self._replies.ready.pop(0)
            part = self._parts[index]
            sent, change = codecs.answer(part, self._codec, read(part.name), payload)
            self._keep(index, change)
            out += self._answers.put(sent)
        out += self._answers.flush()
        while self.phase is Phase.PROBING and self._probed < len(self._parts) and budget_bytes > 0:
            part = self._parts[self._probed]
            x = self._weigh(read(part.name))
            sent = codecs.probe(part, self._codec, x, self._guesses[part.name])
            self._probed += 1
            budget_bytes -= len(sent)
            out += self._probes.put(sent)
        out += self._probes.flush()
        if self.phase is Phase.PROBING and len(self._changes) == len(self._parts):
            self._check_whole()
            out.append(Message(commit=Commit()))
            self._step(Cue.SENT)
        return out

    def _take(self, frame: Frame) -> None:
        self._replies.take(frame)


class Callee(Exchange):
    """The side that accepted: leg 2 is its own. It applies +w C on Commit."""

    def __init__(self, parts: list[Part], codec: Codec, admit: Admit) -> None:
        super().__init__(Phase.SERVING, parts, codec, admit)
        self._found: dict[int, Found] = {}
        self._replies = Outbox(2)
        self._probes = Inbox(1, [part.leg_bytes[0] for part in parts])
        self._answers = Inbox(3, [part.leg_bytes[2] for part in parts])

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        return self.phase is Phase.SERVING and bool(self._probes.ready)

    def advance(self, read: Read, budget_bytes: int = BUDGET_BYTES) -> list[Message]:
        """At a step boundary: do the products that are due, at most budget_bytes of them; return what to send."""
        out: list[Message] = []
        while self._probes.ready and self.phase is Phase.SERVING and budget_bytes > 0:
            index, payload = self._probes.ready.pop(0)
            part = self._parts[index]
            x = self._weigh(read(part.name))
            sent, found = codecs.reply(part, self._codec, x, payload)
            if part.leg_bytes[2]:
                self._found[index] = found
            else:
                self._keep(index, codecs.settle(part, self._codec, found, bytearray()))
            budget_bytes -= len(sent)
            out += self._replies.put(sent)
        return out + list(self._replies.flush())

    def _take(self, frame: Frame) -> None:
        if frame.leg == 1:
            self._probes.take(frame)
            return
        self._answers.take(frame)
        for index, payload in self._answers.ready:
            if index not in self._found:
                raise ProtocolError("malformed", "a difference arrived before the factor it answers was sent")
            self._keep(index, codecs.settle(self._parts[index], self._codec, self._found.pop(index), payload))
        self._answers.ready.clear()
