"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table; the first columns, so many, are aligned to the left. An empty row becomes a line."""
    widths = [max(map(len, column)) for column in zip(head, *filter(None, rows), strict=True)]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(head), rule, *(line(row) if row else rule for row in rows)])
