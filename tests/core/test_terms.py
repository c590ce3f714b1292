"""What two wishes come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.core.codec import parse
from peer.core.terms import AUTO, EFFORT, LADDER, Terms, agree, codecs, ladder
from peer.errors import ConfigError

wishes = st.builds(
    Terms,
    codec=st.sampled_from(LADDER),
    budget_bytes=st.integers(1, 2**64 - 1),
    weight=st.floats(0, 1, exclude_min=True),
)


@given(wishes, wishes)
def test_both_sides_come_to_the_same(one: Terms, other: Terms) -> None:
    assert agree(one, other, LADDER) == agree(other, one, LADDER)


@given(wishes, wishes, wishes)
def test_the_order_in_which_wishes_come_together_does_not_matter(one: Terms, two: Terms, three: Terms) -> None:
    left = agree(agree(one, two, LADDER), three, LADDER)
    assert left == agree(one, agree(two, three, LADDER), LADDER)


@given(wishes, wishes)
def test_to_agree_once_more_changes_nothing(one: Terms, other: Terms) -> None:
    """So the caller may hold what it wished for against an answer that is agreed on already."""
    agreed = agree(one, other, LADDER)
    assert agree(one, one, LADDER) == one
    assert agree(one, agreed, LADDER) == agreed


@given(wishes, wishes)
def test_nobody_gets_more_than_it_wished_for_and_every_number_is_somebodys_wish(one: Terms, other: Terms) -> None:
    agreed = agree(one, other, LADDER)
    for wish in (one, other):
        assert LADDER.index(agreed.codec) >= LADDER.index(wish.codec)
        assert agreed.budget_bytes <= wish.budget_bytes
        assert agreed.weight <= wish.weight
    assert agreed.codec in (one.codec, other.codec)
    assert agreed.budget_bytes in (one.budget_bytes, other.budget_bytes)
    assert agreed.weight in (one.weight, other.weight)


def test_a_run_with_a_codec_of_its_own_has_one_rung() -> None:
    assert ladder("rank16-int4") == ("rank16-int4",)
    assert codecs("rank16-int4") == {"rank16-int4": parse("rank16-int4")}


def test_auto_chooses_from_the_ladder_the_richest_first() -> None:
    assert ladder(AUTO) == LADDER == tuple(codecs(AUTO)) == tuple(EFFORT)


def test_a_codec_that_there_is_not_is_an_error_of_the_manifest() -> None:
    with pytest.raises(ConfigError, match="int3"):
        ladder("int3")
