"""Who is alive, given records and a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST_LIFE_S = 3600.0
"""A record that claims to live longer than this from now is not believed; records are renewed every few minutes."""


@dataclass(frozen=True)
class Member:
    """One live peer of a run, as its signed record says.

    addresses are "host:port", best first; expires_s is Unix time.
    """

    run_id: str
    peer_id: str
    addresses: tuple[str, ...]
    round: int
    shard: int
    expires_s: float


def live(members: Iterable[Member], run_id: str, now_s: float, me: str) -> list[Member]:
    """Return the other peers of a run that are alive, one record each, sorted by peer id.

    Drops our own records (me: our peer id), those of other runs, expired ones, and those that expire more than an
    hour from now. Of several records of one peer the one that expires last is the newest.
    """
    newest: dict[str, Member] = {}
    for member in members:
        if member.run_id != run_id or member.peer_id == me:
            continue
        if not now_s < member.expires_s <= now_s + LONGEST_LIFE_S:
            continue
        known = newest.get(member.peer_id)
        if known is None or (member.expires_s, member.round) > (known.expires_s, known.round):
            newest[member.peer_id] = member
    return [newest[peer_id] for peer_id in sorted(newest)]


def behind(members: Sequence[Member], round: int, max_lag: int) -> bool:
    """Tell whether a peer at this round is more than max_lag rounds behind the median of the live others.

    The median, so that fewer than half of them cannot lure a peer into throwing its state away.
    """
    return level(members, round) - round > max_lag


def level(members: Sequence[Member], round: int) -> int:
    """Return the median round of the live others, the lower one of the middle two; our own if there are none."""
    rounds = sorted(member.round for member in members)
    return rounds[(len(rounds) - 1) // 2] if rounds else round


def rejoining(members: Sequence[Member], donor: str, found: int, mine: int, most: int) -> int:
    """Return the round at which a peer goes on that has caught up from a donor, whose State was of round `found`.

    As far as the donor is by now, or the others, and never back behind its own (`mine`): while a large State comes
    over a slow line all of them go on. The donor's word is good for `most` rounds.
    """
    now = next((member.round for member in members if member.peer_id == donor), found)
    return max(mine, level(members, found), min(now, found + most))


def donors(members: Iterable[Member], me: str, round: int) -> list[Member]:
    """Return the peers that are ahead of this round and can be called, most advanced first.

    Among equals the order is a hash of both peer ids, so that newcomers do not all ask the same donor.
    """
    ahead = [member for member in members if member.peer_id != me and member.round > round and member.addresses]
    return sorted(ahead, key=lambda member: (-member.round, zlib.crc32(f"{me} {member.peer_id}".encode())))
