"""Accept or refuse: an offer to meet, and the correction that comes of a meeting. Every refusal says why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from peer.core.decision import ALLOWED, Decision
from peer.wire.peer_pb2 import Offer

LONGEST_ID = 128
MEETING_ID_BYTES = 16
LARGEST_WEIGHT = 0.5
LONGEST_PATIENCE_MS = 600_000


@dataclass(frozen=True)
class Standing:
    """Where this peer stands when an offer comes in.

    run_id, origin, codec: of the run, which every partner must share. max_lag: rounds that may lie between partners.
    protocol: version of the wire contract.
    """

    run_id: str
    origin: str
    peer_id: str
    round: int
    max_lag: int
    codec: str
    protocol: int = 1


def admit_offer(offer: Offer, mine: Standing, busy: bool, offering_to: str | None) -> Decision:
    """Decide on an offer.

    busy: we are in a meeting; an offer of ours that is not answered yet is not one. offering_to: the peer that has it.
    Reasons, in the order in which they are looked at: "protocol", "malformed", "self", "run", "origin", "codec", "lag",
    "busy", "crossing". Crossing offers: the smaller peer id stays the caller and its offer is accepted; the other's is
    refused, by this function on both sides. Only one meeting at a time: while we offer to a third peer we are busy.
    """
    if offer.protocol != mine.protocol:
        detail = f"the offer speaks protocol {offer.protocol}, we speak {mine.protocol}; the older side must upgrade"
        return Decision(False, "protocol", detail)
    # Not `or`: a refusal is false.
    refusals = (_malformed(offer), _mismatch(offer, mine), _engaged(offer, mine, busy, offering_to))
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
    if not 0 < offer.weight <= LARGEST_WEIGHT:  # refuses NaN too
        faults.append(f"weight {offer.weight:g} is not above 0 and at most {LARGEST_WEIGHT:g}")
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
    if offer.codec != mine.codec:
        detail = f"the offer wants codec {offer.codec:.32}, the run uses {mine.codec}; use that"
        return Decision(False, "codec", detail)
    lag = offer.round - mine.round
    if abs(lag) > mine.max_lag:
        side = "we have to catch up" if lag > 0 else "the caller has to catch up"
        detail = f"the offer is at round {offer.round}, we are at {mine.round}, {mine.max_lag} may lie between; {side}"
        return Decision(False, "lag", detail)
    return None


def _engaged(offer: Offer, mine: Standing, busy: bool, offering_to: str | None) -> Decision | None:
    """Find what else this peer is doing."""
    if busy:
        return Decision(False, "busy", "we are in another meeting; ask someone else, or again in a moment")
    if offering_to is None or (offering_to == offer.peer_id and offer.peer_id < mine.peer_id):
        return None
    if offering_to == offer.peer_id:
        return Decision(False, "crossing", "our own offer to the caller is on its way and goes first; answer that one")
    return Decision(False, "busy", "we are offering to another peer; ask someone else, or again in a moment")


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
