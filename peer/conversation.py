"""One exchange, spoken over a stream: the thread of the meeting, while training goes on.

Three things happen at the same time: what the partner says is taken in, what is due is computed in a thread beside
training, and what came of it is sent. No more than about a second's worth of the link is ever on its way, so that
whatever else uses the link gets through; and the partner says several times a second how much has arrived, so a slow
transfer that moves is never taken for a dead one.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from peer.core.exchange import Callee, Caller
from peer.core.frame import Frame, Said
from peer.core.gauge import START_BITS_PER_S, Gauge
from peer.core.legs import FRAME_BYTES
from peer.core.phase import Phase
from peer.errors import ProtocolError, Unreachable
from peer.net.base import Stream
from peer.view import View
from peer.wire.peer_pb2 import Message

FAREWELL_S = 0.5
LONGEST_S = 3600.0
"""The deadline of a single message; what ends an exchange earlier is silence."""

TELL_S = 0.05
"""How often the partner is told what has arrived."""

FRAME_S = 0.25
"""How long a frame may take on its way."""

SMALLEST_FRAME_BYTES = 4 * 1024
ON_THE_WAY_S = 1.0
LEAST_ON_THE_WAY_BYTES = 64 * 1024
MOST_ON_THE_WAY_BYTES = 32 * 1024 * 1024
"""What is on its way waits in somebody's memory; with so much a link of 2.5 Gbit/s and 0.1 s there and back is full."""


