"""Daemons among themselves, without sockets: they train, meet, come late, vanish, return."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import checkpoint, tail
from peer.catchup import Newcomer
from peer.core.frame import Said
from peer.core.members import Member
from peer.donor import PROTOCOL as STATE_PROTOCOL
from peer.errors import PeerError
from peer.events import EventLog
from peer.home import Home
from peer.net.base import Stream
from peer.net.memory import MemoryNetwork
from peer.wire.peer_pb2 import Message, Offer, StateRequest
from tests.swarm.memory_swarm import Swarm, tiny_run


def final(swarm: Swarm, name: str) -> dict[str, torch.Tensor]:
    loaded = checkpoint.load(swarm.folder / name, swarm.run.run_id)
    assert loaded is not None
    return loaded.state.weights


async def test_four_peers_train_and_meet_until_the_run_is_over(tmp_path: Path) -> None:
    names = ["ann", "ben", "cat", "dan"]
    swarm = Swarm(tmp_path, tiny_run(rounds=60))
    for name in names:
        swarm.join(name)
    ends = await swarm.end()
    assert {stop.reason for stop in ends.values()} == {"finished"}
    for name in names:
        rounds = swarm.events(name, "round")
        first = swarm.events(name, "start")[0]["round"]  # one that was slow to start has caught up with the others
        assert [event["round"] for event in rounds] == list(range(first + 1, 61))
        assert rounds[-1]["loss"] < math.log(257) - 1  # a model that knows nothing is at the logarithm
        assert swarm.events(name)[-1]["event"] == "stop"
    meetings = [event for name in names for event in swarm.events(name, "meeting")]
    assert len(meetings) >= 8
    for event in meetings:
        assert event["bytes_sent"] > 0
        assert event["correction"] > 0


async def test_after_the_last_round_peers_meet_on_for_as_long_as_it_took(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, replace(tiny_run(rounds=2), local_steps=None, round_seconds=1.5))
    for name in ("ann", "ben"):
        swarm.join(name)
    ends = await swarm.end()
    assert {stop.reason for stop in ends.values()} == {"finished"}
    for name in ("ann", "ben"):
        events = swarm.events(name)
        last = max(index for index, event in enumerate(events) if event["event"] == "round")
        assert events[last]["round"] == 2
        landing = [event for event in events[last:] if event["event"] == "meeting"]
        assert landing and all(event["round"] == 2 for event in landing)


async def test_who_is_alone_does_not_wait_for_anybody_after_the_last_round(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=1))
    swarm.join("ann")
    await swarm.end()
    assert not any("all rounds are done" in word for word in swarm.words)


def has_done_a_round(swarm: Swarm, name: str) -> bool:
    return bool(swarm.events(name, "round"))


async def test_peers_read_different_shards(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run())
    for name in ("ann", "ben", "cat"):
        swarm.join(name)
        await swarm.until(partial(has_done_a_round, swarm, name))
    shards = {name: swarm.daemons[name]._roster._member.shard for name in swarm.daemons}
    assert len(set(shards.values())) == 3
    await swarm.end()


async def test_a_newcomer_continues_with_the_donors_anchor_momentum_and_round(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=4000))
    swarm.join("ann")
    await swarm.until(lambda: len(swarm.events("ann", "round")) >= 3)
    swarm.join("ben")
    await swarm.until(lambda: bool(swarm.events("ben", "start")))
    (caught,) = swarm.events("ben", "catch-up")
    snapshot = swarm.stay("ann").donor._snapshot
    assert snapshot is not None
    assert swarm.events("ben", "start")[0]["how"] == "caught-up"
    assert swarm.events("ben", "start")[0]["round"] == snapshot.header.round == caught["round"]
    await swarm.until(lambda: bool(swarm.events("ben", "meeting")) and len(swarm.events("ben", "round")) >= 2)
    first, *_ = swarm.events("ben", "round")
    assert first["round"] == caught["round"] + 1
    ann = {event["round"]: event["lr"] for event in swarm.events("ann", "round")}
    assert first["lr"] == pytest.approx(ann[first["round"]], rel=1e-12)
    await swarm.stop()


async def test_what_a_newcomer_adopts_is_what_the_donor_sent(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=4000))
    swarm.join("ann")
    await swarm.until(lambda: len(swarm.events("ann", "checkpoint")) >= 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in final(swarm, "ann").items()}
    network = MemoryNetwork(swarm.hub, "ben")
    await network.start(ignore)
    log, told = EventLog(tmp_path / "ben.jsonl"), list[str]()
    newcomer = Newcomer(network, swarm.run, shapes, "ben", log, told.append)
    member = Member(swarm.run.run_id, "ann", ("ann:1",), 2, 0, 0.0)
    found = await newcomer.fetch([member], 0, None)
    snapshot = swarm.stay("ann").donor._snapshot
    assert found is not None
    state, donor = found
    assert donor == "ann"
    assert snapshot is not None
    sent = dict(zip([entry.name for entry in snapshot.header.tensors], snapshot.tensors, strict=True))
    assert all(torch.equal(sent[f"anchor/{name}"], tensor) for name, tensor in state.anchor.items())
    assert all(torch.equal(sent[f"outer/momentum/{name}"], t) for name, t in state.outer["momentum"].items())
    assert state.round == snapshot.header.round
    assert await newcomer.fetch([member], 10**6, None) is None
    assert await newcomer.fetch([member], 0, "another origin") is None
    assert "origin" in list(tail.read(tmp_path / "ben.jsonl"))[-1]["detail"]
    swarm.daemons["ann"].stop()
    await swarm.end()
    await network.close()


async def test_the_others_go_on_when_one_vanishes(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=4000))
    for name in ("ann", "ben", "cat"):
        swarm.join(name)
    await swarm.until(lambda: len(swarm.events("cat", "meeting")) >= 2)
    swarm.hub.kill("cat")
    swarm.daemons["cat"].stop()
    seen = len(swarm.events("ann", "meeting"))
    await swarm.until(lambda: len(swarm.events("ann", "meeting")) >= seen + 3)
    assert {event["partner"] for event in swarm.events("ann", "meeting")[seen + 1 :]} == {"ben"}
    for name in ("ann", "ben"):
        swarm.daemons[name].stop()
    ends = await swarm.end()
    assert {ends[name].reason for name in ("ann", "ben")} <= {"signal", "finished"}


async def test_a_peer_that_is_stopped_resumes_where_it_was(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=40))
    swarm.join("ann")
    await swarm.until(lambda: len(swarm.events("ann", "round")) >= 3)
    swarm.daemons["ann"].stop()
    stop = (await swarm.end())["ann"]
    assert stop.reason == "signal"
    before = final(swarm, "ann")
    assert (swarm.run.run_id, "ann") not in swarm.hub.records or not swarm.hub.records[
        swarm.run.run_id, "ann"
    ].addresses
    swarm.join("ann", rounds=2)
    await swarm.end()
    start = swarm.events("ann", "start")[-1]
    assert (start["how"], start["round"]) == ("resumed", stop.round)
    assert swarm.events("ann", "stop")[-1]["round"] == stop.round + 2
    assert any(not torch.equal(before[name], tensor) for name, tensor in final(swarm, "ann").items())


async def ignore(stream: Stream) -> None:
    """Serve nothing."""


async def test_two_runs_on_one_network_do_not_mix(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=4000))
    other = tiny_run(rounds=4000, seed=1)
    assert other.run_id != swarm.run.run_id
    for name, run in (("ann", None), ("ben", None), ("cat", other), ("dan", other)):
        swarm.join(name, run)
    await swarm.until(lambda: all(len(swarm.events(name, "meeting")) >= 3 for name in swarm.daemons))
    await swarm.stop()
    partners = {name: {e["partner"] for e in swarm.events(name, "meeting")} for name in swarm.daemons}
    assert partners == {"ann": {"ben"}, "ben": {"ann"}, "cat": {"dan"}, "dan": {"cat"}}


async def test_a_peer_alone_says_so_once_and_trains_on(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=60))
    swarm.join("ann")
    assert (await swarm.end())["ann"].reason == "finished"
    assert [(e["partner"], e["reason"]) for e in swarm.events("ann", "skip")] == [(None, "alone")]
    assert swarm.events("ann", "start")[0]["how"] == "fresh-alone"
    assert len(swarm.events("ann", "round")) == 60


async def test_a_home_of_another_run_is_left_alone(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run())
    swarm.join("ann")
    await swarm.end()
    with pytest.raises(PeerError, match="run"):
        await swarm.join("ann", tiny_run(seed=5))
    assert final(swarm, "ann")


async def test_a_peer_that_the_swarm_has_left_behind_catches_up_instead_of_mixing(tmp_path: Path) -> None:
    run = tiny_run(rounds=4000, exchange=replace(tiny_run().exchange, max_lag=3))
    swarm = Swarm(tmp_path, run)
    swarm.join("ben", rounds=1)
    await swarm.end()
    swarm.lives.clear()
    swarm.join("ann")
    record = (run.run_id, "ann")
    await swarm.until(lambda: record in swarm.hub.records and swarm.hub.records[record].round >= 30)
    swarm.join("ben")
    await swarm.until(lambda: bool(swarm.events("ben", "catch-up")))
    assert swarm.events("ben", "catch-up")[0]["round"] >= 30
    for event in swarm.events("ben", "meeting"):
        assert abs(event["round"] - event["partner_round"]) <= 3
    await swarm.stop()


async def test_a_meeting_in_progress_is_finished_or_abandoned_when_a_peer_leaves(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=4000))
    for name in ("ann", "ben"):
        swarm.join(name)
    await swarm.until(lambda: bool(swarm.events("ann", "meeting")))
    meetings = swarm.stay("ann").meetings
    await swarm.until(lambda: bool(meetings._talks))
    talks = list(meetings._talks)
    swarm.daemons["ann"].stop()
    await swarm.lives["ann"]
    assert talks
    assert all(talk.exchange is None or talk.exchange.ended for talk in talks)
    assert not meetings._talks
    swarm.daemons["ben"].stop()
    await swarm.end()
    applied = {name: len(swarm.events(name, "meeting")) for name in ("ann", "ben")}
    assert applied["ann"] == applied["ben"]


# ---------------------------------------------------------------- as a guest


def has_met_again(swarm: Swarm, name: str, since: str) -> bool:
    return any(event["time"] > since for event in swarm.events(name, "meeting"))


async def test_a_peer_that_is_paused_saves_leaves_and_comes_back_by_catching_up(tmp_path: Path) -> None:
    run = replace(tiny_run(rounds=100_000), exchange=replace(tiny_run().exchange, max_lag=5))
    swarm = Swarm(tmp_path, run)
    for name in ("ann", "ben"):
        swarm.join(name)
    await swarm.until(lambda: all(swarm.events(name, "meeting") for name in ("ann", "ben")))
    Home(tmp_path / "ann").pause()
    await swarm.until(lambda: bool(swarm.events("ann", "pause")))
    (pause,) = swarm.events("ann", "pause")
    assert pause["reason"] == "paused"
    assert "peer resume" in pause["detail"]
    kinds = [event["event"] for event in swarm.events("ann")]
    assert kinds[-1] == "pause" and "checkpoint" in kinds[-3:]
    saved = checkpoint.load(tmp_path / "ann", run.run_id)
    assert saved is not None and saved.state.round == pause["round"]
    assert await MemoryNetwork(swarm.hub, "eve").members(run.run_id) and not [
        member
        for member in await MemoryNetwork(swarm.hub, "eve").members(run.run_id)
        if member.peer_id == "ann" and member.addresses
    ]
    ahead = pause["round"] + 2 * run.exchange.max_lag
    await swarm.until(lambda: swarm.daemons["ben"]._roster._member.round > ahead)  # which everybody can see
    assert swarm.events("ann")[-1]["event"] == "pause"  # it neither trained nor met anybody
    Home(tmp_path / "ann").resume()
    await swarm.until(lambda: bool(swarm.events("ann", "resume")))
    (resume,) = swarm.events("ann", "resume")
    assert swarm.events("ann", "catch-up")[-1]["round"] == resume["round"] > ahead - run.exchange.max_lag
    await swarm.until(lambda: has_met_again(swarm, "ann", resume["time"]))
    await swarm.until(lambda: swarm.events("ann", "round")[-1]["round"] > resume["round"])
    ends = await swarm.stop()
    assert {stop.reason for stop in ends.values()} == {"signal"}


async def test_a_peer_of_a_run_without_meetings_trains_alone_to_the_end(tmp_path: Path) -> None:
    run = tiny_run(rounds=100_000)
    swarm = Swarm(tmp_path, replace(run, exchange=replace(run.exchange, meetings=0)))
    for name in ("ann", "ben"):
        swarm.join(name)
    await swarm.until(lambda: all(len(swarm.events(name, "round")) > 20 for name in ("ann", "ben")))
    ends = await swarm.stop()
    assert {stop.reason for stop in ends.values()} == {"signal"}
    assert not swarm.events("ann", "meeting")


async def test_who_leaves_while_a_checkpoint_is_written_saves_once_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saving, overlaps = checkpoint.save, threading.Semaphore(), []

    def slow(*words: Any) -> Any:
        overlaps.append(not saving.acquire(blocking=False))
        time.sleep(0.3)
        try:
            return save(*words)
        finally:
            saving.release()

    monkeypatch.setattr(checkpoint, "save", slow)
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann")
    await swarm.until(lambda: bool(overlaps))
    (stop,) = (await swarm.stop()).values()
    assert len(overlaps) >= 2
    assert not any(overlaps)
    saved = checkpoint.load(tmp_path / "ann", swarm.run.run_id)
    assert saved is not None
    assert saved.state.round == stop.round


async def test_a_peer_that_leaves_breaks_off_what_a_newcomer_reads(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann")
    await swarm.until(lambda: bool(swarm.events("ann", "round")))
    donor, heard = swarm.stay("ann").donor, []

    class Leaving:
        """A newcomer's stream; the donor's peer leaves after the third piece."""

        sent_bytes = received_bytes = 0

        async def send(self, said: Said, timeout_s: float) -> None:
            assert isinstance(said, Message)
            heard.append(said.WhichOneof("body"))
            if heard.count("state_chunk") == 3:
                donor.close()

        async def receive(self, timeout_s: float) -> Said | None:
            raise NotImplementedError

        async def close(self) -> None:
            pass

    request = StateRequest(protocol=STATE_PROTOCOL, run_id=swarm.run.run_id, peer_id="eve", round=0)
    await donor.serve(Leaving(), request)
    assert heard == ["state_header", *["state_chunk"] * 3, "abort"]
    await swarm.stop()


async def test_a_pause_breaks_off_a_first_download_which_begins_again_after_it(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann")
    await swarm.until(lambda: bool(swarm.events("ann", "round")))
    donor = swarm.stay("ann").donor
    serve, asked, going = donor.serve, 0, asyncio.Event()

    async def stuck(stream: Stream, request: StateRequest) -> None:
        nonlocal asked
        asked += 1
        await going.wait()
        await serve(stream, request)

    donor.serve = stuck  # type: ignore[method-assign]
    swarm.join("ben")
    await swarm.until(lambda: asked == 1)
    Home(tmp_path / "ben").pause()
    await swarm.until(lambda: bool(swarm.events("ben", "pause")))
    going.set()
    Home(tmp_path / "ben").resume()
    await swarm.until(lambda: bool(swarm.events("ben", "round")))
    assert asked == 2
    assert [event["event"] for event in swarm.events("ben")][:3] == ["pause", "catch-up", "start"]
    await swarm.stop()


async def test_a_short_pause_goes_on_where_it_stopped(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann")
    await swarm.until(lambda: bool(swarm.events("ann", "round")))
    Home(tmp_path / "ann").pause()
    await swarm.until(lambda: bool(swarm.events("ann", "pause")))
    before = swarm.events("ann", "pause")[0]["round"]
    Home(tmp_path / "ann").resume()
    await swarm.until(lambda: swarm.events("ann")[-1]["event"] == "round" and bool(swarm.events("ann", "resume")))
    assert swarm.events("ann", "resume")[0]["round"] == before
    rounds = [event["round"] for event in swarm.events("ann", "round")]
    assert rounds == list(range(1, len(rounds) + 1))
    await swarm.stop()


async def test_a_peer_that_is_started_while_paused_waits_and_can_be_stopped(tmp_path: Path) -> None:
    home = Home(tmp_path / "ann")
    home.create()
    home.pause()
    swarm = Swarm(tmp_path, tiny_run())
    swarm.join("ann")
    await swarm.until(lambda: any("waiting, without training: paused since" in word for word in swarm.words))
    assert [event["event"] for event in swarm.events("ann")] == ["pause"]
    (stop,) = (await swarm.stop()).values()
    assert stop.reason == "signal"


async def test_who_asks_a_paused_peer_is_told_so_and_asks_others(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann")
    await swarm.until(lambda: bool(swarm.events("ann", "round")))
    Home(tmp_path / "ann").pause()
    await swarm.until(lambda: bool(swarm.events("ann", "pause")))
    eve = MemoryNetwork(swarm.hub, "eve")
    await eve.start(ignore)
    stream = await eve.dial("ann:1", 5)
    await stream.send(Message(offer=Offer()), 5)
    answer = await stream.receive(5)
    assert isinstance(answer, Message)
    assert answer.abort.reason == "paused"
    await stream.close()
    await swarm.stop()


async def test_a_peer_whose_quota_is_used_up_leaves_and_its_traffic_is_kept(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, tiny_run(rounds=100_000))
    swarm.join("ann", quota=1_000_000)
    await swarm.until(lambda: bool(swarm.events("ann", "round")))
    swarm.daemons["ann"]._throttle.sent_bytes += 600_000
    swarm.daemons["ann"]._throttle.received_bytes += 400_000
    await swarm.until(lambda: bool(swarm.events("ann", "pause")))
    assert swarm.events("ann", "pause")[0]["reason"] == "quota"
    await swarm.stop()
    assert "1000000" in (tmp_path / "ann" / "traffic.json").read_text()
