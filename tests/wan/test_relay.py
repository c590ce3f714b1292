"""Packets between hosts, on a virtual clock."""

from __future__ import annotations

import math

import pytest

from tests.wan.lines import Line, Lines
from tests.wan.relay import Relay, Traffic

PACKET = bytes(1500)


def arrivals(relay: Relay) -> list[tuple[float, int]]:
    """Let time pass until nothing is under way; return when something arrived, and where."""
    found = []
    while relay.next_s < math.inf:
        now_s = relay.next_s
        found += [(now_s, target) for target, _ in relay.deliver(now_s)]
    return found


def test_a_packet_crosses_the_sources_up_and_the_targets_down() -> None:
    relay = Relay(Lines((Line(12, 1, 20), Line(1, 6, 30))))
    relay.send(1.0, 0, 1, PACKET)
    [(at_s, target)] = arrivals(relay)
    assert at_s == pytest.approx(1.0 + 0.001 + 0.020 + 0.002 + 0.030)
    assert target == 1


def test_nothing_arrives_early() -> None:
    relay = Relay(Lines((Line(latency_ms=20), Line(latency_ms=30))))
    relay.send(0.0, 0, 1, PACKET)
    assert relay.next_s == pytest.approx(0.02)
    assert list(relay.deliver(0.049)) == []
    assert list(relay.deliver(0.051)) == [(1, PACKET)]
    assert relay.next_s == math.inf


def test_looking_seldom_changes_no_packets_time() -> None:
    hosts = (Line(12, 12, 5), Line(12, 12, 7), Line(12, 6, 9))
    often, seldom = Relay(Lines(hosts)), Relay(Lines(hosts))
    for relay in (often, seldom):
        for source in (0, 1, 0, 1):
            relay.send(0.0, source, 2, PACKET)
    times = [at_s for at_s, _ in arrivals(often)]
    assert times == pytest.approx([0.017, 0.019, 0.021, 0.023])
    for number, at_s in enumerate(times):
        assert len(list(seldom.deliver(at_s + 1e-6))) == 1, number


def test_several_who_send_to_one_share_its_down() -> None:
    relay = Relay(Lines((*[Line()] * 3, Line(down_mbit=12, queue_ms=5.5))))
    for _ in range(5):
        for source in range(3):
            relay.send(0.0, source, 3, PACKET)
    assert [at_s for at_s, _ in arrivals(relay)] == pytest.approx([0.001 * n for n in range(1, 7)])
    assert relay.traffic(3) == Traffic(0, 6 * 1500, 9, 0)


def test_both_directions_flow_at_the_same_time() -> None:
    relay = Relay(Lines((Line(12, 12), Line(12, 12))))
    for source in (0, 1):
        relay.send(0.0, source, 1 - source, PACKET)
    times, targets = zip(*arrivals(relay), strict=True)
    assert times == pytest.approx([0.002, 0.002])
    assert targets == (1, 0)


def test_traffic_counts_all_that_is_sent_what_arrives_and_who_dropped_it() -> None:
    relay = Relay(Lines((Line(up_mbit=12, queue_ms=0), Line(loss=1.0))))
    relay.send(0.0, 0, 1, PACKET)
    relay.send(0.0, 0, 1, PACKET)
    assert arrivals(relay) == []
    assert relay.traffic(0) == Traffic(3000, 0, 1, 0)
    assert relay.traffic(1) == Traffic(0, 0, 0, 1)


def test_a_change_holds_from_then_on() -> None:
    relay = Relay(Lines((Line(latency_ms=10), Line())))
    relay.send(0.0, 0, 1, PACKET)
    relay.change(0, relay.line(0).changed({"latency_ms": 50}))
    relay.send(1.0, 0, 1, PACKET)
    assert [at_s for at_s, _ in arrivals(relay)] == pytest.approx([0.010, 1.050])
