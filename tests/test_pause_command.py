from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from peer.cli.main import main
from peer.cli.pause import command as pause
from peer.cli.resume import command as resume
from peer.errors import ConfigError
from peer.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    home.manifest.write_text('model = "gpt-nano"')
    return home


def run(command: click.Command, home: Home) -> str:
    result = CliRunner().invoke(command, ["--home", str(home.path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    [line] = result.stdout.splitlines()
    return line


def test_a_daemon_that_runs_is_told_to_wait_and_to_go_on(home: Home) -> None:
    with home.lock("run", "peer"):
        assert run(pause, home) == (
            "Paused: the peer saves, leaves the swarm and waits without training, "
            f"until: peer resume --home {home.path}"
        )
        assert home.paused_s is not None
        assert run(resume, home) == "Resumed: the peer trains, unless peer status says what else it waits for"
        assert home.paused_s is None


def test_without_a_daemon_the_next_one_will_wait(home: Home) -> None:
    assert run(pause, home) == (
        f"Paused: no daemon runs now; one that is started waits without training, until: peer resume --home {home.path}"
    )
    with home.lock("run", "peer"):
        assert home.paused_s is not None
    assert run(resume, home) == f"Resumed: no daemon runs now; start it with: peer join --home {home.path}"
    assert home.paused_s is None


def test_asking_twice_changes_nothing_and_says_so(home: Home) -> None:
    run(pause, home)
    since = home.paused_s
    assert run(pause, home).startswith("Paused already, since 20")
    assert home.paused_s == since
    run(resume, home)
    assert run(resume, home).startswith("It was not paused: no daemon runs now; start it with: peer join")


@pytest.mark.parametrize("command", [pause, resume], ids=["pause", "resume"])
def test_a_home_in_which_no_peer_was_started_is_an_error_with_the_next_step(
    command: click.Command, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"no peer was ever started in home '{tmp_path}/x'; start one with: peer join"
    ):
        run(command, Home(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_the_users_own_home_is_meant_unless_another_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main([command])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith(f"peer: no peer was ever started in home '{tmp_path}/.peerloom'; start")
    home = Home(tmp_path / ".peerloom")
    home.create()
    home.manifest.write_text('model = "gpt-nano"')
    home.pause()
    with pytest.raises(SystemExit) as caught:
        main([command])
    assert caught.value.code is None
    assert capsys.readouterr().out.endswith({"pause": "until: peer resume\n", "resume": "with: peer join\n"}[command])
    assert (home.paused_s is None) is (command == "resume")
