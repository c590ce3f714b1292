"""Rates and sizes as people write them: "20Mbit" is bits a second, "200GB" is bytes."""

from __future__ import annotations

import re

from peer.errors import ConfigError

LOWEST_RATE = 32e3
"""Bits a second; what is slower carries nothing in the time that anybody waits."""

_NUMBER = r"(?P<number>\d{1,9}(?:\.\d{1,9})?)"
_RATE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kmg]?)bit(?:/s)?", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKMGT]?)B", re.ASCII)
_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_rate(text: str) -> float:
    """Return bits a second; raises `ConfigError` unless the text says so, as in "20Mbit", "800 kbit/s" or "1.5 Gbit".

    A bare number, "20M" and "20 MB/s" are refused: who wrote one may have meant bytes, which is eight times as much.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is no rate; write bits a second with their unit, such as 20Mbit or 800kbit")
    rate = float(match["number"]) * _POWERS[match["prefix"].lower()]
    if rate < LOWEST_RATE:
        raise ConfigError(f"'{text}' lets next to nothing through; give 32kbit or more, or leave it out for no limit")
    return rate


def parse_size(text: str) -> int:
    """Return bytes, in powers of ten; raises `ConfigError` unless the text says so, as in "200GB" or "1.5 TB".

    A bare number is refused, and so is "200Gb", which is bits to some.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is no size; write bytes with their unit, such as 200GB, 500MB or 1.5TB")
    size_bytes = round(float(match["number"]) * _POWERS[match["prefix"].lower()])
    if size_bytes < 1:
        raise ConfigError(f"'{text}' is nothing at all; give a size above 0, or leave it out for no limit")
    return size_bytes


def written_size(size_bytes: int) -> str:
    """Return a size as people write it, to six digits: "200 GB", "3 MB"."""
    prefix, power = next(
        ((prefix, power) for prefix, power in reversed(_POWERS.items()) if size_bytes >= power), ("", 1)
    )
    return f"{size_bytes / power:g} {prefix if prefix in ('', 'k') else prefix.upper()}B"
