"""What people type as addresses, and what records carry."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.net.addresses import (
    format_address,
    format_transport,
    is_loopback,
    parse_address,
    parse_announce,
    parse_bootstrap,
    parse_multiaddr,
)

ED = "12D3KooWFif5sUGT1UfvoSmQbZVf82WbfYunwJkBNGcxBN8AKLde"
RSA = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.5/tcp/7700/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/7700/p2p/{RSA}",
        f"/ip6/2001:db8::1/tcp/65535/p2p/{ED}",
        f"/dns/peer.example.org/tcp/1/p2p/{ED}",
        f"/dns4/a-b.example/tcp/7700/p2p/{ED}",
        f"/dns6/localhost/tcp/7700/p2p/{ED}",
    ],
)
def test_a_multiaddr_stays_as_it_is(text: str) -> None:
    assert parse_bootstrap(f"  {text}\n") == text
    address = parse_multiaddr(text)
    assert f"{address.transport}/p2p/{address.key}" == text
    assert address.transport.endswith(f"/{address.host}/tcp/{address.port}")


def test_the_old_name_of_the_last_part_is_understood() -> None:
    assert parse_bootstrap(f"/ip4/1.2.3.4/tcp/5/ipfs/{ED}") == f"/ip4/1.2.3.4/tcp/5/p2p/{ED}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.5:7700",
        f"ip4/203.0.113.5/tcp/7700/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/7700/p2p/{ED}/",
        f"/ip4/203.0.113.5/tcp/7700/p2p/{ED[:-1]}",
        f"/ip4/203.0.113.5/tcp/7700/p2p/{ED[:-1]}0",
        f"/ip4/203.0.113.5/udp/7700/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/0/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/65536/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/+7/p2p/{ED}",
        f"/ip4/203.0.113.5/tcp/٧٧/p2p/{ED}",
        f"/ip4/203.0.113.555/tcp/7700/p2p/{ED}",
        f"/ip4/2001:db8::1/tcp/7700/p2p/{ED}",
        f"/ip6/203.0.113.5/tcp/7700/p2p/{ED}",
        f"/ip6/fe80::1%eth0/tcp/7700/p2p/{ED}",
        f"/dns4/203.0.113.5/tcp/7700/p2p/{ED}",
        f"/dns4/bad host/tcp/7700/p2p/{ED}",
        f"/unix/sock/tcp/7700/p2p/{ED}",
    ],
)
def test_a_malformed_bootstrap_is_quoted_beside_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bootstrap(text)
    assert repr(text) in str(caught.value)
    assert "/ip4/203.0.113.5/tcp/7700/p2p/12D3KooW" in str(caught.value)


def test_a_bootstrap_without_its_key_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="lacks its last part"):
        parse_bootstrap("/ip4/203.0.113.5/tcp/7700")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("203.0.113.5", "203.0.113.5", None),
        ("203.0.113.5:7700", "203.0.113.5", 7700),
        ("peer.example.org", "peer.example.org", None),
        (" peer.example.org.:1 ", "peer.example.org.", 1),
        ("2001:db8::5", "2001:db8::5", None),
        ("[2001:db8::5]", "2001:db8::5", None),
        ("[2001:db8::5]:65535", "2001:db8::5", 65535),
    ],
)
def test_what_can_be_announced(text: str, host: str, port: int | None) -> None:
    assert parse_announce(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7700",
        "a b",
        "http://peer.example.org",
        "203.0.113.5:",
        "203.0.113.5:x",
        "203.0.113.5:0",
        "1.2.3",
        "1.2.3.256",
        "[203.0.113.5]:1",
        "[2001:db8::5",
        "[2001:db8::5]7",
        "2001:db8::5:99999",
        "a..b",
        "-a",
        "x" * 64,
        "fe80::1%eth0",
    ],
)
def test_a_malformed_announcement_is_quoted_beside_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_announce(text)
    assert repr(text) in str(caught.value)
    assert "203.0.113.5" in str(caught.value)


@pytest.mark.parametrize("text", ["0.0.0.0", "0.0.0.0:7700", "::", "[::]:7700"])
def test_an_address_that_means_anywhere_cannot_be_announced(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot call"):
        parse_announce(text)


HOSTS = st.one_of(
    st.ip_addresses().map(str), st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,9}){0,3}", fullmatch=True)
)


@given(HOSTS, st.integers(1, 65535))
def test_what_is_formatted_is_read_back(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == (host, port)
    multiaddr = parse_multiaddr(f"{format_transport(host, port)}/p2p/{ED}")
    assert (multiaddr.host, multiaddr.port) == (host, port)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse, refusal in ((parse_address, ValueError), (parse_announce, ConfigError), (parse_bootstrap, ConfigError)):
        with contextlib.suppress(refusal):
            parse(text)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("a.org", False),
    ],
)
def test_loopback_is_known(host: str, here: bool) -> None:
    assert is_loopback(host) == here
