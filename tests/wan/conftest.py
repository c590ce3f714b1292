"""What the tests need that is not everywhere; where it is missing they are skipped with what to install."""

from __future__ import annotations

import shutil

import pytest

from peer.errors import ConfigError
from tests.wan import Line, Lines, Wan, iperf


@pytest.fixture(scope="session")
def emulation() -> None:
    try:
        with Wan(Lines((Line(),))):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def iperf3() -> None:
    if shutil.which("iperf3") is None:
        pytest.skip(iperf.MISSING)


@pytest.fixture(scope="session")
def ping() -> None:
    if shutil.which("ping") is None:
        pytest.skip("ping is not installed: run 'apt-get install iputils-ping'")
