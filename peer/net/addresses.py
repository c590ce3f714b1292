"""Addresses, as people type them and as records carry them. Pure parsing; nothing is looked up.

Two kinds: "host:port" of a gRPC server, an IPv6 host in brackets; and the multiaddr of a DHT node, which also names
the key that must answer there, e.g. /ip4/203.0.113.5/tcp/7700/p2p/12D3KooW… (see https://multiformats.io/multiaddr).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from peer.errors import ConfigError

RIGHT_BOOTSTRAP = "/ip4/203.0.113.5/tcp/7700/p2p/12D3KooW…"
RIGHT_ANNOUNCE = "203.0.113.5, peer.example.org:7700 or [2001:db8::5]:7700"

MAX_PORT = 65535
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_BASE58 = "[1-9A-HJ-NP-Za-km-z]"
_KEY = re.compile(rf"12D3KooW{_BASE58}{{44}}|Qm{_BASE58}{{44}}")


@dataclass(frozen=True)
class Multiaddr:
    """The address of a DHT node: a host of kind ip4, ip6, dns, dns4 or dns6, a TCP port, and the key's hash."""

    kind: str
    host: str
    port: int
    key: str

    @property
    def transport(self) -> str:
        """Return the part that says where, without who."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    def __str__(self) -> str:
        return f"{self.transport}/p2p/{self.key}"


def parse_multiaddr(text: str) -> Multiaddr:
    """Read /KIND/HOST/tcp/PORT/p2p/KEY; raises `ConfigError` that quotes the text and shows the right form."""
    match text.strip().split("/"):
        case ["", kind, host, "tcp", port, "p2p" | "ipfs", key]:
            if _host_fits(kind, host) and _port(port) and _KEY.fullmatch(key):
                return Multiaddr(kind, host, int(port), key)
        case ["", _, _, "tcp", _]:
            raise ConfigError(
                f"The bootstrap address {text!r} lacks its last part, which says whose it is: it should look like "
                f"{RIGHT_BOOTSTRAP}, just as the other side prints it."
            )
    raise ConfigError(
        f"The bootstrap address {text!r} is malformed: it should look like {RIGHT_BOOTSTRAP}, just as the other side "
        "prints it."
    )


def parse_bootstrap(text: str) -> str:
    """Return a bootstrap's multiaddr in its plain form; raises `ConfigError` as `parse_multiaddr` does."""
    return str(parse_multiaddr(text))


def parse_announce(text: str) -> tuple[str, int | None]:
    """Read HOST or HOST:PORT, where others should call this peer; an IPv6 host with a port stands in brackets.

    Returns the host without brackets. Raises `ConfigError` for what isn't an address, and for one that nobody else can
    call, such as 0.0.0.0.
    """
    host, port = _split(text.strip())
    if host is None or not (port is None or _port(port)):
        raise ConfigError(f"The announced address {text!r} is malformed: it should look like {RIGHT_ANNOUNCE}.")
    if ip_version(host) is not None and ip_address(host).is_unspecified:
        raise ConfigError(f"Others cannot call {text!r}: announce an address of this machine, like {RIGHT_ANNOUNCE}.")
    return host, None if port is None else int(port)


def parse_address(text: str) -> tuple[str, int]:
    """Read "host:port" out of a record; raises ValueError. Returns the host without brackets."""
    host, port = _split(text)
    if host is None or port is None or not _port(port):
        raise ValueError(f"{text[:80]!r} is not host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_transport(host: str, port: int) -> str:
    """Return host and TCP port as the first part of a multiaddr."""
    version = ip_version(host)
    kind = "dns" if version is None else f"ip{version}"
    return f"/{kind}/{host}/tcp/{port}"


def ip_version(host: str) -> int | None:
    """Return 4 or 6 for an IP address, None for a name."""
    # A zone ("%eth0") means nothing on another machine, so such an address is neither.
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return None
    return address.version


def is_loopback(host: str) -> bool:
    """Tell whether a host means this machine and no other can call it."""
    return ip_address(host).is_loopback if ip_version(host) is not None else host.rstrip(".").lower() == "localhost"


def _split(text: str) -> tuple[str | None, str | None]:
    # → host without brackets (None: not a host) and port (None: not given)
    if match := re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text):
        host, port = match[1], match[2]
        return (host if ip_version(host) == 6 else None), port
    if text.count(":") > 1:
        return (text if ip_version(text) == 6 else None), None
    host, colon, port = text.partition(":")
    return (host if _is_host(host) else None), (port if colon else None)


def _is_host(host: str) -> bool:
    if ip_version(host) is not None:
        return True
    # a name whose last label is a number would be a mistyped IPv4 address
    last = host.rstrip(".").rpartition(".")[2]
    return len(host) <= 253 and bool(_NAME.fullmatch(host)) and not last.isdigit()


def _host_fits(kind: str, host: str) -> bool:
    if kind in ("ip4", "ip6"):
        return ip_version(host) == int(kind[2])
    return kind in ("dns", "dns4", "dns6") and ip_version(host) is None and _is_host(host)


def _port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= MAX_PORT
