"""How fast a peer may send and receive, all its streams together, and how much it has.

It is messages that are counted: TCP and HTTP/2 add about 0.1 % to large ones, and the DHT's traffic is not limited.
"""

from __future__ import annotations

import asyncio
from typing import Any

from peer.core.bucket import Bucket

BURST_BYTES = 64 << 10
"""What may pass at once after a pause: what an exchange says beside its frames need not wait for tokens."""


class Throttle:
    """Limits in bits a second, None for no limit; shared by all streams of a peer.

    sent_bytes and received_bytes are those of all messages that were let through so far.
    """

    def __init__(self, max_upload: float | None = None, max_download: float | None = None) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._up = _bucket(max_upload)
        self._down = _bucket(max_download)

    @property
    def limits_download(self) -> bool:
        """Whether others are to be held up."""
        return self._down is not None

    async def sent(self, size_bytes: int, end: asyncio.Future[Any]) -> bool:
        """Wait until a message may be sent; False, and nothing is counted, if the stream's end comes first."""
        passed = await _pass(self._up, size_bytes, end)
        self.sent_bytes += size_bytes * passed
        return passed

    async def received(self, size_bytes: int, end: asyncio.Future[Any]) -> bool:
        """Wait until a message that came in may be handed on; False, and nothing is counted, if the end comes first."""
        passed = await _pass(self._down, size_bytes, end)
        self.received_bytes += size_bytes * passed
        return passed


def _bucket(bits_per_s: float | None) -> Bucket | None:
    return None if bits_per_s is None else Bucket(bits_per_s, BURST_BYTES)


async def _pass(bucket: Bucket | None, size_bytes: int, end: asyncio.Future[Any]) -> bool:
    """Wait for the bucket; whoever is cancelled, or sees the end, leaves to others what it waited for."""
    if bucket is None:
        return not end.done()
    wait_s, passed = bucket.take(size_bytes, asyncio.get_running_loop().time()), False
    try:
        if wait_s > 0.0:
            await asyncio.wait({end}, timeout=wait_s)
        passed = not end.done()
    finally:
        if not passed:
            bucket.give_back(size_bytes)
    return passed
