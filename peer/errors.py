"""The error tree. Caught narrowly, at an edge.

    PeerError
    ├── ConfigError     something you can fix; the message says how
    ├── ProtocolError   the partner broke the rules of the wire contract
    └── Unreachable     nobody's fault: a lost connection, a silent or a dead peer

A declined or failed meeting is ordinary and is an event (`peer.events.Skip`), not an exception.
"""


class PeerError(Exception):
    """Base of every error that peerloom raises on purpose; its text is one sentence for people."""


class ConfigError(PeerError):
    """Something the user can fix; the message quotes what was given and says what to do."""


class ProtocolError(PeerError):
    """The partner broke the wire contract; nothing it sent is applied."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Unreachable(PeerError):
    """A peer, or the DHT, did not answer."""
