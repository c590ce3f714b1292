"""The month's bytes of a home: counted by the local calendar, kept over restarts, whatever happens to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.quota import KEPT, Quota

NOVEMBER, LAST, DECEMBER = date(2026, 11, 12), date(2026, 11, 30), date(2026, 12, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traffic.json"


def silent(sentence: str) -> None:
    pytest.fail(sentence)


def test_bytes_of_a_month_add_up_until_the_next_one_begins(path: Path) -> None:
    quota = Quota(path, silent)
    assert quota.used_bytes(NOVEMBER) == 0
    quota.add(300, NOVEMBER)
    quota.add(200, LAST)
    assert quota.used_bytes(LAST) == 500
    assert (quota.left_bytes(800, LAST), quota.left_bytes(500, LAST), quota.left_bytes(499, LAST)) == (300, 0, 0)
    assert quota.used_bytes(DECEMBER) == 0
    assert quota.left_bytes(499, DECEMBER) == 499


def test_a_restart_goes_on_counting(path: Path) -> None:
    quota = Quota(path, silent)
    quota.add(300, NOVEMBER)
    quota.flush()
    again = Quota(path, silent)
    again.add(1, NOVEMBER)
    assert again.used_bytes(NOVEMBER) == 301
    assert json.loads(path.read_text()) == {"format": 1, "months": {"2026-11": 300}}


def test_a_clock_that_was_wrong_for_a_while_loses_no_bytes(path: Path) -> None:
    quota = Quota(path, silent)
    quota.add(300, NOVEMBER)
    quota.add(5, date(1970, 1, 1))
    quota.flush()
    assert Quota(path, silent).used_bytes(NOVEMBER) == 300


def test_the_last_months_are_kept_and_no_more(path: Path) -> None:
    quota = Quota(path, silent)
    for number in range(KEPT + 3):
        quota.add(1, NOVEMBER + number * timedelta(days=31))
    quota.flush()
    months = list(json.loads(path.read_text())["months"])
    assert len(months) == KEPT
    assert months[-1] == f"{NOVEMBER + (KEPT + 2) * timedelta(days=31):%Y-%m}"


def test_nothing_new_writes_nothing(path: Path) -> None:
    quota = Quota(path, silent)
    quota.flush()
    quota.add(0, NOVEMBER)
    quota.flush()
    assert not path.exists()


KILLED = """
import os, sys
from datetime import date
from pathlib import Path
from peer.quota import Quota
quota = Quota(Path(sys.argv[1]), print)
quota.add(300, date(2026, 11, 12))
quota.flush()
quota.add(50, date(2026, 11, 12))
os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_loses_what_it_had_not_flushed(path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60)
    assert Quota(path, silent).used_bytes(NOVEMBER) == 300


def test_what_a_killed_one_left_half_written_does_not_matter(path: Path) -> None:
    quota = Quota(path, silent)
    quota.add(300, NOVEMBER)
    quota.flush()
    path.with_suffix(".new").write_text('{"for')
    again = Quota(path, silent)
    again.add(1, NOVEMBER)
    again.flush()
    assert Quota(path, silent).used_bytes(NOVEMBER) == 301
    assert [each.name for each in path.parent.iterdir()] == ["traffic.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 1, "months": {"2026-11": 3',
        b"\0\xff",
        b"[1]",
        b"{}",
        b'{"format": 2, "months": {}}',
        b'{"format": 1, "months": [3]}',
        b'{"format": 1, "months": {"2026-11": -3}}',
        b'{"format": 1, "months": {"2026-11": "3"}}',
        b'{"format": 1, "months": {"2026-11": true}}',
    ],
)
def test_a_damaged_file_is_put_aside_with_a_warning(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    said: list[str] = []
    quota = Quota(path, said.append)
    [warning] = said
    aside = path.with_suffix(".damaged")
    assert warning.startswith(f"'{path}' is damaged (")
    assert warning.endswith(f"so this month is counted anew; the old one is '{aside}'")
    assert "\n" not in warning
    assert aside.read_bytes() == content
    quota.add(7, NOVEMBER)
    quota.flush()
    assert Quota(path, silent).used_bytes(NOVEMBER) == 7


def test_a_disk_that_refuses_is_told_once_and_the_counting_goes_on(path: Path) -> None:
    said: list[str] = []
    quota = Quota(path, said.append)
    path.with_suffix(".new").mkdir()
    for _ in range(3):
        quota.add(100, NOVEMBER)
        quota.flush()
    [warning] = said
    assert warning.startswith(f"cannot write '{path}' (")
    assert quota.used_bytes(NOVEMBER) == 300
    path.with_suffix(".new").rmdir()
    quota.flush()
    assert Quota(path, silent).used_bytes(NOVEMBER) == 300


def test_a_file_that_cannot_be_read_is_an_error_with_what_to_do(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"cannot read '{path}' \(.+\); make it readable, or remove it"):
        Quota(path, silent)
