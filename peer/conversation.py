"""Drive one exchange over one stream until it ends: the only place where sockets, training and the table meet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress

from peer.boundary import Boundary
from peer.core.exchange import Callee, Caller, Phase
from peer.core.gossip import Outer, exchanged
from peer.core.state import State
from peer.errors import ProtocolError, Unreachable
from peer.net.base import Stream
from peer.wire.peer_pb2 import Message

FAREWELL_S = 0.5
LONGEST_S = 3600.0
"""No exchange takes longer; what ends one earlier is silence."""


class Conversation:
    """One exchange, spoken: listens, speaks, and lets training do the products that are due.

    silence_s: how long nothing may move in either direction before the partner counts as lost.
    """

    def __init__(
        self, exchange: Caller | Callee, stream: Stream, boundary: Boundary, outer: Outer, silence_s: float
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._boundary = boundary
        self._outer = outer
        self._silence_s = silence_s
        self._outgoing: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._moved = time.monotonic()

    async def run(self) -> None:
        """Return when the exchange has ended; a lost or silent partner is an ending like any other."""
        listening = asyncio.create_task(self._listen())
        speaking = asyncio.create_task(self._speak())
        try:
            while not speaking.done():
                left_s = self._moved + self._silence_s - time.monotonic()
                if left_s <= 0:
                    self._exchange.lost("silent", f"nothing moved for {self._silence_s:.0f} s")
                    break
                if self._exchange.ended and self._exchange.phase is not Phase.APPLIED:
                    # a word of farewell, if it can be said at once; training may be far from a step boundary
                    await asyncio.wait({speaking}, timeout=FAREWELL_S)
                    break
                await asyncio.wait({speaking, listening}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if listening.done():
                    listening.result()
                    await asyncio.wait({speaking}, timeout=FAREWELL_S)
        except asyncio.CancelledError:
            with suppress(Unreachable):
                await self._stream.send(self._exchange.abort("stopping", "this peer is stopping"), FAREWELL_S)
            raise
        finally:
            for task in (listening, speaking):
                task.cancel()
            results = await asyncio.gather(listening, speaking, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def abandon(self) -> None:
        """End it now, and tell the partner."""
        self._outgoing.append(self._exchange.abort("stopping", "this peer is leaving the swarm"))
        self._move()

    async def _listen(self) -> None:
        while not self._exchange.ended:
            try:
                message = await self._stream.receive(LONGEST_S)
                if message is None:
                    self._exchange.lost("lost", "the partner ended the stream")
                else:
                    self._outgoing.extend(self._exchange.receive(message))
            except ProtocolError as error:
                self._outgoing.append(self._exchange.abort(error.reason, error.detail))
            except Unreachable as error:
                self._exchange.lost("lost", str(error))
            self._move()

    async def _speak(self) -> None:
        while True:
            while self._outgoing:
                await self._send(self._outgoing.popleft())
            if self._exchange.ended:
                return
            if self._exchange.due:
                await self._advance()
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _send(self, message: Message) -> None:
        try:
            await self._stream.send(message, self._silence_s)
        except Unreachable as error:
            self._exchange.lost("lost", str(error))
            self._outgoing.clear()
        self._move()

    async def _advance(self) -> None:
        def products(state: State) -> list[Message]:
            return self._exchange.advance(lambda name: exchanged(self._outer, state, name))

        try:
            self._outgoing.extend(await self._boundary.visit(products, LONGEST_S))
        except ProtocolError as error:
            self._outgoing.append(self._exchange.abort(error.reason, error.detail))
        except Unreachable as error:
            self._outgoing.append(self._exchange.abort("stopping", str(error)))
        self._move()

    def _move(self) -> None:
        self._moved = time.monotonic()
        self._wake.set()
