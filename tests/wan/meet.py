"""A program for emulated hosts: a node of the DHT that waits until it sees so many peers, itself included.

    python -m tests.wan.meet HOME PEERS [BOOTSTRAP]

It prints its own multiaddr, then, once they are there, the addresses of all peers as JSON. Then it stays for the
others, until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from peer.core.members import Member
from peer.identity import Identity
from peer.net.base import Stream
from peer.net.internet import Internet

RUN_ID = "wan"
LIFE_S = 300.0
PATIENCE_S = 90.0
PAUSE_S = 0.2


async def meet(home: Path, peers: int, bootstraps: list[str]) -> None:
    """Come up, publish a record, and read until as many are found."""
    identity = Identity.load(home)
    network = Internet(identity, home, bootstraps)
    await network.start(_ignore)
    try:
        print(network.bootstraps[0], flush=True)
        member = Member(RUN_ID, identity.peer_id, network.addresses, 0, 0, time.time() + LIFE_S)
        await network.publish(member)
        while len(found := await network.members(RUN_ID)) < peers:
            await asyncio.sleep(PAUSE_S)
        print(json.dumps(sorted(address for each in found for address in each.addresses)), flush=True)
        await asyncio.Event().wait()
    finally:
        await network.close()


async def _ignore(stream: Stream) -> None:
    pass


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(meet(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]), PATIENCE_S))
