"""docs/protocol.md says what the code does: the same state table, formats and reasons."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from peer.core.phase import TABLE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "protocol.md").read_text()


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_state_table_is_the_one_that_runs() -> None:
    printed = {(phase, cue): after for phase, cue, after in rows("### The state table")}
    assert printed == {(phase.value, cue.value): after.value for (phase, cue), after in TABLE.items()}


def test_every_reason_that_the_code_gives_is_explained() -> None:
    explained = {word for row in rows("## Reasons") for word in re.findall(r"`([a-z-]+)`", row[0])}
    given: set[str] = set()
    for path in [*(ROOT / "peer").glob("*.py"), *(ROOT / "peer" / "core").glob("*.py")]:
        if path.name in ("schedule.py", "stability.py"):  # decisions about a manifest, which never meet the wire
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given |= set(_reason(node))
    assert given == explained


def _reason(call: ast.Call) -> list[str]:
    """The constants that stand where a reason goes in a call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = {"Decision": 1, "ProtocolError": 0, "lost": 0, "abort": 0, "_refusal": 0}.get(name)
    if name == "Skip":
        place = 2
    arguments = [call.args[place]] if place is not None and len(call.args) > place else []
    arguments += [keyword.value for keyword in call.keywords if keyword.arg == "reason" and name in ("Abort", "Skip")]
    constants = [node for argument in arguments for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return [constant.value for constant in constants if isinstance(constant.value, str) and constant.value]
