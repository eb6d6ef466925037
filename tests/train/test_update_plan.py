"""The plan of updates: every row once and in order, the ramp's edges, smaller updates, resume anywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import run_settings

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings
from nstrain.train.plan import Position, Update, cycle_rows, plan_update


@dataclasses.dataclass(frozen=True)
class Extent:
    cycle: int
    tokens: int
    first_token: int


def cycles_of(lengths: list[int]) -> list[Extent]:
    return [Extent(k + 1, tokens, sum(lengths[:k])) for k, tokens in enumerate(lengths)]


def plan_all(settings: RunSettings, cycles: list[Extent], start: Position = Position(0, 1, 0)) -> list[Update]:  # noqa: B008
    updates, position = [], start
    while position.cycle <= len(cycles):
        updates.append(plan_update(settings, cycles[position.cycle - 1], position))
        position = updates[-1].position_after
    return updates


@st.composite
def lines(draw: Any) -> tuple[RunSettings, list[Extent]]:
    """A line with a random ramp, row lengths that change at cycles, and cycles of random sizes."""
    row_lengths = draw(st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=3))
    batches = draw(st.lists(st.integers(1, 12).map(lambda n: 16 * n), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(1, 700), min_size=len(batches) - 1, max_size=len(batches) - 1))
    edges = [sum(gaps[:i]) for i in range(len(batches))]
    ramp = [{"from": a, "to": b, "tokens": n} for a, b, n in zip(edges, [*edges[1:], None], batches, strict=True)]
    rows = [{"from_cycle": 2 * i + 1, "row_tokens": n} for i, n in enumerate(row_lengths)]
    lengths = {str(n): {"micro_rows": 2} for n in row_lengths}
    cycles = draw(st.lists(st.integers(1, 60).map(lambda n: 16 * n), min_size=1, max_size=6))
    return run_settings(tokens_per_update=ramp, rows=rows, lengths=lengths), cycles_of(cycles)


@given(lines())
def test_every_row_is_trained_once_and_in_order(line: tuple[RunSettings, list[Extent]]) -> None:
    settings, cycles = line
    updates = plan_all(settings, cycles)
    trained = [(u.cycle, row) for u in updates for row in range(u.first_row, u.last_row)]
    assert trained == [(c.cycle, row) for c in cycles for row in range(cycle_rows(c, settings.row_tokens_at(c.cycle)))]
    assert [u.number for u in updates] == list(range(1, len(updates) + 1))
    assert sum(u.tokens for u in updates) == sum(c.tokens for c in cycles)
    assert updates[-1].tokens_after == sum(c.tokens for c in cycles)


@given(lines())
def test_an_update_takes_what_the_ramp_says_unless_its_cycle_ends(line: tuple[RunSettings, list[Extent]]) -> None:
    settings, cycles = line
    position = 0
    for u in plan_all(settings, cycles):
        assert u.tokens_before == position
        piece = [p for p in settings.batch_pieces if p.from_tokens <= position][-1]
        assert u.batch_tokens == piece.tokens
        assert u.smaller == (u.tokens < piece.tokens)
        assert u.ends_cycle or not u.smaller
        position = u.tokens_after


@given(lines(), st.data())
def test_a_resumed_line_plans_what_the_uninterrupted_one_did(
    line: tuple[RunSettings, list[Extent]], data: st.DataObject
) -> None:
    settings, cycles = line
    updates = plan_all(settings, cycles)
    cut = data.draw(st.integers(0, len(updates) - 1))
    at = updates[cut].position_after
    if at.cycle <= len(cycles):
        assert plan_all(settings, cycles, at) == updates[cut + 1 :]


def test_the_ramp_is_read_at_the_position_before_the_update() -> None:
    ramp = [
        {"from": 0, "to": 100, "tokens": 32},
        {"from": 100, "to": 288, "tokens": 64},
        {"from": 288, "to": None, "tokens": 96},
    ]
    settings = run_settings(tokens_per_update=ramp)
    updates = plan_all(settings, cycles_of([512]))
    # 32 at 0, 32, 64 and 96 (still before 100); 64 from 128 on; 320 is the first position at or after 288.
    assert [(u.tokens_before, u.tokens) for u in updates] == [
        (0, 32), (32, 32), (64, 32), (96, 32), (128, 64), (192, 64), (256, 64), (320, 96), (416, 96),
    ]  # fmt: skip
    assert not any(u.smaller for u in updates)


def test_a_piece_that_begins_exactly_at_an_update_holds_for_it() -> None:
    ramp = [{"from": 0, "to": 64, "tokens": 32}, {"from": 64, "to": None, "tokens": 64}]
    updates = plan_all(run_settings(tokens_per_update=ramp), cycles_of([160]))
    assert [u.tokens for u in updates] == [32, 32, 64, 32]
    assert [u.smaller for u in updates] == [False, False, False, True]


def test_appending_a_piece_leaves_earlier_updates_as_they_were() -> None:
    old = run_settings(tokens_per_update=[{"from": 0, "to": None, "tokens": 32}])
    new = run_settings(
        tokens_per_update=[{"from": 0, "to": 256, "tokens": 32}, {"from": 256, "to": None, "tokens": 128}]
    )
    cycles = cycles_of([512])
    assert plan_all(old, cycles)[:8] == [dataclasses.replace(u, batch_tokens=32) for u in plan_all(new, cycles)[:8]]
    assert plan_all(new, cycles)[8].tokens == 128


def test_planning_costs_the_same_anywhere() -> None:
    """A position far into a huge line is planned at once: a plan that walked there would not return."""
    cycle = Extent(10**6, 2**40, 10**6 * 2**40)
    update = plan_update(run_settings(), cycle, Position(10**12, 10**6, 2**36))
    assert (update.number, update.first_row, update.rows) == (10**12 + 1, 2**36, 8)


@pytest.mark.parametrize("row", [-1, 64, 65])
def test_a_row_that_the_cycle_does_not_have_is_refused(row: int) -> None:
    with pytest.raises(Refusal, match=r"cycle 1 has rows 0 ... 63 of 8 tokens; the position is row"):
        plan_update(run_settings(), Extent(1, 512, 0), Position(3, 1, row))


def test_a_cycle_that_rows_do_not_divide_is_refused() -> None:
    with pytest.raises(Refusal, match="not a whole number of rows of 8"):
        plan_update(run_settings(), Extent(1, 516, 0), Position(0, 1, 0))
