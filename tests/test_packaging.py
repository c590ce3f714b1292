"""What is built is whole: sdist, wheel, and the command out of the wheel alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def call(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel with the setuptools that is installed, so without a network."""
    out.mkdir()
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    call(sys.executable, "-W", "ignore", "-c", code, cwd=source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy, since setuptools builds in place and would find there what an earlier build left.
    folder = tmp_path_factory.mktemp("sdist")
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=leave, symlinks=True)
    return build("sdist", folder / "source", folder / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    folder = sdist.parents[1] / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder.parent / "wheel")


def packaged_files() -> set[str]:
    folders = {"peer": ROOT / "peer", "peer/cli": ROOT / "cli"}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_sdist_has_all_that_tests_and_builds_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"proto/peer.proto", "constraints.txt", "Makefile", "LICENSE", "README.md", "docs/cli.md"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")} <= names


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == packaged_files()


def test_the_command_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    call(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path
    )
    top = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"bin", "peer"}
    away = Path(tmp_path.anchor)
    assert "join" in call(target / "bin" / "peer", "--help", cwd=away, PYTHONPATH=str(target))
    code = "import peer.cli.main, peer.manifest as m; print(peer.cli.__file__, m.Manifest.preset('gpt-nano').name)"
    said = call(sys.executable, "-P", "-c", code, cwd=away, PYTHONPATH=str(target)).split()
    assert said == [str(target / "peer" / "cli" / "__init__.py"), "gpt-nano"]


def test_what_is_installed_fits_together() -> None:
    assert call(sys.executable, "-m", "pip", "check", cwd=ROOT) == "No broken requirements found.\n"
