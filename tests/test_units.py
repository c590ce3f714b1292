from __future__ import annotations

import pytest

from peer.errors import ConfigError
from peer.units import parse_rate, parse_size, written_size


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("20Mbit", 20e6),
        ("20 Mbit/s", 20e6),
        (" 20mbit ", 20e6),
        ("800 kbit/s", 800e3),
        ("1.5 Gbit/s", 1.5e9),
        ("0.25Mbit", 250e3),
        ("64000 bit/s", 64e3),
        ("32kbit", 32e3),
    ],
)
def test_a_rate_is_bits_a_second(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20",
        "２０Mbit",
        "inf",
        "nan bit",
        "20Mibit",
        "20Mbit/h",
        "9999999999Gbit",
        "20M",
        "20MB",
        "20 MB/s",
        "20Mb",
        "20Mbps",
        "Mbit",
        "-1Mbit",
        "+1Mbit",
        "1e3bit",
        "1,5Mbit",
        ".5Mbit",
    ],
)
def test_what_may_not_be_bits_a_second_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert str(caught.value) == (f"'{text}' is no rate; write bits a second with their unit, such as 20Mbit or 800kbit")


@pytest.mark.parametrize("text", ["0Mbit", "0.0 kbit", "31999 bit/s", "0.0319Mbit"])
def test_a_rate_at_which_nothing_gets_through_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{text}' lets next to nothing through; give 32kbit or more, or leave it"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("200GB", 200 * 10**9),
        ("500 MB", 500 * 10**6),
        ("1.5 TB", 1_500 * 10**9),
        (" 3kB ", 3000),
        ("3KB", 3000),
        ("1B", 1),
        ("0.1GB", 10**8),
    ],
)
def test_a_size_is_bytes_in_powers_of_ten(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "200", "200G", "200Gb", "200gb", "200GiB", "200Gbit", "-1GB", "1,5TB", "1e9B", "GB"]
)
def test_what_may_not_be_bytes_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(caught.value) == f"'{text}' is no size; write bytes with their unit, such as 200GB, 500MB or 1.5TB"


@pytest.mark.parametrize("text", ["0GB", "0.0001kB"])
def test_a_size_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{text}' is nothing at all; give a size above 0"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (3_000_000, "3 MB"), (200 * 10**9, "200 GB"), (1_500_000_000_000, "1.5 TB")],
)
def test_a_size_is_written_as_people_do(size_bytes: int, text: str) -> None:
    assert written_size(size_bytes) == text
    assert not size_bytes or parse_size(text) == size_bytes
