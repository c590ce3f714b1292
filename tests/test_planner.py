"""What a peer plans, and wishes for with each partner, as meetings show it its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from peer.core.gauge import MEETINGS, START_BITS_PER_S, Gauge
from peer.core.plan import FEWEST, MEETING_SHARE
from peer.core.terms import EFFORT
from peer.manifest import Exchange
from peer.planner import ROUND_S, Planner

SHAPES: dict[str, tuple[int, ...]] = {"a": (512, 256), "b": (256, 512), "bias": (512,)}
MBIT_PER_S = 1e6


@dataclass
class Walk:
    """A pace that a test sets by hand."""

    round: int = 0
    fraction: float = 0.5
    step_s: float = 0.1
    round_s: float = 10.0
    sensitivity: Mapping[str, float] = field(default_factory=dict)


def planner(
    codec: str = "auto", meetings: int = 4, share: float = 0.5, most_bits_per_s: float | None = None
) -> Planner:
    return Planner(Exchange(meetings, codec, 5), SHAPES, Walk(), share, most_bits_per_s)


def showed(measure: float) -> Gauge:
    gauge = Gauge()
    gauge.measure = measure
    return gauge


def meet(ours: Planner, bits_per_s: float, partner: str = "ben", waiting_s: float = 0.0) -> None:
    ours.line.met(partner, showed(bits_per_s), 0.02)
    ours.met(waiting_s)


def test_before_a_first_meeting_a_line_is_what_lines_usually_are() -> None:
    assert planner().plan.round_bytes == 2 * 0.5 * START_BITS_PER_S * 10.0 / 8


def test_the_plan_follows_the_line_up_and_down() -> None:
    ours = planner()
    found = []
    for rate in (0.1 * MBIT_PER_S, 10 * MBIT_PER_S, 1000 * MBIT_PER_S):
        meet(ours, rate)
        found.append(ours.plan.codec)
    assert found == ["rank-int4", "none", "none"]
    for _ in range(16):
        meet(ours, 0.1 * MBIT_PER_S)
    assert ours.plan.codec == "rank-int4"
    assert ours.plan.round_bytes == 2 * 0.5 * 0.1 * MBIT_PER_S * 10.0 / 8


def test_a_limit_is_used_up_whatever_the_share_and_a_line_below_it_is_not() -> None:
    for share in (0.1, 0.5, 1.0):
        ours = planner(share=share, most_bits_per_s=MBIT_PER_S)
        meet(ours, 100 * MBIT_PER_S)
        assert ours.plan.round_bytes == pytest.approx(2 * MBIT_PER_S * 10.0 / 8)
    ours = planner(share=0.5, most_bits_per_s=MBIT_PER_S)
    meet(ours, 0.5 * MBIT_PER_S)
    assert ours.plan.round_bytes == pytest.approx(2 * 0.5 * 0.5 * MBIT_PER_S * 10.0 / 8)


def test_a_round_of_which_nobody_knows_how_long_it_takes_is_taken_for_ten_seconds() -> None:
    ours = Planner(Exchange(4, "auto", 5), SHAPES, Walk(round_s=0.0), 0.5)
    assert ours.plan.round_bytes == 2 * 0.5 * START_BITS_PER_S * ROUND_S / 8


@pytest.mark.parametrize(("codec", "rich"), [("none", True), ("int4", True), ("rank4-int4", False), ("rank2", False)])
def test_under_a_fixed_codec_a_meeting_takes_what_the_codec_says_with_anybody(codec: str, rich: bool) -> None:
    ours = planner(codec)
    (allocation,) = ours.allocations.values()
    expected = allocation.whole_bytes if rich else allocation.evenly_bytes(allocation.codec.rank or 0)
    for rate in (1.0, 1000 * MBIT_PER_S):
        meet(ours, rate, "slow")
        assert ours.plan.codec == codec
        assert ours.plan.budget_bytes == expected
        assert ours.wish(ours.plan, "slow") == ours.wish(ours.plan, "somebody else") == (codec, expected)


def test_a_low_rank_codec_without_a_rank_takes_what_the_link_has() -> None:
    ours = planner("rank-int4")
    meet(ours, 0.1 * MBIT_PER_S)
    assert ours.plan.budget_bytes == ours.plan.round_bytes / 4


def test_with_a_partner_whose_line_is_slower_one_wishes_for_less() -> None:
    ours = planner("rank-int4")
    meet(ours, 1 * MBIT_PER_S, "fast")
    meet(ours, 0.05 * MBIT_PER_S, "slow")
    planned = ours.plan
    assert ours.wish(planned, "fast") == ours.wish(planned, "new") == ("rank-int4", planned.budget_bytes)
    assert ours.wish(planned, "slow") == ("rank-int4", 2 * MEETING_SHARE * 10.0 * 0.05 * MBIT_PER_S / 8)


def test_a_limit_is_told_as_what_it_is() -> None:
    ours = planner(share=0.25, most_bits_per_s=0.8 * MBIT_PER_S)
    meet(ours, 100 * MBIT_PER_S)
    assert ours.plan.why.startswith("the 0.8 Mbit/s that are allowed for a round of 10 s is 1 MB each way: ")
    meet(ours, MBIT_PER_S)
    for _ in range(MEETINGS):
        meet(ours, MBIT_PER_S)
    assert ours.plan.why.startswith("25% of 1 Mbit/s for a round of 10 s is 0.312 MB each way: ")


def test_meetings_that_wait_much_become_fewer_and_more_again() -> None:
    ours = planner(meetings=20)
    meet(ours, MBIT_PER_S)
    assert ours.plan.meetings == 20
    meet(ours, MBIT_PER_S, waiting_s=0.5)
    assert ours.plan.meetings == pytest.approx(6)  # 0.3 × 10 s of 0.5 s each
    meet(ours, MBIT_PER_S, waiting_s=2.5)
    assert ours.plan.meetings == pytest.approx(3)  # (3 × 0.5 + 2.5) / 4 = 1 s
    for _ in range(30):
        meet(ours, MBIT_PER_S)
    assert ours.plan.meetings == 20


def test_meetings_that_hold_training_up_become_fewer() -> None:
    ours = planner(meetings=20)
    ours.stalled(0.0, 0)
    assert ours.plan.meetings == 20
    ours.stalled(0.1, 10)
    assert ours.plan.meetings == pytest.approx(5)  # 0.005 × 10 s of 0.01 s each
    ours.stalled(100.0, 1)
    assert ours.plan.meetings == FEWEST


def test_a_meeting_that_showed_nothing_of_the_line_changes_nothing() -> None:
    ours = planner()
    before = ours.plan
    ours.line.met("ben", Gauge(), 0.02)
    ours.met(0.01)
    assert ours.plan == before
    assert ours.line.to("ben") == START_BITS_PER_S


def test_meetings_that_are_much_to_compute_become_poorer() -> None:
    ours = planner("rank-int4")
    meet(ours, 0.5 * MBIT_PER_S)
    before = ours.plan.budget_bytes
    ours.computed("rank-int4", 0.0, 0)
    assert ours.plan.budget_bytes == before
    ours.computed("rank-int4", 1.0, 10_000)
    assert ours.plan.budget_bytes < before
    assert ours.plan.budget_bytes * ours.plan.meetings == 10_000  # a second, a tenth of the round


def test_what_is_bearable_under_one_codec_is_not_under_another() -> None:
    """Whoever agrees to the poorer codec of a partner does not take over its budget."""
    ours = planner()
    low = ours.allocations["rank-int4"]
    assert ours.most_bytes("int8") is None  # all or nothing
    assert ours.most_bytes("rank-int4") == low.whole_bytes
    ours.computed("rank-int4", 1.0, low.whole_bytes)
    most = ours.most_bytes("rank-int4")
    assert most is not None
    assert low.least_bytes <= most < low.whole_bytes
    ours.computed("rank-int4", 1e9, 1)
    assert ours.most_bytes("rank-int4") == low.least_bytes
    assert planner("rank4-int4").most_bytes("rank4-int4") is None  # the run says what a meeting is


def test_a_codec_that_is_less_to_compute_is_tried_where_the_link_has_room_for_it() -> None:
    ours = planner()
    whole_bytes = ours.allocations["int8"].whole_bytes
    meet(ours, 1000 * MBIT_PER_S)
    ours.computed("rank-int4", 1e-3 * EFFORT["rank-int4"], whole_bytes)  # a thousandth of a second whole, under int8
    assert ours.plan.codec == "none"
    ours.computed("none", 1e3, whole_bytes)  # as it turns out
    assert ours.plan.codec == "rank-int4"  # and int8 is not thought to be much better
    ours.computed("int8", 1e-3, whole_bytes)
    assert ours.plan.codec == "int8"
