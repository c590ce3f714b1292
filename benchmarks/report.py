"""The rows of the table, as text for people and as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

MB = 1e6

HEAD = (
    "what",
    "wall s",
    "sent MB",
    "recv MB",
    "CPU s",
    "peak MB",
    "gRPC s",
    "% of gRPC",
    "raw s",
    "× raw",
    "× hivemind",
    "left %",
    "promised %",
)


@dataclass(frozen=True)
class Row:
    """One way to bring two peers together.

    wall_s, plain_s, raw_s: medians; of as many bytes, plain_s over a plain stream of gRPC, raw_s over a plain socket.
    cpu_s: median, of both peers together.
    sent_bytes, received_bytes: by the caller. peak_bytes: caller's and callee's, the most of all repetitions.
    left, promised: what is, and what may be, left of the difference (0 to 1). shift: how far the sum of the two peers
    moved, as a share of their distance before.
    """

    what: str
    wall_s: float
    sent_bytes: int
    received_bytes: int
    cpu_s: float
    peak_bytes: tuple[int, int]
    plain_s: float
    raw_s: float
    left: float
    promised: float
    shift: float | None = None

    @property
    def times_raw(self) -> float:
        """Wall time as a multiple of the plain copy's."""
        return self.wall_s / self.raw_s

    @property
    def share_of_plain(self) -> float:
        """How fast the bytes went, as a share of what a plain stream of gRPC reaches."""
        return self.plain_s / self.wall_s


@dataclass(frozen=True)
class Report:
    """A whole run."""

    model: str
    parameters: int
    repetitions: int
    rows: tuple[Row, ...]
    hivemind: Row
    hivemind_step_s: float  # with the search for a group

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values, ratios too."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "repetitions": self.repetitions,
            "machine": machine(),
            "rows": [self._plain(row) for row in self.rows],
            "hivemind": self._plain(self.hivemind) | {"step_s": self.hivemind_step_s},
        }

    def text(self) -> str:
        """Return the table, and what has to be known to read it."""
        rows = [HEAD, *(self._cells(row) for row in (*self.rows, self.hivemind))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.insert(1, "─" * len(lines[0]))
        lines.insert(len(lines) - 1, "─" * len(lines[0]))
        here = machine()
        return "\n".join(
            [
                f"One exchange of {self.model} ({self.parameters / 1e6:.1f} M parameters) between two processes over "
                f"loopback, median of {self.repetitions}",
                f"{here['cores']} cores, torch {here['torch']}, one torch thread a process",
                "",
                *lines,
                "",
                f"hivemind: all-reduce alone; with its search for a group a step took {self.hivemind_step_s:.2f} s.",
            ]
        )

    def _plain(self, row: Row) -> dict[str, Any]:
        return asdict(row) | {
            "peak_bytes": list(row.peak_bytes),
            "times_raw": row.times_raw,
            "share_of_plain": row.share_of_plain,
            "times_hivemind": row.wall_s / self.hivemind.wall_s,
        }

    def _cells(self, row: Row) -> tuple[str, ...]:
        return (
            row.what,
            f"{row.wall_s:.2f}",
            f"{row.sent_bytes / MB:.2f}",
            f"{row.received_bytes / MB:.2f}",
            f"{row.cpu_s:.2f}",
            " / ".join(f"{peak / MB:.0f}" for peak in row.peak_bytes),
            f"{row.plain_s:.3f}",
            f"{100 * row.share_of_plain:.0f}",
            f"{row.raw_s:.3f}",
            f"{row.times_raw:.1f}",
            f"{row.wall_s / self.hivemind.wall_s:.2f}",
            f"{100 * row.left:.2f}",
            f"{100 * row.promised:.2f}",
        )


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    from torch import __version__ as torch_version

    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch_version),
        "torch_threads": 1,
    }
