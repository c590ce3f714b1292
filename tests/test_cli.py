"""The command line as people meet it: help, mistakes, what is imported, and the bootstrap node as a process."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peer import __version__, events
from peer.cli.main import COMMANDS, main, spin_briefly
from peer.cli.printer import Printer, line
from peer.cli.reference import reference

ROOT = Path(__file__).parents[1]
PEER = Path(sys.executable).with_name("peer")
KEY = "12D3KooWP9TBWwJ4zU7iGMT7ZwaFK8MoTgYqcCLtKdFumW6AfJ2Z"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, {"GOMP_SPINCOUNT": "5000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_wait_asleep_unless_the_user_says_otherwise(given: dict[str, str], then: dict[str, str]) -> None:
    environment = dict(given)
    spin_briefly(environment)
    assert environment == then


def test_the_command_decides_how_threads_wait_before_torch_is_there() -> None:
    script = (
        "import os, sys\n"
        "from peer.cli.main import main\n"
        "assert 'torch' not in sys.modules\n"
        "try: main(['--version'])\n"
        "except SystemExit: print(os.environ['GOMP_SPINCOUNT'])\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[-1] == "5000"


# ------------------------------------------------------------------ help


def test_help_lists_the_commands_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = re.findall(r"^  (\w+)  ", capsys.readouterr().out.partition("Commands:")[2], re.MULTILINE)
    assert listed == list(COMMANDS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"peer {__version__}\n"


def test_join_help_has_every_option_in_its_group_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("join", "--help") == 0
    text = capsys.readouterr().out
    groups = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n|\n)+)", text, re.MULTILINE))
    options = {heading: re.findall(r"^  (--[\w-]+)", body, re.MULTILINE) for heading, body in groups.items()}
    assert options == {
        "What is trained": ["--model", "--run", "--inner", "--data", "--rounds"],
        "With whom": ["--bootstrap", "--port", "--announce"],
        "As a guest": ["--max-upload", "--max-download", "--share", "--quota", "--hours"],
        "On this machine": ["--device", "--home", "--json"],
        "Options": ["--help"],
    }
    assert "    peer join --model gpt-125m\n" in text


def test_the_reference_is_what_help_says() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run: make docs"


@pytest.mark.slow
def test_help_and_mistakes_import_nothing_heavy() -> None:
    calls = [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["join", "--port", "-1"],
        ["bootstrap", "--port", "-1"],
    ]
    code = (
        "import sys\nfrom peer.cli.main import main\n"
        f"for arguments in {calls!r}:\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'hivemind', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ------------------------------------------------------------------ mistakes

WRONG: list[tuple[Sequence[str], int, str]] = [
    (["jion"], 2, r"There is no command 'jion'; did you mean 'join'\?"),
    (["join", "--prot", "1"], 2, r"No such option:? '?--prot'?.*--port"),
    (["join", "--port", "x"], 2, "'--port': 'x' is not a valid integer"),
    (["join", "--port"], 2, "'--port' requires an argument"),
    (["join", "now"], 2, r"unexpected extra argument \(now\)"),
    (["join", "--port", "70000"], 1, "port is 70000; give 0 .any free one. to 65535"),
    (["join", "--rounds", "0"], 1, "rounds is 0; give 1 or more"),
    (["join", "--inner", "lord"], 1, '\'inner\' is "lord"; give "adamw" or "lordo" .did you mean "lordo"'),
    (["swarm", "--inner", "sgd"], 1, '\'optimizer\' in .inner. is "sgd"; give "adamw" or "lordo"'),
    (["join", "--device", "gpu"], 1, "device is 'gpu'; give auto, cpu"),
    (
        ["join", "--max-upload", "20"],
        1,
        "max_upload: '20' is no rate; write bits a second with their unit, such as 20M",
    ),
    (["join", "--quota", "200G"], 1, "quota: '200G' is no size; write bytes with their unit, such as 200GB"),
    (["join", "--hours", "22-7"], 1, "hours: '22-7' is not hours of the day; write them such as 22:00-07:00"),
    (["join", "--share", "0"], 1, "share is 0; give a part from 0.01, up to 1"),
    (["join", "--bootstrap", "1.2.3.4:7700"], 1, "'1.2.3.4:7700' is malformed: it should look like /ip4/"),
    (["bootstrap", "--announce", "0.0.0.0"], 1, "'0.0.0.0'"),
    (["bootstrap", "--bootstrap", f"/ip4/1.2.3/tcp/7700/p2p/{KEY}"], 1, "'/ip4/1.2.3/.*' is malformed"),
]


@pytest.mark.parametrize(("arguments", "status", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_gets_one_sentence_and_a_status(
    arguments: list[str],
    status: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(*arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"peer: .*{sentence}.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_peer_alone_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "Commands:" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.config.Config.load", interrupted)
    assert run("join") == 130
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------ what a daemon prints

PEER_ID = "ab12cd34" * 8
ROUND = events.Round(
    round=3,
    steps=20,
    loss=2.5,
    lr=1e-3,
    tokens=20480,
    seconds=4.0,
    drift=1.0,
    micro_batch=8,
    peers=2,
    meetings=5,
    declined=1,
    failed=0,
    bytes_sent=1_250_000,
    bytes_received=1,
    partner=PEER_ID,
    stall_s=0.0,
    optimizer_bytes=2_400_000,
    feedback=None,
)

LINES: list[tuple[events.Event, str | None]] = [
    (ROUND, "round 3: loss 2.500, 20 steps at 5,120 tokens/s, 2 peers, 5 meetings, last with ab12cd34, 1.2 MB sent"),
    (
        events.Skip(PEER_ID, "failed", "silent", "nothing moved for 15 s"),
        "meeting with ab12cd34 failed: nothing moved for 15 s",
    ),
    (events.Skip(None, "failed", "x", "why"), "meeting failed: why"),
    (events.Skip(PEER_ID, "declined", "busy", "in another meeting"), None),
    (events.CatchUp(PEER_ID, 7, 10, 1.25), "caught up with ab12cd34 at round 7 in 1.2 s"),
    (events.Stop(3, "signal", "at round 3 of 10"), "stopped (signal): at round 3 of 10"),
    (events.Checkpoint(3, "here", 10, 0.1), None),
]


@pytest.mark.parametrize(("event", "expected"), LINES, ids=lambda value: getattr(value, "kind", None))
def test_an_event_is_told_in_one_line(event: events.Event, expected: str | None) -> None:
    assert line(events.record(event, 0.0)) == expected


def test_a_loss_that_is_not_finite_and_a_lonely_round_are_told() -> None:
    import dataclasses

    lonely = dataclasses.replace(ROUND, loss=float("nan"), partner=None, meetings=0)
    assert line(events.record(lonely, 0.0)) == (
        "round 3: loss not finite, 20 steps at 5,120 tokens/s, 2 peers, 0 meetings, 1.2 MB sent"
    )


def test_the_memory_of_the_optimizer_is_told_after_the_first_round_alone() -> None:
    out = io.StringIO()
    printer = Printer(out)
    for _ in range(3):
        printer.event(events.record(ROUND, 0.0))
    told = out.getvalue().splitlines()
    assert told[1] == "the inner optimizer takes 2.4 MB of memory"
    assert [text.startswith("round 3") for text in told] == [True, False, True, True]


def test_json_is_the_events_own() -> None:
    out = io.StringIO()
    record = events.record(ROUND, 0.0)
    Printer(out).json(record)
    import json

    assert json.loads(out.getvalue()) == record


def test_a_reader_that_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out:
        printer = Printer(out)
        for _ in range(3):
            printer.say("nobody reads this")


# ------------------------------------------------------------------ the bootstrap node


@asynccontextmanager
async def bootstrap(home: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start a node; yield its process and what it printed until it was up."""
    process = await asyncio.create_subprocess_exec(
        PEER, "bootstrap", "--home", home, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            said = (await process.stdout.readuntil(KEY[:8].encode()) + await process.stdout.readline()).decode()
            yield process, said
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_bootstrap_node_says_how_to_join_and_ends_well(number: int, tmp_path: Path) -> None:
    async with bootstrap(tmp_path / "home", "--port", "0") as (process, said):
        assert re.search(
            r"^  peer join --model gpt-125m --bootstrap /ip4/[\d.]+/tcp/\d+/p2p/12D3KooW\w{44}$", said, re.M
        )
        if sys.platform == "linux":
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(number)
        _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")


@pytest.mark.slow
async def test_a_bootstrap_node_keeps_its_address_and_its_home_to_itself(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with bootstrap(home, "--port", "0") as (process, said):
        address = re.search(r"/ip4/\S+", said)
        assert address is not None
        port = address[0].split("/")[4]
        for arguments, sentence in [
            (("--home", home), rb"peer: home '.*' is in use by the daemon with process id \d+"),
            (("--home", tmp_path / "other", "--port", port), rb"peer: Port \d+ .*--port"),
        ]:
            second = await asyncio.create_subprocess_exec(
                PEER, "bootstrap", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            _, err = await second.communicate()
            assert second.returncode == 1
            assert re.match(sentence, err)
        process.terminate()
        await process.wait()
    async with bootstrap(home, "--port", port) as (_, said):
        assert address[0] in said


@pytest.mark.slow
async def test_a_bootstrap_node_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    async with bootstrap(tmp_path / "home", "--port", "0") as (process, said):
        address = re.search(r"/tcp/(\d+)/", said)
        assert address is not None
        process.kill()
        await process.wait()
        # Its DHT child still listens until it notices.
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(address[1]))
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.05)
