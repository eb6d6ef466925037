"""Reading ahead changes nothing about what is handed out."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import run_settings

from nstrain.train.engine import TokenRows
from nstrain.train.feed import RowFeed
from nstrain.train.plan import Position, Update, plan_update


@dataclasses.dataclass(frozen=True)
class Extent:
    cycle: int = 1
    tokens: int = 8 * 200
    first_token: int = 0


class CountingRows:
    """Rows whose tokens are their own number."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def read(self, first: int, last: int) -> TokenRows:
        self.threads.append(threading.current_thread().name)
        if first == 64:
            raise OSError("a bad disk")
        return np.repeat(np.arange(first, last, dtype=np.int64)[:, None], 9, axis=1)


def update_at(row: int) -> Update:
    return plan_update(run_settings(), Extent(), Position(1, 1, row))


@given(st.lists(st.tuples(st.integers(0, 60), st.none() | st.integers(0, 60)), max_size=20), st.booleans())
def test_hands_out_what_the_update_names_whatever_was_expected(
    wishes: list[tuple[int, int | None]], read_ahead: bool
) -> None:
    feed = RowFeed(CountingRows(), read_ahead)
    for row, expected in wishes:
        rows = feed.take(update_at(row))
        assert rows[:, 0].tolist() == list(range(row, row + 8))
        if expected is not None:
            feed.expect(update_at(expected))
    feed.close()


def test_the_expected_update_is_read_in_the_background_and_once() -> None:
    rows = CountingRows()
    feed = RowFeed(rows)
    feed.expect(update_at(8))
    feed.take(update_at(8))
    assert len(rows.threads) == 1
    assert rows.threads[0].startswith("row reader")
    feed.close()


def test_an_error_of_the_background_reaches_whoever_takes_the_rows() -> None:
    feed = RowFeed(CountingRows())
    feed.expect(update_at(64))
    feed.take(update_at(0))  # the failed guess is dropped
    feed.expect(update_at(64))
    with pytest.raises(OSError, match="a bad disk"):
        feed.take(update_at(64))
    feed.close()
