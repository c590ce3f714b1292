"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return how many there are of something: "1 peer", "2 peers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(count: float) -> str:
    """Return bytes with a unit."""
    if count < 1e3:
        return f"{count:.0f} B"
    factor, unit = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / factor:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a time in the units that suit it."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
