"""Accept or refuse: an offer to meet, and the correction that comes of a meeting. Every refusal says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peer.core.decision import ALLOWED, Decision
from peer.wire.peer_pb2 import Answer, Offer

LONGEST_ID = 128
MEETING_ID_BYTES = 16
LARGEST_WEIGHT = 0.5
LONGEST_PATIENCE_MS = 600_000


@dataclass(frozen=True)
class Standing:
    """Where this peer stands when an offer comes in.

    run_id, origin: which every partner must share. codecs: that the run allows. max_lag: rounds that may lie between
    partners. protocol: version of the wire contract.
    """

    run_id: str
    origin: str
    peer_id: str
    round: int
    max_lag: int
    codecs: Sequence[str]
    protocol: int = 1


def admit_offer(offer: Offer, mine: Standing, busy: bool, offering: bool) -> Decision:
    """Decide on an offer.

    busy: no seat is free, or we are in a meeting with this caller. offering: an offer of ours to this caller is not
    answered yet. Reasons, in the order in which they are looked at: "protocol", "malformed", "self", "run", "origin",
    "codec", "lag", "busy", "crossing". Crossing offers: the smaller peer id stays the caller and its offer is accepted;
    the other's is refused, by this function on both sides.
    """
    if offer.protocol != mine.protocol:
        detail = f"the offer speaks protocol {offer.protocol}, we speak {mine.protocol}; the older side must upgrade"
        return Decision(False, "protocol", detail)
    # Not `or`: a refusal is false.
    refusals = (_malformed(offer), _mismatch(offer, mine), _engaged(offer, mine, busy, offering))
    return next((refusal for refusal in refusals if refusal is not None), ALLOWED)


def _malformed(offer: Offer) -> Decision | None:
    """Find what no honest peer would send."""
    faults = [
        f"{field} has {len(text)} characters, 1 to {LONGEST_ID} printable ones are allowed"
        for field in ("run_id", "origin", "peer_id", "codec")
        if not 1 <= len(text := getattr(offer, field)) <= LONGEST_ID or not (text.isascii() and text.isprintable())
    ]
    if len(offer.meeting_id) != MEETING_ID_BYTES:
        faults.append(f"meeting_id has {len(offer.meeting_id)} bytes, not {MEETING_ID_BYTES}")
    faults += _unfair(offer)
    if offer.patience_ms > LONGEST_PATIENCE_MS:
        faults.append(f"patience_ms {offer.patience_ms} is more than {LONGEST_PATIENCE_MS}")
    return Decision(False, "malformed", f"the offer is malformed: {faults[0]}; upgrade the caller") if faults else None


def _mismatch(offer: Offer, mine: Standing) -> Decision | None:
    """Find what the two peers would have to share and do not."""
    if offer.peer_id == mine.peer_id:
        detail = "the offer bears our own peer id; give each daemon its own home folder"
        return Decision(False, "self", detail)
    if offer.run_id != mine.run_id:
        detail = f"the offer is for run {offer.run_id:.12}, this is run {mine.run_id:.12}; join with the same manifest"
        return Decision(False, "run", detail)
    if offer.origin != mine.origin:
        detail = (
            f"the offer starts from weights {offer.origin:.12}, we from {mine.origin:.12}; "
            "start anew from the run's first weights"
        )
        return Decision(False, "origin", detail)
    if offer.codec not in mine.codecs:
        detail = f"the offer wants codec {offer.codec:.32}, the run uses {' or '.join(mine.codecs)}; use that"
        return Decision(False, "codec", detail)
    lag = offer.round - mine.round
    if abs(lag) > mine.max_lag:
        side = "we have to catch up" if lag > 0 else "the caller has to catch up"
        detail = f"the offer is at round {offer.round}, we are at {mine.round}, {mine.max_lag} may lie between; {side}"
        return Decision(False, "lag", detail)
    return None


def _engaged(offer: Offer, mine: Standing, busy: bool, offering: bool) -> Decision | None:
    """Find what else this peer is doing."""
    if busy:
        return Decision(False, "busy", "we are in other meetings; ask someone else, or again in a moment")
    if offering and offer.peer_id > mine.peer_id:
        return Decision(False, "crossing", "our own offer to the caller is on its way and goes first; answer that one")
    return None


def _unfair(said: Offer | Answer) -> list[str]:
    """Find wishes that no honest peer has."""
    faults = []
    if not 0 < said.weight <= LARGEST_WEIGHT:  # refuses NaN too
        faults.append(f"weight {said.weight:g} is not above 0 and at most {LARGEST_WEIGHT:g}")
    if said.budget_bytes < 1:
        faults.append("a budget of no bytes is none")
    return faults


def admit_answer(answer: Answer, codecs: Sequence[str]) -> Decision:
    """Decide whether an answer is a yes that a meeting can be held by; else the reason is the callee's, or "malformed".

    codecs: that the run allows.
    """
    if not answer.accepted:
        return Decision(False, answer.reason[:64] or "malformed", answer.detail[:256])
    faults = _unfair(answer)
    if answer.codec not in codecs:
        faults.append(f"codec {answer.codec:.32} is not the run's")
    return Decision(False, "malformed", f"the answer is malformed: {faults[0]}") if faults else ALLOWED


def admit_correction(norm: float, model_norm: float) -> Decision:
    """Decide whether a decoded correction may be applied.

    norm: L2 norm of C. model_norm: of this peer's own weights. Reasons: "non-finite", and "proportion" when C is larger
    than twice the model, which no two models of that size can differ by. A bound by the size of recent corrections
    would be tighter, but would shut out for good whoever was away for long, or one half of a swarm that was cut in two.
    """
    if not (math.isfinite(norm) and math.isfinite(model_norm)):
        return Decision(False, "non-finite", "the correction holds NaN or infinity; nothing of it is applied")
    if norm > 2 * model_norm:
        detail = f"correction norm {norm:.3g} exceeds 2 × that of the model, {model_norm:.3g}; nothing of it is applied"
        return Decision(False, "proportion", detail)
    return ALLOWED
