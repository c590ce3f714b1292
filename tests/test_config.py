"""One daemon's settings: flags over config.toml over defaults, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.config import Config
from peer.core.hours import Hours
from peer.errors import ConfigError

KEY = "12D3KooWP9TBWwJ4zU7iGMT7ZwaFK8MoTgYqcCLtKdFumW6AfJ2Z"
ONE = f"/ip4/203.0.113.5/tcp/7700/p2p/{KEY}"
TWO = f"/dns4/peer.example.org/tcp/7701/p2p/{KEY}"


def load(home: Path, written: str = "", **flags: Any) -> Config:
    (home / "config.toml").write_text(written)
    return Config.load({"home": str(home), **flags})


def test_without_flags_and_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.load({}) == Config()
    assert Config() == Config(
        home=tmp_path / ".peerloom",
        run=None,
        model="gpt-125m",
        bootstraps=(),
        data=None,
        rounds=None,
        device="auto",
        port=0,
        announce=None,
        max_upload=None,
        max_download=None,
        quota=None,
        hours=None,
        share=0.5,
        json=False,
    )


WRITTEN = f"""
model = "gpt-nano"
inner = "lordo"
bootstrap = ["{ONE}", "{TWO}"]
data = "book.txt"
rounds = 7
device = "cuda:1"
port = 7702
announce = "peer.example.org"
max_upload = "20Mbit"
max_download = "800 kbit/s"
quota = "200GB"
hours = "22:00-07:00,12:00-13:00"
share = 0.25
json = true
"""


def test_every_flag_but_home_can_stand_in_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, WRITTEN) == Config(
        home=tmp_path,
        model="gpt-nano",
        inner="lordo",
        bootstraps=(ONE, TWO),
        data="book.txt",
        rounds=7,
        device="cuda:1",
        port=7702,
        announce="peer.example.org",
        max_upload=20e6,
        max_download=800e3,
        quota=200 * 10**9,
        hours=Hours(((1320, 420), (720, 780))),
        share=0.25,
        json=True,
    )


@pytest.mark.parametrize(
    ("flag", "value", "field", "found"),
    [
        ("model", "gpt-10m", "model", "gpt-10m"),
        ("inner", "adamw", "inner", "adamw"),
        ("bootstrap", (TWO,), "bootstraps", (TWO,)),
        ("data", "other", "data", "other"),
        ("rounds", 8, "rounds", 8),
        ("device", "cpu", "device", "cpu"),
        ("port", 0, "port", 0),
        ("announce", "192.0.2.7:70", "announce", "192.0.2.7:70"),
        ("max_upload", "1Gbit", "max_upload", 1e9),
        ("max_download", "64 kbit", "max_download", 64e3),
        ("quota", "1.5TB", "quota", 1_500 * 10**9),
        ("hours", "0:00-6:00", "hours", Hours(((0, 360),))),
        ("share", 1, "share", 1.0),
        ("json", False, "json", False),
    ],
)
def test_a_flag_wins_over_the_file(flag: str, value: Any, field: str, found: Any, tmp_path: Path) -> None:
    assert getattr(load(tmp_path, WRITTEN, **{flag: value}), field) == found


def test_flags_that_were_not_given_leave_the_file_alone(tmp_path: Path) -> None:
    nothing = dict.fromkeys(["run", "model", "inner", "data", "rounds", "device", "port", "announce", "json"])
    nothing |= dict.fromkeys(["max_upload", "max_download", "quota", "hours", "share"])
    assert load(tmp_path, WRITTEN, bootstrap=(), **nothing) == load(tmp_path, WRITTEN)


def test_a_callers_defaults_are_weaker_than_file_and_flags(tmp_path: Path) -> None:
    defaults = {"home": tmp_path / "elsewhere", "port": 7700}
    assert Config.load({"port": None}, defaults) == Config(home=tmp_path / "elsewhere", port=7700)
    (tmp_path / "config.toml").write_text("port = 5")
    assert Config.load({"home": str(tmp_path)}, defaults).port == 5
    assert Config.load({"home": str(tmp_path), "port": 6}, defaults).port == 6


def test_a_run_names_its_model_unless_a_model_is_given_beside_it(tmp_path: Path) -> None:
    assert load(tmp_path, run="run.toml").model == ""
    assert load(tmp_path, run="run.toml", model="gpt-10m").model == "gpt-10m"
    assert load(tmp_path, 'model = "gpt-10m"', run="run.toml").model == ""
    assert load(tmp_path, 'inner = "lordo"', run="run.toml").inner is None
    assert load(tmp_path, run="run.toml", inner="lordo").inner == "lordo"
    assert load(tmp_path, 'run = "run.toml"', model="gpt-10m").model == "gpt-10m"


def test_a_run_in_the_file_lies_beside_it_and_one_in_a_flag_where_it_was_typed(tmp_path: Path) -> None:
    assert load(tmp_path, 'run = "run.toml"').run == tmp_path / "run.toml"
    assert load(tmp_path, run="run.toml").run == Path("run.toml")


def test_a_home_that_belongs_to_a_run_goes_on_with_it_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt-nano"')
    found = Config.load({"home": str(tmp_path)})
    assert (found.run, found.model) == (tmp_path / "run.toml", "")
    again = Config.load({"home": str(tmp_path), "inner": "lordo"})
    assert (again.run, again.model, again.inner) == (tmp_path / "run.toml", "", "lordo")
    assert Config.load({"home": str(tmp_path), "model": "gpt-10m"}).run is None
    assert Config.load({"home": str(tmp_path), "run": "other.toml"}).run == Path("other.toml")


def test_one_address_in_two_spellings_is_one_bootstrap() -> None:
    assert Config(bootstraps=(ONE, TWO, ONE.replace("/p2p/", "/ipfs/"), f" {ONE}\n")).bootstraps == (ONE, TWO)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("prot = 1", {}, r"config.toml': unknown key 'prot'; did you mean 'port'\?"),
    ("bootstraps = []", {}, r"unknown key 'bootstraps'; did you mean 'bootstrap'\?"),
    ('home = "x"', {}, "unknown key 'home'"),
    ('port = "1"', {}, "config.toml': 'port' is \"1\"; give a whole number"),
    ('bootstrap = "/ip4"', {}, "'bootstrap' is \"/ip4\"; give a list of texts"),
    (
        'bootstrap = ["/ip4/1.2.3.4"]',
        {},
        r"config.toml': .*'/ip4/1.2.3.4' is malformed: .*/ip4/203.0.113.5/tcp/7700/p2p/",
    ),
    ("port = 65536", {}, "config.toml': port is 65536; give 0 .any free one. to 65535"),
    ("port = ", {}, "config.toml': not TOML"),
    ("", {"port": -1}, "^port is -1; give 0 .any free one. to 65535"),
    ("", {"rounds": 0}, "^rounds is 0; give 1 or more"),
    ("", {"inner": "lord"}, '\'inner\' is "lord"; give "adamw" or "lordo" .did you mean "lordo"'),
    ('max_upload = "20"', {}, "config.toml': max_upload: '20' is no rate; write bits a second with their unit"),
    ("max_upload = 20", {}, "config.toml': 'max_upload' is 20; give text in quotes"),
    ('max_upload = "0Mbit"', {}, "max_upload: '0Mbit' lets next to nothing through; give 32kbit or more"),
    ('max-upload = "20Mbit"', {}, r"unknown key 'max-upload'; did you mean 'max_upload'\?"),
    ("", {"max_download": "2.5 MB/s"}, "^max_download: '2.5 MB/s' is no rate"),
    ("", {"quota": "200"}, "^quota: '200' is no size; write bytes with their unit, such as 200GB"),
    ("", {"hours": "7:00-7:00"}, "^hours: '7:00-7:00' ends where it begins; leave hours out for the whole day"),
    ("share = 0.0", {}, "config.toml': share is 0; give a part from 0.01, up to 1"),
    ("", {"share": 1.01}, "^share is 1.01; give a part from 0.01, up to 1"),
    ("", {"share": float("nan")}, "'share' is NaN; give a number"),
    ("", {"device": "gpu"}, "^device is 'gpu'; give auto, cpu, cuda, cuda:0"),
    ("", {"model": ""}, "^model is empty; give a preset such as gpt-125m"),
    ("", {"announce": "0.0.0.0"}, "'0.0.0.0'"),
    ("", {"announce": "a b"}, "'a b' is malformed"),
    (
        "",
        {"bootstrap": (f"/ip4/203.0.113.5/udp/7700/p2p/{KEY}",)},
        "udp/7700.* is malformed: it should look like /ip4/",
    ),
    ("", {"run": "~nobody-of-that-name/x"}, "'run' is \"~nobody-of-that-name/x\"; give a path without ~"),
]


@pytest.mark.parametrize(("written", "flags", "sentence"), REFUSED)
def test_a_wrong_setting_is_refused_with_what_to_give(
    written: str, flags: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(tmp_path, written, **flags)
    assert "\n" not in str(caught.value)
