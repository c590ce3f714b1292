"""One side of an exchange, in a process of its own: what a daemon does in a meeting, with nothing around it.

Weights and anchor are there as in a daemon, the stream is gRPC's, the exchange, the conversation and the boundary are
the daemon's. Only training is missing: a thread that reaches a step boundary all the time stands in for it.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks import plainstream, rawcopy
from benchmarks.cost import Cost, Meter
from benchmarks.pair import Shapes, draw
from benchmarks.plainstream import PlainServer
from benchmarks.worker import DEADLINE_S
from peer.aside import compute_with_one_core
from peer.boundary import Boundary
from peer.conversation import Conversation
from peer.core.admit import admit_correction
from peer.core.allocation import Allocation
from peer.core.codec import parse
from peer.core.decision import Decision
from peer.core.exchange import Callee, Caller
from peer.core.gossip import Outer, pair_weight
from peer.core.phase import Phase
from peer.core.prior import Priors, guesses, next_priors, start_priors
from peer.core.state import State
from peer.errors import PeerError, Unreachable
from peer.net.base import Stream
from peer.net.rpc import Rpc
from peer.proposals import PROTOCOL
from peer.still import Still
from peer.view import View
from peer.wire.peer_pb2 import Answer, Message, Offer

STEP_S = 0.001
"""How often the stand-in for training reaches a step boundary."""

SILENCE_S = 60.0
LOOPBACK_BITS_PER_S = 1e10
OUTER = Outer()
T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """One side's part of an exchange."""

    cost: Cost
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Comparison:
    """How the two sides stand after an exchange, as shares of the distance between them before.

    left: the distance now. shift: how far the sum of the two moved. anchored: whether each anchor moved as its weights.
    """

    left: float
    shift: float
    anchored: bool


