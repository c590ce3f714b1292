"""One exchange as a state machine: messages and outcomes in, messages and one correction out. No sockets, no clock.

The machine is driven from two sides. The network hands it messages (`receive`) and bad news (`lost`) and asks what to
say next (`say`); a worker lets it do the products that what has arrived so far allows (`advance`), a small batch at a
time, and hands it weights that stand still during each. `advance` may run in a thread of its own, everything else
belongs to one. All tensors flow through the three legs (see `peer.core.codec`) independently of one another, so that
arithmetic and all three legs overlap.

What may happen in which phase is `peer.core.phase`'s; anything else is a `ProtocolError`, and nothing is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from peer.core import codec as codecs
from peer.core.change import Change, Correction
from peer.core.codec import Codec, Found
from peer.core.decision import Decision
from peer.core.frame import Frame, Said
from peer.core.legs import Inbox, Outbox
from peer.core.part import Part
from peer.core.phase import CUES, ENDINGS, TABLE, Cue, Phase
from peer.core.prior import Guess
from peer.errors import ProtocolError
from peer.wire.peer_pb2 import Abort, Commit, Cut, Done, Message, Progress

CPU = torch.device("cpu")

BATCH = 2**22
"""Numbers of the weights that one batch of products reads, or a few more: some milliseconds of work."""

BACKLOG_BYTES = 4 * 2**20
"""No more products are done ahead of what the link takes, and no more is told to have arrived ahead of the products."""


Read = Callable[[str, Callable[[Tensor], Tensor]], Tensor]
"""Apply a function to what is exchanged of a parameter, by its name; it stands still meanwhile."""

Admit = Callable[[float], Decision]
"""‖C‖ → whether the correction may be applied."""


class Exchange:
    """What caller and callee share: the phase, the changes so far, and how messages move them.

    device: where the correction is to be. said_bytes, heard_bytes: of the payloads of frames. arrived_bytes: of those
    that we said, as the partner tells. Where much waits for its products the partner is not told of it yet: so it stops
    sending frames, and all else that it says is heard meanwhile.
    """

    def __init__(self, phase: Phase, codec: Codec, parts: Sequence[Part], admit: Admit, device: torch.device) -> None:
        self.phase = phase
        self.reason = ""
        self.detail = ""
        self.said_bytes = self.heard_bytes = self.arrived_bytes = 0
        self._told_bytes = 0
        self._codec = codec
        self._parts = parts
        self._admit = admit
        self._device = device
        self._changes: dict[int, Change] = {}
        self._squares = 0.0
        self._inboxes: tuple[Inbox, ...] = ()
        self._outboxes: tuple[Outbox, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen, but for a doubt that is resolved."""
        return self.phase in ENDINGS

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        raise NotImplementedError

    @property
    def correction(self) -> Correction:
        """What both sides apply; only of an exchange that is `APPLIED`."""
        if self.phase is not Phase.APPLIED:
            raise RuntimeError(f"there is no correction in phase {self.phase.value}")
        return Correction(tuple(self._changes[index] for index in range(len(self._parts))))

    @property
    def norm(self) -> float:
        """L2 norm of what is known of the correction."""
        return math.sqrt(self._squares)

    def advance(self, read: Read) -> None:
        """Do a batch of the products that are due; raises `ProtocolError` on what can't be right."""
        raise NotImplementedError

    def say(self, most_bytes: int) -> Said | None:
        """Return what to say next, a frame of at most so many bytes; None if there is nothing to say for now.

        Raises `ProtocolError` when the correction that came of it all may not be applied.
        """
        for outbox in self._outboxes:
            frame = None if self.ended else outbox.take(most_bytes)
            if frame is not None:
                self.said_bytes += len(frame.payload)
                return frame
        return None

    @property
    def untold(self) -> bool:
        """Whether more has arrived than the partner was told."""
        return not self.ended and self._welcome_bytes > self._told_bytes

    def progress(self) -> Message | None:
        """Return what tells the partner how much has arrived, if anything has since it was last told."""
        if not self.untold:
            return None
        self._told_bytes = self._welcome_bytes
        return Message(progress=Progress(bytes=self._told_bytes))

    @property
    def _welcome_bytes(self) -> int:
        waiting = sum(inbox.ready_bytes for inbox in self._inboxes)
        return self.heard_bytes - max(0, waiting - BACKLOG_BYTES)

    def receive(self, said: Said) -> None:
        """Take in what the partner said; a broken rule aborts, and raises `ProtocolError`."""
        try:
            self._receive(said)
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

    def _receive(self, said: Said) -> None:
        body = "frame" if isinstance(said, Frame) else said.WhichOneof("body")
        cue = Cue.FRAME if isinstance(said, Frame) else CUES.get(body or "")
        if cue is None:
            raise ProtocolError("malformed", f"a message {body!r} has no place in an exchange")
        if (self.phase, cue) not in TABLE:
            raise ProtocolError("late" if self.ended else "malformed", f"{body} in phase {self.phase.value}")
        if isinstance(said, Frame):
            self._take(said)
            self.heard_bytes += len(said.payload)
        elif cue is Cue.ABORT:
            self._end(cue, said.abort.reason[:64], said.abort.detail[:256])
        elif cue is Cue.PROGRESS:
            self._arrived(said.progress.bytes)
        elif cue is Cue.CUT:
            self._begin(said.cut)
        elif cue is Cue.COMMIT:
            self._committed()
        else:
            self._step(cue)

    def _take(self, frame: Frame) -> None:
        raise NotImplementedError

    def _begin(self, cut: Cut) -> None:
        raise NotImplementedError

    def _committed(self) -> None:
        raise NotImplementedError

    def _arrived(self, bytes: int) -> None:
        if not self.arrived_bytes <= bytes <= self.said_bytes:
            raise ProtocolError("malformed", f"{bytes} bytes are said to have arrived of {self.said_bytes}")
        self.arrived_bytes = bytes

    @property
    def _complete(self) -> bool:
        """Whether all changes are there; asked before there is nothing to say: what is sent for one comes before it."""
        return len(self._changes) == len(self._parts)

    def _check_proportion(self) -> None:
        decision = self._admit(self.norm)
        if not decision:
            raise ProtocolError(decision.reason, decision.detail)

    def _give_up(self, reason: str, detail: str) -> None:
        # once Commit is out the partner may have applied, whatever we think of what it says now
        if not self.ended:
            self._end(Cue.LOST if self.phase is Phase.SETTLING else Cue.ABORT, reason, detail)

    def _keep(self, index: int, change: Change) -> None:
        self._squares += change.squared_norm()
        self._changes[index] = change.to(self._device)

    def _end(self, cue: Cue, reason: str, detail: str) -> None:
        self._step(cue)
        self.reason, self.detail = reason, detail

    def _step(self, cue: Cue) -> None:
        if (self.phase, cue) not in TABLE:
            raise ProtocolError("late" if self.ended else "malformed", f"{cue.value} in phase {self.phase.value}")
        self.phase = TABLE[self.phase, cue]


