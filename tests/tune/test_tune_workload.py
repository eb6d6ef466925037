"""What a schedule asks of a row length, to the row, and which sizes are tried for it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rate_pieces import rate_pieces

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings
from nstrain.train.plan import Position, plan_update
from nstrain.tune.workload import SMALLEST_GROWTH, Workload, workload

UNIT = 24


@dataclasses.dataclass(frozen=True)
class Cycle:
    cycle: int
    tokens: int
    first_token: int


def settings(batches: list[tuple[int, int]], rows: list[tuple[int, int]]) -> RunSettings:
    """Of a line whose batches are (from token, tokens) and rows (from cycle, tokens)."""
    ends = [begin for begin, _ in batches[1:]] + [None]
    fields: dict[str, Any] = {
        "id": "a",
        "data": {"work": "/w"},
        "model": {"preset": "p", "config": {}},
        "seed": 0,
        "threads": 1,
        "device": "cpu",
        "tokens_per_update": [
            {"from": begin, "to": end, "tokens": tokens} for (begin, tokens), end in zip(batches, ends, strict=True)
        ],
        "rows": [{"from_cycle": cycle, "row_tokens": tokens} for cycle, tokens in rows],
        "lengths": {str(tokens): {"micro_rows": 1} for _, tokens in rows},
        "learning_rate": rate_pieces(0.1),
        "optimizer": {"clip_norm": 1.0},
        "validation": {"every_updates": 1, "rows_per_source": 1},
        "checkpoints": {},
    }
    return RunSettings.model_validate_json(json.dumps(fields))


def of(*batch_rows: int, updates: dict[int, int] | None = None) -> Workload:
    return Workload(64, updates or dict.fromkeys(batch_rows, 100), batch_rows)


@hypothesis_settings(deadline=None)
@given(
    cycles=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    starts=st.lists(st.integers(1, 1000), max_size=3, unique=True),
    batches=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    change=st.integers(2, 5),
    micro_rows=st.integers(1, 9),
)
def test_it_is_what_the_trainer_plans(
    cycles: list[int], starts: list[int], batches: list[int], change: int, micro_rows: int
) -> None:
    begins = [0, *sorted(starts)]
    tokens = [UNIT * size for size in cycles]
    rows = [(1, 12)] + ([(change, 8)] if change <= len(cycles) else [])
    line = settings([(begin, UNIT * batches[i]) for i, begin in enumerate(begins)], rows)
    first = [sum(tokens[:i]) for i in range(len(tokens))]

    def plan(number: int) -> Cycle:
        if not 1 <= number <= len(cycles):
            raise Refusal("no such cycle")
        return Cycle(number, tokens[number - 1], first[number - 1])

    counted = {length: workload(line, length, plan, len(cycles)) for _, length in rows}
    assert sum(load.rows * length for length, load in counted.items()) == sum(tokens), "every token is trained once"
    planned: dict[int, list[int]] = {length: [] for _, length in rows}
    position = Position(0, 1, 0)
    while position.cycle <= len(cycles):
        update = plan_update(line, plan(position.cycle), position)
        planned[update.row_tokens].append(update.rows)
        position = update.position_after
    for length, load in counted.items():
        sizes, counts = np.unique(planned[length], return_counts=True)
        assert load.updates == dict(zip(sizes.tolist(), counts.tolist(), strict=True))
        batches_of = sum(math.ceil(n / micro_rows) for n in planned[length])
        assert load.micro_batches(micro_rows) == batches_of
        assert load.padding(micro_rows) == pytest.approx(1 - sum(planned[length]) / (batches_of * micro_rows))


def test_an_open_ended_schedule_ends_somewhere() -> None:
    load = workload(settings([(0, 96)], [(1, 24)]), 24, lambda n: Cycle(n, 240, 240 * (n - 1)), None)
    assert load.updates == {4: 200, 2: 100}


def test_rows_beyond_the_schedule_are_refused() -> None:
    def plan(number: int) -> Cycle:
        if number > 2:
            raise Refusal(f"asked for cycle {number}")
        return Cycle(number, 240, 240 * (number - 1))

    with pytest.raises(Refusal, match="asked for cycle 3"):
        workload(settings([(0, 96)], [(1, 24), (3, 12)]), 24, plan, 2)


@pytest.mark.parametrize(
    ("batch_rows", "sizes"),
    [
        ((1,), [1]),
        ((8,), [1, 2, 4, 8]),
        ((64, 96), [1, 2, 4, 8, 16, 32, 64]),
        ((12,), [1, 2, 3, 6, 12]),
        ((7,), [1, 2, 4, 7]),
        ((97,), [1, 2, 3, 7, 14, 25, 49, 97]),
    ],
)
def test_sizes(batch_rows: tuple[int, ...], sizes: list[int]) -> None:
    assert of(*batch_rows).sizes() == sizes


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=3, unique=True))
def test_sizes_grow_to_the_batch_and_waste_little(batch_rows: list[int]) -> None:
    load = of(*sorted(batch_rows))
    sizes = load.sizes()
    assert sizes[0] == 1
    assert sizes[-1] <= max(batch_rows)
    assert all(b >= SMALLEST_GROWTH * a for a, b in itertools.pairwise(sizes))
    assert all(load.divides(size) or load.padding(size) <= 0.2 for size in sizes)
    if len(batch_rows) == 1:
        assert sizes[-1] * SMALLEST_GROWTH > batch_rows[0], "the whole update at once is tried, or nearly"


def test_padding_costs_what_it_computes() -> None:
    load = of(10, updates={10: 3, 4: 1})
    assert load.micro_batches(4) == 10
    assert load.padding(4) == pytest.approx(1 - 34 / 40)
    assert load.tokens_per_s(4, 2.0, 0.5) == pytest.approx(34 * 64 / (10 * 2.0 + 4 * 0.5))
