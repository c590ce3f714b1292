"""How the project is laid out: who may import whom, what the core may touch, what is packaged, which words stay out."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("peer/**/*.py"), *ROOT.glob("cli/**/*.py")])

LAYERS = [
    ["cli"],
    ["process", "swarm"],
    ["daemon"],
    ["stay", "swarm_report"],
    ["loading", "lab"],
    ["meetings", "catchup", "trainer", "export", "heldout"],
    ["proposals"],
    ["account", "talk", "donor", "endings", "guest", "planner", "roster"],
    ["conversation", "timetable"],
    ["boundary", "view", "lordo", "manifest", "checkpoint", "net", "status"],
    ["config", "data", "inner", "sensitivity"],
    ["core", "identity", "models"],
    ["events", "home", "tables", "units", "quota", "gpu", "net.addresses", "crew"],
    ["tail", "errors", "wire", "leash", "still", "aside"],
]
"""Top to bottom. A unit may import what stands on lines below its own, and itself. net.addresses is pure text."""

CORE_MAY_IMPORT = {
    *("peer.core", "peer.errors", "peer.wire", "torch", "numpy", "__future__"),
    *(
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "re",
        "statistics",
    ),
    *("struct", "typing", "warnings", "zlib"),
}

STRAY = re.compile(
    r"/work/|\bTODO\b|\bFIXME\b|\bXXX\b|\b(AI|LLM) (agent|session)|\bissue #?\d"
    r"|class \w*(Manager|Handler|Helper)\b",
    re.IGNORECASE,
)


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"peer.{name}" if parts[0] == "cli" else name


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of what a file imports, wherever in it."""
    package = module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def unit(name: str) -> str | None:
    """Return the longest entry of LAYERS that a module of ours belongs to; None for the package itself."""
    units = [each for layer in LAYERS for each in layer]
    found = [each for each in units if f"{name}.".startswith(f"peer.{each}.")]
    return max(found, key=len) if found else None


def layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_a_layer() -> None:
    assert [name for path in SOURCES if unit(name := module(path)) is None] == ["peer"]


def test_every_layer_that_is_named_exists() -> None:
    found = {unit(module(path)) for path in SOURCES}
    assert {each for layer in LAYERS for each in layer} - found == set()


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_imports_run_downward(path: Path) -> None:
    importer = unit(module(path))
    for name in imports(path):
        imported = unit(name)
        assert name.split(".")[0] != "cli", f"{name} is installed as peer.cli"
        if imported is not None and imported != importer:
            assert importer is not None
            assert layer_of(importer) < layer_of(imported), f"{module(path)} imports {name}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(ROOT / "peer/core")], ids=module)
def test_the_core_is_pure(path: Path) -> None:
    foreign = {name for name in imports(path) if not any(f"{name}.".startswith(f"{each}.") for each in CORE_MAY_IMPORT)}
    assert not foreign
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not calls & {"open", "print", "input", "exec", "eval", "torch.manual_seed", "torch.save", "torch.load"}


@pytest.mark.parametrize(
    ("library", "only"),
    [
        ("hivemind", {"peer.net.lean", "peer.net.node", "peer.net.dht"}),
        ("grpc", {"peer.net.rpc", "peer.net.streams"}),
    ],
)
def test_each_network_library_is_known_in_few_places(library: str, only: set[str]) -> None:
    users = {module(path) for path in SOURCES if any(name.split(".")[0] == library for name in imports(path))}
    assert users - {"peer.wire.peer_pb2_grpc"} <= only


def test_nothing_that_runs_code_is_read() -> None:
    """Pickle and what unpickles: none of it anywhere."""
    for path in SOURCES:
        text = path.read_text()
        names = set(imports(path))
        assert not {name for name in names if name.split(".")[0] in ("pickle", "dill", "marshal", "shelve", "joblib")}
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path


def test_the_list_of_packages_is_complete() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"peer": "peer", "peer.cli": "cli"}
    folders = {module(path) for path in SOURCES if path.name == "__init__.py"}
    with_code = {module(path).rpartition(".")[0] or "peer" for path in SOURCES if path.name != "__init__.py"}
    assert set(setuptools["packages"]) == folders
    assert with_code <= folders, "a folder without __init__.py"


def test_every_file_that_is_no_code_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, several in setuptools["package-data"].items()
        for pattern in several
    ]
    others = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("peer/**/*")
        if path.is_file() and path.suffix not in (".py", ".pyi", ".pyc")
    ]
    assert others
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def texts() -> Iterator[Path]:
    endings = {".py", ".pyi", ".md", ".toml", ".txt", ".proto", ".yml", ".yaml", ".json", ".in", ""}
    for top in ("peer", "cli", "tests", "proto", "docs", "benchmarks", "compose", ".ci"):
        for path in (ROOT / top).rglob("*"):
            hidden = "__pycache__" in path.parts or "assets" in path.parts
            if path.is_file() and path.suffix in endings and not hidden:
                yield path
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in endings)


def test_no_stray_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        if path != Path(__file__) and path.name != "LICENSE"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if STRAY.search(line)
    ]
    assert found == []


def test_no_file_is_named_for_no_subject() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handlers"}
    assert [path for path in SOURCES if path.stem in vague] == []


def test_this_python_is_one_that_the_project_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert sys.version_info >= (3, 11)