class Caller(Exchange):
    """The side that offered, once its offer is accepted: legs 1 and 3 are its own. It applies −w C on Done."""

    def __init__(
        self,
        codec: Codec,
        ranks: Sequence[int],
        parts: Sequence[Part],
        guesses: Sequence[Guess],
        admit: Admit,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(Phase.PROBING, codec, parts, admit, device)
        self._cut: Cut | None = Cut(ranks=ranks)
        self._guesses = guesses
        self._probed = 0
        self._probes, self._answers = Outbox(1), Outbox(3)
        self._outboxes = (self._answers, self._probes)
        self._replies = Inbox(2, [part.leg_bytes[1] for part in parts])
        self._inboxes = (self._replies,)

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        return self.phase is Phase.PROBING and (bool(self._replies.ready) or self._may_probe)

    def advance(self, read: Read) -> None:
        """Do a batch of the products that are due."""
        left = BATCH
        while self.due and left > 0:
            # the callee has more to do, and nothing without probes
            if not self._may_probe or self._replies.ready_bytes > BACKLOG_BYTES // 2:
                index, payload = self._replies.next()
                part = self._parts[index]
                sent, change = codecs.answer(part, self._codec, partial(read, part.name), payload)
                self._answers.put(sent)
                self._keep(index, change)
            else:
                part = self._parts[self._probed]
                look, guess = partial(read, part.name), self._guesses[self._probed]
                self._probes.put(codecs.probe(part, self._codec, look, guess))
                self._probed += 1
            left -= part.rows * part.columns

    def say(self, most_bytes: int) -> Said | None:
        """Say Cut first, and Commit last."""
        if self._cut is not None:
            said, self._cut = Message(cut=self._cut), None
            return said
        complete = self._complete
        frame = super().say(most_bytes)
        if frame is None and complete and self.phase is Phase.PROBING:
            self._check_proportion()
            self._step(Cue.SENT)
            return Message(commit=Commit())
        return frame

    @property
    def _may_probe(self) -> bool:
        return self._probed < len(self._parts) and self._probes.backlog_bytes < BACKLOG_BYTES

    def _take(self, frame: Frame) -> None:
        self._replies.take(frame)


class Callee(Exchange):
    """The side that accepted: leg 2 is its own. It applies +w C once it has said Done.

    cut: makes parts of ranks, or raises `ProtocolError`.
    """

    def __init__(
        self,
        codec: Codec,
        cut: Callable[[Sequence[int]], Sequence[Part]],
        admit: Admit,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(Phase.ACCEPTED, codec, (), admit, device)
        self._cut = cut
        self._found: dict[int, Found] = {}
        self._replies, self._probes, self._answers = Outbox(2), Inbox(1, []), Inbox(3, [])
        self._outboxes = (self._replies,)
        self._commit = False

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        return self.phase is Phase.SERVING and (bool(self._answers.ready) or self._may_reply)

    def advance(self, read: Read) -> None:
        """Do a batch of the products that are due."""
        left = BATCH
        while self.due and left > 0:
            if self._answers.ready:
                index, payload = self._answers.next()
                if index not in self._found:
                    raise ProtocolError("malformed", "a difference arrived before the factor it answers was sent")
                part = self._parts[index]
                self._keep(index, codecs.settle(part, self._codec, self._found.pop(index), payload))
                left -= (part.rows + part.columns) * part.rank
                continue
            index, payload = self._probes.next()
            part = self._parts[index]
            sent, found = codecs.reply(part, self._codec, partial(read, part.name), payload)
            self._replies.put(sent)
            if part.leg_bytes[2]:
                self._found[index] = found
            else:
                self._keep(index, codecs.settle(part, self._codec, found, b""))
            left -= part.rows * part.columns

    def say(self, most_bytes: int) -> Said | None:
        """Say Done last, once Commit is there and all is done."""
        complete = self._complete
        frame = super().say(most_bytes)
        if frame is None and complete and self._commit and self.phase is Phase.SERVING:
            self._check_proportion()
            self._step(Cue.COMMIT)
            return Message(done=Done())
        return frame

    @property
    def _may_reply(self) -> bool:
        return bool(self._probes.ready) and self._replies.backlog_bytes < BACKLOG_BYTES

    def _begin(self, cut: Cut) -> None:
        self._parts = self._cut(cut.ranks)
        self._probes = Inbox(1, [part.leg_bytes[0] for part in self._parts])
        self._answers = Inbox(3, [part.leg_bytes[2] for part in self._parts])
        self._inboxes = (self._probes, self._answers)
        self._step(Cue.CUT)

    def _take(self, frame: Frame) -> None:
        (self._probes if frame.leg == 1 else self._answers).take(frame)

    def _committed(self) -> None:
        if not (self._probes.complete and self._answers.complete):
            raise ProtocolError("truncated", "the caller commits before all of its legs have arrived")
        self._commit = True
