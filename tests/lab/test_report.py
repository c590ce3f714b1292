"""The table of a comparison: means and deviations over seeds, shares of a model, differences from the reference."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from peer.lab.report import COLUMNS, Measure, first_below, markdown, outcome_record, record, row, share
from peer.lab.results import Outcome, Point, Result

OUTCOME = Outcome("gasloc", 2, 10, 2.0, (2.0, 2.5), 0.01, 1000.0, 60.0, 800)
POINTS = tuple(Point(number, 20.0 * number, 0.0, None, 5.0 - number, (), 0.0) for number in range(1, 4))  # 4, 3, 2


def left(outcomes: dict[int, Outcome]) -> dict[int, Result]:
    return {seed: Result(POINTS, outcome) for seed, outcome in outcomes.items()}


FIRST = left({0: OUTCOME, 1: replace(OUTCOME, heldout_average=3.0, heldout_peers=(3.0, 4.5), bytes_per_round=3000.0)})


def test_a_row_holds_mean_and_sample_deviation_over_seeds_and_the_worst_of_all() -> None:
    found = row("a", FIRST, 3, 8000, FIRST)
    assert found.heldout_average == Measure(2.5, math.sqrt(0.5))  # (2 − 2.5)² + (3 − 2.5)² over n − 1
    assert found.heldout_peers == Measure(3.0, math.sqrt(1.125))  # of 2.25 and 3.75
    assert (found.worst_peer, found.bytes_per_round, found.model_share) == (4.5, 2000.0, 0.25)
    assert (found.seeds, found.planned, found.difference_percent) == ((0, 1), 3, 0.0)


def test_one_seed_has_no_deviation() -> None:
    assert str(Measure.of([2.0])) == "2.000"
    assert str(Measure.of([2.0, 3.0])) == "2.500 ± 0.707"


def test_the_difference_is_that_of_the_seeds_that_both_have_done() -> None:
    second = left({1: replace(OUTCOME, heldout_average=3.3), 2: replace(OUTCOME, heldout_average=100.0)})
    assert row("b", second, 3, 8000, FIRST).difference_percent == pytest.approx(10.0)
    assert row("b", left({2: OUTCOME}), 3, 8000, FIRST).difference_percent is None
    assert row("b", second, 3, 8000, {}).difference_percent is None


def test_a_run_that_diverged_with_one_seed_has_no_number_that_hides_it() -> None:
    diverged = left({0: OUTCOME, 1: replace(OUTCOME, heldout_average=math.nan, heldout_peers=(2.0, math.nan))})
    found = row("a", diverged, 2, 8000, FIRST)
    cells = dict(zip((heading for heading, _ in COLUMNS), (cell(found) for _, cell in COLUMNS), strict=True))
    assert (cells["held-out, average"], cells["worst peer"], cells["difference"]) == ("not finite", "not finite", "-")
    kept = record([found], "a")["runs"][0]
    assert (kept["heldout_average"], kept["worst_peer"]) == ({"mean": None, "deviation": None}, None)
    json.dumps(kept, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1 / 45, "1/45"), (1 / 2000, "1/2,000"), (0.4, "1/2.5"), (1.0, "1.00 ×"), (1.75, "1.75 ×")],
)
def test_a_share_of_a_model_reads_as_a_fraction_or_a_multiple(value: float, text: str) -> None:
    assert share(value) == text


def test_the_markdown_has_a_line_for_each_run_and_a_label_can_not_break_it() -> None:
    lines = markdown([row("a|b", FIRST, 2, 8000, FIRST), row("c", FIRST, 2, 8000, FIRST)], "a|b").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2
    assert {line.replace("\\|", "").count("|") for line in table} == {len(COLUMNS) + 1}
    assert table[2].startswith("| a\\|b | 2/2 | 2.500 ± 0.707 | +0.00 % |")
    assert "the reference is 'a|b'" in lines[-1]


def test_an_outcome_as_json_has_the_fields_of_the_contract_and_null_for_what_is_not_finite() -> None:
    kept = outcome_record(replace(OUTCOME, heldout_average=math.inf))
    assert list(kept) == [
        "algorithm",
        "peers",
        "rounds",
        "heldout_average",
        "heldout_peers",
        "disagreement",
        "bytes_per_round",
        "seconds_simulated",
        "optimizer_bytes",
    ]
    assert (kept["heldout_average"], kept["heldout_peers"]) == (None, [2.0, 2.5])


def test_a_run_with_a_reference_of_its_own_says_so() -> None:
    rows = [row("a", FIRST, 2, 8000, FIRST, "a"), row("c", FIRST, 2, 8000, FIRST, "b")]
    labels = [line.split("|")[1].strip() for line in markdown(rows, "a").splitlines() if line.startswith("|")]
    assert labels[2:] == ["a", "c [b]"]
    assert [each["reference"] for each in record(rows, "a")["runs"]] == ["a", "b"]


def test_the_time_to_a_loss_lies_on_the_line_between_two_points() -> None:
    assert first_below(POINTS, 2.5) == pytest.approx(50.0)
    assert first_below(POINTS, 4.5) == 20.0  # already at the first one
    assert first_below(POINTS, 1.9) is None


def test_the_time_to_the_reference_is_to_its_own_loss_with_each_seed_and_none_if_one_never_got_there() -> None:
    assert row("a", FIRST, 2, 8000, FIRST).seconds_to_reference == pytest.approx((60.0 + 40.0) / 2)
    better = left({0: replace(OUTCOME, heldout_average=1.0), 1: OUTCOME})
    assert row("a", FIRST, 2, 8000, better).seconds_to_reference is None
    assert row("a", FIRST, 2, 8000, {}).seconds_to_reference is None