class Conversation:
    """One exchange with one partner.

    computed_s: what a processor core has worked for it. silence_s: how long the partner may owe something, and nothing
    comes, before it counts as lost. bits_per_s: what the link is thought to take; rtt_s: there and back.
    """

    def __init__(
        self,
        exchange: Caller | Callee,
        stream: Stream,
        view: View,
        silence_s: float,
        bits_per_s: float = START_BITS_PER_S,
        rtt_s: float = 0.0,
    ) -> None:
        self.gauge = Gauge(rtt_s + TELL_S)
        self.computed_s = 0.0
        self._flowing: tuple[float, float] | None = None
        self._exchange = exchange
        self._stream = stream
        self._view = view
        self._silence_s = silence_s
        self._bits_per_s = bits_per_s
        self._farewell: Message | None = None
        self._parted = False
        self._wake = asyncio.Event()
        self._work = asyncio.Event()
        self._moved_s = self._told_s = time.monotonic()
        self._told_bytes = 0
        self._moved: tuple[int, int, Phase] = (0, 0, exchange.phase)
        self._computing = False

    async def run(self) -> None:
        """Return when the exchange has ended; a lost or silent partner is an ending like any other."""
        listening, computing = asyncio.create_task(self._listen()), asyncio.create_task(self._compute())
        speaking = asyncio.create_task(self._speak())
        tasks = (listening, computing, speaking)
        try:
            while not speaking.done():
                if self._computing:  # it is for us to go on
                    self._moved_s = time.monotonic()
                left_s = self._moved_s + self._silence_s - time.monotonic()
                if left_s <= 0:
                    self._exchange.lost("silent", f"nothing more came for {self._silence_s:.0f} s")
                    break
                if self._exchange.ended and self._exchange.phase is not Phase.APPLIED:
                    # a word of farewell, if it can be said at once
                    await asyncio.wait({speaking}, timeout=FAREWELL_S)
                    break
                await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for task in (listening, computing):
                    if task.done():
                        task.result()
                        await asyncio.wait({speaking}, timeout=FAREWELL_S)
        except asyncio.CancelledError:
            speaking.cancel()
            await asyncio.wait({speaking})
            if not self._exchange.ended:  # who has said yes to a correction takes nothing back
                with suppress(Unreachable):
                    await self._stream.send(self._exchange.abort("stopping", "this peer is stopping"), FAREWELL_S)
            raise
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    @property
    def flowing_s(self) -> float:
        """How long it was from the first frame to the last, of either side."""
        return 0.0 if self._flowing is None else self._flowing[1] - self._flowing[0]

    def abandon(self) -> None:
        """End it now, and tell the partner."""
        self._give_up("stopping", "this peer is leaving the swarm")

    async def _listen(self) -> None:
        exchange = self._exchange
        while not exchange.ended:
            try:
                said = await self._stream.receive(LONGEST_S)
                if said is None:
                    exchange.lost("lost", "the partner ended the stream")
                else:
                    exchange.receive(said)
            except ProtocolError as error:
                self._give_up(error.reason, error.detail)
            except Unreachable as error:
                exchange.lost("lost", str(error))
            now_s = time.monotonic()
            moved = (exchange.heard_bytes, exchange.arrived_bytes, exchange.phase)
            if moved != self._moved:  # words that say nothing new are silence
                self._moved, self._moved_s = moved, now_s
            self._flow(now_s)
            self.gauge.arrived(now_s, exchange.arrived_bytes, exchange.said_bytes)
            self._wake.set()
            self._work.set()

    async def _compute(self) -> None:
        exchange = self._exchange
        while not exchange.ended:
            if not exchange.due:
                self._work.clear()
                await self._work.wait()
                continue
            self._computing = True
            try:
                await asyncio.to_thread(self._advance)
            except ProtocolError as error:
                self._give_up(error.reason, error.detail)
            self._computing = False
            self._moved_s = time.monotonic()
            self._wake.set()

    def _advance(self) -> None:
        began_s = time.thread_time()
        self._exchange.advance(self._view.read)
        self.computed_s += time.thread_time() - began_s

    async def _speak(self) -> None:
        while True:
            said = self._next()
            if said is not None:
                await self._send(said)
            elif self._exchange.ended:
                return
            else:
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TELL_S if self._exchange.untold else None):
                        await self._wake.wait()

    def _next(self) -> Said | None:
        """Return what to say now: a farewell, how much has arrived, or what the exchange has to say."""
        if self._farewell is not None:
            farewell, self._farewell = self._farewell, None
            return farewell
        now_s, exchange = time.monotonic(), self._exchange
        early = exchange.heard_bytes >= 2 * self._told_bytes  # at first, so that the partner's frames soon grow
        if (early or now_s - self._told_s >= TELL_S) and (progress := exchange.progress()) is not None:
            self._told_s, self._told_bytes = now_s, exchange.heard_bytes
            return progress
        rate = self.gauge.measure or max(self._bits_per_s, self.gauge.bound or 0.0)
        on_the_way = exchange.said_bytes - exchange.arrived_bytes
        # the rate may be a guess: no frame is larger, and no more on its way, than what has arrived bears out
        bold = min(LEAST_ON_THE_WAY_BYTES + exchange.arrived_bytes, MOST_ON_THE_WAY_BYTES)
        if exchange.ended or on_the_way > min(bold, max(LEAST_ON_THE_WAY_BYTES, ON_THE_WAY_S * rate / 8)):
            self.gauge.pause(on_the_way)
            return None
        try:
            most = min(FRAME_BYTES, int(FRAME_S * rate / 8), exchange.arrived_bytes)
            said = exchange.say(max(SMALLEST_FRAME_BYTES, most))
        except ProtocolError as error:
            return exchange.abort(error.reason, error.detail)
        if isinstance(said, Frame):
            self._flow(now_s)
            self.gauge.said(now_s, exchange.arrived_bytes, exchange.said_bytes - len(said.payload))
            self._work.set()
        elif said is None:
            self.gauge.pause(on_the_way)
        return said

    def _flow(self, now_s: float) -> None:
        self._flowing = (now_s if self._flowing is None else self._flowing[0], now_s)

    async def _send(self, said: Said) -> None:
        try:
            await self._stream.send(said, LONGEST_S)
        except Unreachable as error:
            self._exchange.lost("lost", str(error))
            self._work.set()

    def _give_up(self, reason: str, detail: str) -> None:
        if not self._parted:  # the first reason is the one to tell
            self._farewell, self._parted = self._exchange.abort(reason, detail), True
        for event in (self._wake, self._work):
            event.set()
