"""How many meetings, and how rich: what a plan keeps to whatever the link, and what links of every kind afford."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.allocation import Allocation
from peer.core.plan import FEWEST, MEETING_SHARE, RAREST, Cost, Means, Plan, plan, within
from peer.core.terms import AUTO, LADDER, codecs

GBIT_PER_S, MBIT_PER_S, KBIT_PER_S = 1e9, 1e6, 1e3


def gpt_125m() -> dict[str, tuple[int, ...]]:
    """Return the shapes of GPT-2 small."""
    matrices = {"attn": (768, 2304), "proj": (768, 768), "fc": (768, 3072), "out": (3072, 768)}
    vectors = {"ln_1": (768,), "ln_2": (768,), "ln_1.bias": (768,), "ln_2.bias": (768,)}
    vectors |= {f"{name}.bias": (columns,) for name, (_, columns) in matrices.items()}
    layer: dict[str, tuple[int, ...]] = {**matrices, **vectors}
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, 768), "wpe": (1024, 768)}
    shapes |= {f"{number}.{name}": shape for number in range(12) for name, shape in layer.items()}
    return shapes | {"ln_f": (768,), "ln_f.bias": (768,)}


ALLOCATIONS = {spec: Allocation(gpt_125m(), codec) for spec, codec in codecs(AUTO).items()}
COSTS = {spec: Cost(each.least_bytes, each.whole_bytes) for spec, each in ALLOCATIONS.items()}
WEEK = Means(20 * MBIT_PER_S, waiting_s=1.0, round_s=120.0, share=0.5, stall_s=0.0, most=8)
"""As the run that the preset gpt-125m describes; without a fixed codec."""

magnitudes = st.floats(-3, 5).map(lambda exponent: 10**exponent)
means = st.builds(
    Means,
    bits_per_s=st.floats(2, 11).map(lambda exponent: 10**exponent),
    waiting_s=st.just(0.0) | magnitudes,
    round_s=st.floats(0.1, 86400),
    share=st.floats(0.01, 1),
    stall_s=st.just(0.0) | magnitudes,
    most=st.integers(1, 1000),
    budget_bytes=st.just(None),
)


@st.composite
def any_costs(draw: st.DrawFn) -> Mapping[str, Cost]:
    """Costs as a model of some size has them: full codecs all or nothing, low-rank ones from a little to a lot."""
    numbers = draw(st.integers(1000, 10**9))
    least = draw(st.integers(10, 3 * numbers))
    low = Cost(least, draw(st.integers(least, 3 * numbers)))
    return {"none": Cost(8 * numbers, 8 * numbers), "int8": Cost(3 * numbers, 3 * numbers), "rank-int4": low}


def wish(means: Means, codec: str = AUTO, costs: Mapping[str, Cost] = COSTS) -> Plan:
    return plan(means, codec, costs)


def computing(s_per_byte: float) -> Mapping[str, Cost]:
    """Return the costs where a byte of every codec is so much to compute."""
    return {spec: replace(cost, computing_s_per_byte=s_per_byte) for spec, cost in COSTS.items()}


def limit(planned: Plan) -> str:
    return planned.why.rpartition(", as ")[2]


@given(means, any_costs())
def test_meetings_take_no_more_than_the_links_share_but_for_the_rarest(means: Means, costs: Mapping[str, Cost]) -> None:
    """Even a link that is too slow for it meets somebody once in 1 / RAREST rounds, with as little as there is."""
    planned = plan(means, AUTO, costs)
    allowed = 2 * means.share * means.bits_per_s * means.round_s / 8
    assert planned.round_bytes == pytest.approx(allowed)
    if planned.meetings * planned.budget_bytes > allowed * (1 + 1e-9):
        assert planned.meetings == RAREST
        assert planned.budget_bytes == costs["rank-int4"].least_bytes
        assert limit(planned) == "a peer meets somebody that often, whatever its link"


@given(means, any_costs())
def test_there_are_never_more_meetings_than_the_run_wants_and_never_none(
    means: Means, costs: Mapping[str, Cost]
) -> None:
    assert RAREST <= plan(means, AUTO, costs).meetings <= means.most


def test_a_run_that_wants_no_meetings_has_none() -> None:
    assert wish(replace(WEEK, most=0)).meetings == 0


@given(means, any_costs())
def test_a_meeting_is_as_large_as_its_codec_can_be(means: Means, costs: Mapping[str, Cost]) -> None:
    planned = plan(means, AUTO, costs)
    assert costs[planned.codec].least_bytes <= planned.budget_bytes <= costs[planned.codec].whole_bytes


@given(means, st.floats(1, 1e4), any_costs())
def test_a_faster_link_never_makes_meetings_poorer_or_fewer(
    means: Means, faster: float, costs: Mapping[str, Cost]
) -> None:
    slow = plan(means, AUTO, costs)
    fast = plan(replace(means, bits_per_s=faster * means.bits_per_s), AUTO, costs)
    assert LADDER.index(fast.codec) <= LADDER.index(slow.codec)
    assert fast.budget_bytes >= slow.budget_bytes
    assert fast.meetings >= slow.meetings * (1 - 1e-9)


@given(means, st.integers(1, 10**10))
def test_a_fixed_budget_is_what_a_meeting_takes_and_only_meetings_become_fewer(means: Means, budget: int) -> None:
    costs = {"rank4-int4": Cost(1, 10**10)}
    planned = plan(replace(means, budget_bytes=budget), "rank4-int4", costs)
    assert (planned.codec, planned.budget_bytes) == ("rank4-int4", budget)
    assert RAREST <= planned.meetings <= means.most
    if planned.meetings > RAREST:
        assert planned.meetings * budget <= planned.round_bytes * (1 + 1e-9)


@pytest.mark.parametrize(
    ("bits_per_s", "codec", "meetings", "megabytes"),
    [
        (10 * GBIT_PER_S, "none", 8, 995.5),  # a data centre: all of the model, exact
        (300 * MBIT_PER_S, "int8", 8, 377.4),
        (100 * MBIT_PER_S, "rank-int4", 8, 172.6),  # every direction there is
        (20 * MBIT_PER_S, "rank-int4", 8, 37.5),
        (1 * MBIT_PER_S, "rank-int4", 8, 1.875),
        (50 * KBIT_PER_S, "rank-int4", 8, 0.09375),  # less than one direction of everything: some tensors
        (10 * KBIT_PER_S, "rank-int4", 2, 0.05342),  # less than the largest: fewer meetings
        (1 * KBIT_PER_S, "rank-int4", 15_000 / 53_420, 0.05342),  # one in several rounds
        (100.0, "rank-int4", RAREST, 0.05342),
    ],
)
def test_what_links_of_every_kind_afford_gpt_125m(
    bits_per_s: float, codec: str, meetings: float, megabytes: float
) -> None:
    planned = wish(replace(WEEK, bits_per_s=bits_per_s))
    assert planned.codec == codec
    assert planned.meetings == pytest.approx(meetings)
    assert planned.budget_bytes == pytest.approx(1e6 * megabytes, rel=1e-3)


def test_at_a_very_slow_link_a_meeting_is_about_some_of_the_tensors() -> None:
    planned = wish(replace(WEEK, bits_per_s=50 * KBIT_PER_S))
    low = ALLOCATIONS["rank-int4"]
    assert low.least_bytes < planned.budget_bytes < low.evenly_bytes(1)


@pytest.mark.parametrize(
    ("means", "s_per_byte", "why"),
    [
        (WEEK, 0.0, "the run wants no more"),
        (replace(WEEK, waiting_s=12.0), 0.0, "more would not fit into a round"),
        (replace(WEEK, stall_s=0.4), 0.0, "more would slow training down"),
        (WEEK, 1e-3, "more would be more to compute"),
        (replace(WEEK, bits_per_s=10 * KBIT_PER_S), 0.0, "more would take more of the link"),
        (replace(WEEK, bits_per_s=100.0), 0.0, "a peer meets somebody that often, whatever its link"),
    ],
)
def test_the_plan_says_what_limits_it(means: Means, s_per_byte: float, why: str) -> None:
    planned = wish(means, costs=computing(s_per_byte))
    assert limit(planned) == why
    assert (planned.meetings < means.most) == (why != "the run wants no more")


def test_the_plan_says_what_it_was_made_from() -> None:
    assert wish(WEEK).why == (
        "50% of 20 Mbit/s for a round of 120 s is 150 MB each way: "
        "8 meetings with 37.5 MB of the model, as the run wants no more"
    )
    assert "8 meetings with all of the model" in wish(replace(WEEK, bits_per_s=10 * GBIT_PER_S)).why


@pytest.mark.parametrize(
    ("waiting_s", "stall_s", "meetings"),
    [
        (4.5, 0.0, 8),  # 0.3 × 120 s
        (9.0, 0.0, 4),
        (0.0, 0.075, 8),  # 0.005 × 120 s
        (0.0, 0.15, 4),
        (9.0, 0.2, 3),  # whatever limits it more
        (1e4, 1e4, FEWEST),
    ],
)
def test_meetings_that_take_long_or_hold_training_up_become_fewer_and_richer(
    waiting_s: float, stall_s: float, meetings: float
) -> None:
    planned = wish(replace(WEEK, waiting_s=waiting_s, stall_s=stall_s))
    assert planned.meetings == pytest.approx(meetings)
    assert planned.budget_bytes == pytest.approx(300e6 / meetings)


def test_what_is_much_to_compute_makes_meetings_poorer() -> None:
    """A tenth of 120 s, at a microsecond a byte, is 12 MB in eight meetings."""
    planned = wish(WEEK, costs=computing(1e-6))
    assert (planned.meetings, planned.budget_bytes) == (8, 1_500_000)
    assert planned.round_bytes == wish(WEEK).round_bytes
    assert wish(WEEK, costs=computing(1e-9)) == wish(WEEK)


def test_of_two_codecs_that_the_link_affords_the_richest_that_is_not_too_much_to_compute_is_chosen() -> None:
    means = replace(WEEK, bits_per_s=10 * GBIT_PER_S)
    dear = replace(COSTS["none"], computing_s_per_byte=1e-8)  # of 8 GB in eight meetings: 80 s, where 12 s are bearable
    assert wish(means).codec == "none"
    assert wish(means, costs={**COSTS, "none": dear}).codec == "int8"


def test_a_partner_with_a_slower_link_is_not_met_with_more_than_is_bearable_to_compute() -> None:
    costs = {**COSTS, "rank-int4": replace(COSTS["rank-int4"], computing_s_per_byte=1e-6)}
    planned = wish(replace(WEEK, bits_per_s=10 * GBIT_PER_S), costs=costs)
    assert planned.codec == "none"
    codec, budget = within(planned, costs, 10 * MBIT_PER_S, 120.0)
    assert (codec, budget) == ("rank-int4", 1_500_000)  # 12 s at a microsecond a byte, in eight meetings


def test_a_meeting_over_a_slower_link_takes_its_share_of_a_round() -> None:
    planned, cost = wish(replace(WEEK, bits_per_s=100 * MBIT_PER_S)), COSTS["rank-int4"]
    assert within(planned, COSTS, 100 * MBIT_PER_S, 120.0) == (planned.codec, planned.budget_bytes)
    assert within(planned, COSTS, 4 * MBIT_PER_S, 120.0) == ("rank-int4", 2 * MEETING_SHARE * 120 * 4e6 / 8)
    assert within(planned, COSTS, 1.0, 120.0) == ("rank-int4", cost.least_bytes)
    rich = wish(replace(WEEK, bits_per_s=1e4 * MBIT_PER_S))
    assert rich.codec == "none"
    assert within(rich, COSTS, 4 * MBIT_PER_S, 120.0) == ("rank-int4", 2 * MEETING_SHARE * 120 * 4e6 / 8)


@given(means, any_costs(), st.floats(0, 1e11))
def test_no_partner_gets_more_than_the_plan_has_or_less_than_a_meeting_needs(
    means: Means, costs: Mapping[str, Cost], bits_per_s: float
) -> None:
    planned = plan(means, AUTO, costs)
    codec, budget = within(planned, costs, bits_per_s, means.round_s)
    assert list(costs).index(codec) >= list(costs).index(planned.codec)
    assert costs[codec].least_bytes <= budget <= max(planned.budget_bytes, costs[codec].least_bytes)
