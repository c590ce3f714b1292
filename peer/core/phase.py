"""Where an exchange stands, and what may happen to it there: a pair that is not in `TABLE` is a `ProtocolError`."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where an exchange stands. The last three are endings."""

    PROBING = "probing"  # caller: accepted; Cut, legs 1 and 3 go out, leg 2 comes in
    SETTLING = "settling"  # caller: all sent, Commit too; waits for Done
    ACCEPTED = "accepted"  # callee: has said yes; waits for Cut
    SERVING = "serving"  # callee: legs 1 and 3 come in, leg 2 goes out
    APPLIED = "applied"
    ABORTED = "aborted"
    DOUBTED = "doubted"  # caller: everything was sent, but how it ended is not known


class Cue(Enum):
    """What can happen to an exchange."""

    CUT = "cut"
    FRAME = "frame"
    PROGRESS = "progress"
    SENT = "sent"  # our last frame and Commit are on their way
    COMMIT = "commit"  # and every product is done
    DONE = "done"
    ABORT = "abort"  # the partner's, or our own: a message that breaks the rules, a correction that is refused
    LOST = "lost"  # the stream ended, or was silent past its deadline


TABLE: dict[tuple[Phase, Cue], Phase] = {
    (Phase.PROBING, Cue.FRAME): Phase.PROBING,
    (Phase.PROBING, Cue.PROGRESS): Phase.PROBING,
    (Phase.PROBING, Cue.SENT): Phase.SETTLING,
    (Phase.PROBING, Cue.ABORT): Phase.ABORTED,
    (Phase.PROBING, Cue.LOST): Phase.ABORTED,
    (Phase.SETTLING, Cue.PROGRESS): Phase.SETTLING,
    (Phase.SETTLING, Cue.DONE): Phase.APPLIED,
    (Phase.SETTLING, Cue.ABORT): Phase.ABORTED,
    (Phase.SETTLING, Cue.LOST): Phase.DOUBTED,
    (Phase.DOUBTED, Cue.DONE): Phase.APPLIED,
    (Phase.DOUBTED, Cue.ABORT): Phase.ABORTED,
    (Phase.ACCEPTED, Cue.CUT): Phase.SERVING,
    (Phase.ACCEPTED, Cue.ABORT): Phase.ABORTED,
    (Phase.ACCEPTED, Cue.LOST): Phase.ABORTED,
    (Phase.SERVING, Cue.FRAME): Phase.SERVING,
    (Phase.SERVING, Cue.PROGRESS): Phase.SERVING,
    (Phase.SERVING, Cue.COMMIT): Phase.APPLIED,
    (Phase.SERVING, Cue.ABORT): Phase.ABORTED,
    (Phase.SERVING, Cue.LOST): Phase.ABORTED,
}
ENDINGS = frozenset({Phase.APPLIED, Phase.ABORTED, Phase.DOUBTED})

CUES = {
    "cut": Cue.CUT,
    "progress": Cue.PROGRESS,
    "commit": Cue.COMMIT,
    "done": Cue.DONE,
    "abort": Cue.ABORT,
}
"""What a message is, by its body."""
