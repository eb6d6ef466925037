"""A branch's stages in cycles of its data line: whole segments, near what was asked, however many cycles they take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Refusal
from nstrain.data.order import reduced_shares
from nstrain.data.schedule import Schedule
from nstrain.ops.branch_plan import AskedStage, stage_cycles

UNIT_TOKENS = 32


@given(
    shares=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    longest=st.integers(UNIT_TOKENS, 200 * 18 * UNIT_TOKENS),
    stages=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 95)), min_size=1, max_size=2),
)
def test_a_stage_is_the_nearest_whole_segments_in_the_fewest_cycles(
    shares: list[int], longest: int, stages: list[tuple[int, int]]
) -> None:
    recipe = {f"s{index}": share for index, share in enumerate(shares)}
    period = sum(reduced_shares(tuple(shares))) * UNIT_TOKENS
    asked = [AskedStage("decay", periods * period + min(more, period - 1)) for periods, more in stages]
    of_stages = stage_cycles(asked, recipe, longest, UNIT_TOKENS)
    assert len(of_stages) == len(asked)
    Schedule(tuple(piece for pieces in of_stages for piece in pieces), UNIT_TOKENS)  # which refuses half a segment
    for stage, pieces in zip(asked, of_stages, strict=True):
        (segment_units,) = {piece.segment_units for piece in pieces}
        segment = segment_units * period
        sizes = [piece.cycle_tokens for piece in pieces for _ in range(piece.cycles or 0)]
        assert abs(sum(sizes) - stage.tokens) <= max(segment / 2, segment - stage.tokens)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] in (0, segment)
        assert sizes[0] <= max(longest, segment)
        assert (len(sizes) - 1) * max(1, longest // segment) * segment < sum(sizes), "no cycle fewer would do"


def test_many_short_cycles_add_up_to_what_was_asked() -> None:
    """Each cycle rounded by itself, five of 8,200 tokens became five of 9,216: 12 % more than asked."""
    (pieces,) = stage_cycles([AskedStage("decay", 41_000)], {"books": 1, "code": 2}, 9_216, 1_024)
    assert [(piece.cycles, piece.cycle_tokens) for piece in pieces] == [(3, 9_216), (2, 6_144)]
    (long,) = stage_cycles([AskedStage("long", 10_000_000_000)], {"books": 1, "code": 2}, 9_216, 1_024)
    assert abs(sum((piece.cycles or 0) * piece.cycle_tokens for piece in long) - 10_000_000_000) <= 3_072 // 2


def test_a_period_may_be_longer_than_the_trunks_cycles() -> None:
    """Long rows have a larger unit: three of 4,096 beside cycles of 9,216."""
    asked = [AskedStage("decay", 12_288), AskedStage("long", 24_000)]
    of_stages = stage_cycles(asked, {"books": 1, "code": 2}, 9_216, 4_096)
    assert [[(piece.cycles, piece.cycle_tokens) for piece in pieces] for pieces in of_stages] == [
        [(1, 12_288)],
        [(2, 12_288)],
    ]


def test_a_stage_shorter_than_the_period_is_refused() -> None:
    with pytest.raises(Refusal, match="--plan: long:40: .*period"):
        stage_cycles([AskedStage("decay", 41_000), AskedStage("long", 40)], {"a": 1, "b": 2}, 9_216, UNIT_TOKENS)


def test_a_slip_of_the_hand_is_refused_at_once() -> None:
    """decay:1e999 listed the ends of its cycles until memory ran out."""
    with pytest.raises(Refusal, match="--plan: the long stage .*9,216 tokens.; plan fewer"):
        stage_cycles([AskedStage("decay", 41_000), AskedStage("long", 10**999)], {"a": 1, "b": 2}, 9_216, UNIT_TOKENS)
