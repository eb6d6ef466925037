"""The schedule: rounding to segments, numbering, growing."""

from __future__ import annotations

import math

import pytest
from data_helpers import quick
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Refusal
from nstrain.data.order import reduced_shares
from nstrain.data.schedule import Piece, Schedule, make_piece

recipes = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1)


@quick(200)
@given(recipes, st.integers(1, 10**6), st.sampled_from([1, 8, 32]), st.integers(1, 20) | st.none())
def test_a_cycle_is_the_nearest_whole_number_of_segments(
    recipe: dict[str, int], cycle_tokens: int, unit_tokens: int, segment_units: int | None
) -> None:
    shares = reduced_shares(tuple(recipe.values()))
    segment = sum(shares) * unit_tokens * (segment_units or 1)
    if segment > 2 * cycle_tokens:
        with pytest.raises(Refusal, match=r"period of K|segment_units"):
            make_piece(recipe, cycle_tokens, unit_tokens, 3, segment_units)
        return
    piece = make_piece(recipe, cycle_tokens, unit_tokens, 3, segment_units)
    plan = Schedule((piece,), unit_tokens).cycle(2)
    segment = sum(shares) * unit_tokens * piece.segment_units
    assert plan.tokens == plan.segments * segment == sum(plan.source_tokens)
    assert plan.segments == 1 or abs(plan.tokens - cycle_tokens) * 2 <= segment
    assert piece.segment_units == (segment_units or max(1, cycle_tokens // (16 * sum(shares) * unit_tokens)))
    for source_tokens, share in zip(plan.segment_tokens, plan.shares, strict=True):
        assert source_tokens * sum(plan.shares) == segment * share  # exact at every segment's end
    assert math.gcd(*plan.shares) == 1


@quick(100)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), recipes), min_size=1, max_size=4), st.booleans())
def test_cycles_are_numbered_through_the_pieces(
    pieces: list[tuple[int, int, dict[str, int]]], open_ended: bool
) -> None:
    made = [make_piece(recipe, size * 200, 1, cycles) for cycles, size, recipe in pieces]
    if open_ended:
        made[-1] = made[-1].model_copy(update={"cycles": None})
    schedule = Schedule(tuple(made), 1)
    expected = [(i, piece) for i, piece in enumerate(made) for _ in range(piece.cycles or 5)]
    position = 0
    for number, (index, piece) in enumerate(expected, start=1):
        plan = schedule.cycle(number)
        assert (plan.cycle, plan.piece, plan.first_token, plan.tokens) == (number, index, position, piece.cycle_tokens)
        assert dict(zip(plan.sources, plan.shares, strict=True)).keys() == piece.recipe.keys()
        position += plan.tokens
    if open_ended:
        assert schedule.cycle_count is None
        assert schedule.total_tokens is None
    else:
        assert (schedule.cycle_count, schedule.total_tokens) == (len(expected), position)
        with pytest.raises(Refusal, match=f"cycles 1 ... {len(expected)}; asked for cycle {len(expected) + 1}"):
            schedule.cycle(len(expected) + 1)
        for source in "abcdef":
            plans = [p for p in map(schedule.cycle, range(1, len(expected) + 1)) if source in p.sources]
            assert schedule.tokens_of(source) == sum(p.source_tokens[p.sources.index(source)] for p in plans)
    with pytest.raises(Refusal, match="asked for cycle 0"):
        schedule.cycle(0)


def test_a_period_too_large_for_the_cycle_is_refused_with_the_remedy() -> None:
    with pytest.raises(Refusal, match=r"K = 1,000 units of 32 tokens, 32,000 tokens.*coarser shares.*at least 32,000"):
        make_piece({"a": 999, "b": 1}, 10_000, 32, 1)


def test_segments_larger_than_the_cycle_are_refused() -> None:
    with pytest.raises(Refusal, match=r"segment_units 10 makes segments of 640 tokens, a cycle has 200.* from 1 to 3"):
        make_piece({"a": 1, "b": 1}, 200, 32, 1, segment_units=10)
    with pytest.raises(Refusal, match="segment_units 0"):
        make_piece({"a": 1, "b": 1}, 200, 32, 1, segment_units=0)


def test_a_cycle_too_large_for_exact_shares_is_refused() -> None:
    assert make_piece({"a": 1}, 32 * 10**9, 32768, 1).cycle_tokens > 31 * 10**9
    with pytest.raises(Refusal, match="at most 32,212,254,720"):
        make_piece({"a": 1}, 33 * 10**9, 32768, 1)


def test_only_the_last_piece_may_be_open_ended() -> None:
    piece = make_piece({"a": 1}, 100, 1, None)
    with pytest.raises(Refusal, match="last piece"):
        Schedule((piece, piece), 1)
    with pytest.raises(Refusal, match="no piece"):
        Schedule((), 1)


def test_a_cycle_that_is_no_whole_number_of_segments_is_refused() -> None:
    with pytest.raises(Refusal, match="100 is not a whole number of segments of 64"):
        Schedule((Piece(cycles=1, cycle_tokens=100, segment_units=1, recipe={"a": 1, "b": 1}),), 32)
