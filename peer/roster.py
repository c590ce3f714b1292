"""Who is there: publishes this peer's record and keeps a fresh sample of the others'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from peer.core.members import Member, live
from peer.net.base import Network

REFRESH_S = 5.0
TICK_S = 1.0
LIFE_S = 60.0
"""A record outlives eleven lost refreshes; a peer that was killed is forgotten after a minute."""


class Roster:
    """Keeps this peer's record in the DHT, and a sample of the live members of its run."""

    def __init__(self, network: Network, member: Member, clock: Callable[[], float] = time.time) -> None:
        self._network = network
        self._member = member
        self._clock = clock
        self._seen: list[Member] = []
        self._published = False

    @property
    def members(self) -> list[Member]:
        """The other live peers of the run, as far as this peer knows."""
        return live(self._seen, self._member.run_id, self._clock(), self._member.peer_id)

    async def refresh(self) -> list[Member]:
        """Read the others' records anew and return them."""
        self._seen = await self._network.members(self._member.run_id)
        return self.members

    async def publish(self, round: int, shard: int) -> bool:
        """Say where this peer stands; False when the DHT could not take it."""
        self._member = replace(
            self._member,
            addresses=self._network.addresses,
            round=round,
            shard=shard,
            expires_s=self._clock() + LIFE_S,
        )
        self._published = await self._network.publish(self._member)
        return self._published

    async def run(self, standing: Callable[[], tuple[int, int]]) -> None:
        """Publish and refresh for ever, and publish when this peer's standing, its round and shard, has changed."""
        while True:
            said = standing()
            await self.publish(*said)
            await self.refresh()
            for _ in range(int(REFRESH_S / TICK_S)):
                await asyncio.sleep(TICK_S)
                if not self.members:  # nobody yet: look again soon
                    await self.refresh()
                if standing() != said:  # newcomers and partners go by the round that they read
                    said = standing()
                    await self.publish(*said)

    async def withdraw(self) -> None:
        """Take this peer's record back."""
        await self._network.withdraw(self._member)