class Side:
    """Caller or callee, of one exchange after another."""

    def __init__(self, shapes: Shapes, calls: bool) -> None:
        torch.set_num_threads(1)
        self._shapes, self._calls = shapes, calls
        self._state = State(
            weights={name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()},
            anchor={name: torch.zeros(shape) for name, shape in shapes.items()},
            outer={},  # the outer memory has no part in an exchange
        )
        self._spec = ""
        self._priors: Priors = {}
        self._boundary, self._still = Boundary(), Still()
        self._view = View(OUTER, self._state, self._still)
        self._stopping = False
        self._met: asyncio.Future[Met]
        self._meter: Meter
        self._socket: socket.socket
        self._loop = asyncio.new_event_loop()
        compute_with_one_core(self._loop)
        self._rpc = Rpc()
        self._threads = [threading.Thread(target=target) for target in (self._loop.run_forever, self._train)]
        for thread in self._threads:
            thread.start()
        self._plain = self._await(_make(PlainServer))

    # ------------------------------------------------------------------ orders

    def listen(self) -> tuple[int, int]:
        """Callee: come up and return the ports of gRPC and of the raw socket."""
        self._await(self._rpc.start(self._serve))
        self._await(self._plain.start())
        self._socket = rawcopy.listen()
        port: int = self._socket.getsockname()[1]
        return self._rpc.port, port

    def connect(self, port: int) -> None:
        """Caller: open the raw connection."""
        self._socket = rawcopy.connect(port)

    def accept(self) -> None:
        """Callee: take the raw connection."""
        self._socket = rawcopy.accept(self._socket)

    @torch.no_grad()
    def prepare(self, spec: str) -> None:
        """Set weights and anchor to their first values, and the codec; a codec's basis stays from one to the next."""
        if spec != self._spec:
            self._spec = spec
            self._allocation = Allocation(self._shapes, parse(spec))
            self._priors = start_priors(self._shapes)
        for index, (name, shape) in enumerate(self._shapes.items()):
            ours = draw(shape, index)[0 if self._calls else 1]
            self._state.weights[name].copy_(ours)
            self._state.anchor[name].copy_(ours)
        self._norm = self._view.norm()  # which a daemon knows from the round's first meeting

    def expect(self) -> None:
        """Callee: be ready for one exchange, of which `met` tells."""
        self._met = self._await(_future())
        self._meter = Meter()

    def met(self) -> Met:
        """Callee: return what became of it; raises what went wrong."""
        return self._await(_wait(self._met))

    def meet(self, port: int) -> Met:
        """Caller: hold one exchange, from dialling to the corrected weights."""
        self._meter = Meter()
        return self._await(self._call(f"127.0.0.1:{port}"))

    def copy(self, send_bytes: int, receive_bytes: int) -> Cost:
        """Copy as many bytes each way over the raw connection."""
        return rawcopy.copy(self._socket, self._calls, send_bytes, receive_bytes)

    def expect_plain(self, send_bytes: int) -> int:
        """Callee: be ready to send so many bytes over a plain gRPC stream; return its port."""
        self._plain.send_bytes = send_bytes
        return self._plain.port

    def copy_plain(self, port: int, send_bytes: int, receive_bytes: int) -> float:
        """Caller: copy as many bytes each way over a plain gRPC stream; return the seconds."""
        return self._await(plainstream.copy(port, send_bytes, receive_bytes))

    def show(self) -> bool:
        """Callee: send the weights over the raw connection; return whether the anchor equals them."""
        for name in self._shapes:
            self._socket.sendall(_view(self._state.weights[name]))
        return self._anchored()

    def compare(self) -> Comparison:
        """Caller: hold the callee's weights against one's own, and both against their first values."""
        before = after = moved = 0.0
        for index, (name, shape) in enumerate(self._shapes.items()):
            ours, theirs = self._state.weights[name].detach(), torch.empty(shape)
            rawcopy.receive(self._socket, _view(theirs))
            first_ours, first_theirs = draw(shape, index)
            before += _square(first_ours - first_theirs)
            after += _square(ours - theirs)
            moved += _square((ours - first_ours) + (theirs - first_theirs))
        return Comparison(math.sqrt(after / before), math.sqrt(moved / before), self._anchored())

    def close(self) -> None:
        """Go down."""
        self._await(self._rpc.close())
        self._await(self._plain.stop())
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ the exchange

    async def _call(self, address: str) -> Met:
        began_s = time.monotonic()
        ranks = self._allocation.ranks(self._priors, {})
        parts = self._allocation.parts(ranks)
        found = guesses(parts, self._priors, 0)
        exchange = Caller(self._allocation.codec, ranks, parts, found, self._admit)
        stream = await self._rpc.dial(address, DEADLINE_S)
        try:
            await stream.send(Message(offer=self._offer()), DEADLINE_S)
            if await stream.receive(DEADLINE_S) is None:
                raise Unreachable("the callee ended the stream before it answered")
            return await self._converse(exchange, stream, -pair_weight(OUTER.alpha), began_s)
        finally:
            await stream.close()

    async def _serve(self, stream: Stream) -> None:
        try:
            message = await stream.receive(DEADLINE_S)
            if not isinstance(message, Message) or not message.HasField("offer"):
                raise Unreachable("the caller made no offer")
            exchange = Callee(self._allocation.codec, self._allocation.parts, self._admit)
            await stream.send(Message(answer=Answer(accepted=True, peer_id="callee")), DEADLINE_S)
            self._met.set_result(await self._converse(exchange, stream, message.offer.weight, time.monotonic()))
        except PeerError as error:
            self._met.set_exception(error)

    async def _converse(self, exchange: Caller | Callee, stream: Stream, weight: float, began_s: float) -> Met:
        await Conversation(exchange, stream, self._view, SILENCE_S, LOOPBACK_BITS_PER_S).run()
        if exchange.phase is not Phase.APPLIED:
            raise Unreachable(f"the exchange ended {exchange.phase.value}: {exchange.reason} {exchange.detail}")
        correction = exchange.correction

        def add(state: State) -> None:
            correction.add_(weight, state.weights, state.anchor)

        await self._boundary.visit(add, DEADLINE_S)
        cost = self._meter.stop(began_s)
        self._priors = next_priors(correction, self._priors)
        return Met(cost, stream.sent_bytes, stream.received_bytes)

    def _offer(self) -> Offer:
        weight = pair_weight(OUTER.alpha)
        meeting_id = os.urandom(16)
        return Offer(protocol=PROTOCOL, peer_id="caller", meeting_id=meeting_id, codec=self._spec, weight=weight)

    def _admit(self, norm: float) -> Decision:
        return admit_correction(norm, self._norm)

    def _train(self) -> None:
        torch.set_num_threads(1)
        while not self._stopping:
            with self._still.changing():
                self._boundary.serve(self._state)
            time.sleep(STEP_S)

    def _anchored(self) -> bool:
        return all(torch.equal(self._state.anchor[name], weight) for name, weight in self._state.weights.items())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)


async def _make(make: Callable[[], T]) -> T:
    return make()  # on the loop that it will belong to


async def _future() -> asyncio.Future[Met]:
    return asyncio.get_running_loop().create_future()


async def _wait(future: asyncio.Future[Met]) -> Met:
    return await future


def _view(x: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in place."""
    return x.detach().flatten().view(torch.uint8).numpy().data


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) ** 2
