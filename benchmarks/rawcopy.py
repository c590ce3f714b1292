"""The floor: the same bytes over one plain TCP connection, both directions at once, and nothing else."""

from __future__ import annotations

import socket
import threading
import time

from benchmarks.cost import Cost, Meter

DEADLINE_S = 60.0


def listen() -> socket.socket:
    """Return a socket that listens on a free port of the loopback."""
    return socket.create_server(("127.0.0.1", 0))


def accept(listener: socket.socket) -> socket.socket:
    """Return the one connection that is to come."""
    listener.settimeout(DEADLINE_S)
    connection, _ = listener.accept()
    connection.settimeout(DEADLINE_S)
    return connection


def connect(port: int) -> socket.socket:
    """Return a connection to the side that listens."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def copy(connection: socket.socket, first: bool, send_bytes: int, receive_bytes: int) -> Cost:
    """Send so many bytes while receiving as many as the other side sends.

    Both buffers are whole, in memory and touched before. The first side gives the start; its clock counts from there.
    """
    out, into = (memoryview(bytearray(b"\x5a") * size) for size in (send_bytes, receive_bytes))
    _settle(connection, first)
    meter = Meter()
    began_s = time.monotonic()
    if first:
        connection.sendall(b"!")
    else:
        receive(connection, memoryview(bytearray(1)))
    sender = threading.Thread(target=connection.sendall, args=(out,), daemon=True)
    sender.start()
    receive(connection, into)
    sender.join()
    return meter.stop(began_s)


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer; raises `ConnectionError` when the other side ends before."""
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the other side ended the connection")
        into = into[count:]


def _settle(connection: socket.socket, first: bool) -> None:
    """Wait until both sides have their buffers."""
    if first:
        receive(connection, memoryview(bytearray(1)))
    else:
        connection.sendall(b"?")
