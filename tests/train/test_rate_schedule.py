"""Learning rate and weight decay: tables before, at and after each edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rate_pieces import rate_pieces
from train_helpers import optimizer_settings, run_settings

from nstrain.settings.run import RatePieces
from nstrain.train.schedule import learning_rate, weight_decay


def rate(*pieces: dict[str, Any]) -> RatePieces:
    return run_settings(learning_rate=list(pieces)).learning_rate


def decaying(shape: str, final: float = 0.001) -> RatePieces:
    decay = {"from": 1000, "to": 2000, "shape": shape, "start": 0.009, "end": final}
    return rate(*rate_pieces(0.009, 100), decay)


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, 0.0), (1, 0.00009), (50, 0.0045), (99, 0.00891), (100, 0.009), (101, 0.009), (10**15, 0.009)],
)
def test_warm_up_then_constant(position: int, expected: float) -> None:
    assert learning_rate(rate(*rate_pieces(0.009, 100)), position) == pytest.approx(expected, rel=1e-12)


def test_a_piece_stays_at_its_end_until_the_next_begins() -> None:
    warm_up = {"from": 0, "to": 100, "shape": "linear", "start": 0.0, "end": 0.009}
    assert [learning_rate(rate(warm_up), p) for p in (100, 101, 10**15)] == [0.009] * 3


def test_without_warm_up_the_first_update_is_at_the_peak() -> None:
    assert learning_rate(rate(*rate_pieces(0.009)), 1) == 0.009


@pytest.mark.parametrize(
    ("shape", "quarter", "half", "last"),
    [
        ("linear", 0.007, 0.005, 0.001 + 0.008 * 0.001),
        ("cosine", 0.001 + 0.004 * (1 + math.sqrt(0.5)), 0.005, 0.001 + 0.004 * (1 + math.cos(0.999 * math.pi))),
        ("sqrt", 0.005, 0.001 + 0.008 * (1 - math.sqrt(0.5)), 0.001 + 0.008 * (1 - math.sqrt(0.999))),
    ],
)
def test_decay_by_shape(shape: str, quarter: float, half: float, last: float) -> None:
    table = {1250: quarter, 1500: half, 1999: last}
    for position, expected in table.items():
        assert learning_rate(decaying(shape), position) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("final", [0.0, 0.001, 0.009])
def test_edges_are_exact(shape: str, final: float) -> None:
    settings = decaying(shape, final)
    assert [learning_rate(settings, p) for p in (100, 101, 999, 1000)] == [0.009] * 4
    assert [learning_rate(settings, p) for p in (2000, 2001, 10**12)] == [final] * 3
    assert learning_rate(settings, 99) < 0.009


def test_a_decay_that_begins_where_the_warm_up_ends() -> None:
    settings = rate(*rate_pieces(0.5, 10, decay=(10, 20)))
    assert [learning_rate(settings, p) for p in (9, 10, 11, 19, 20)] == pytest.approx([0.45, 0.5, 0.45, 0.05, 0.0])


def test_a_branchs_stages_each_begin_at_their_own_token() -> None:
    """The trunk's pieces, cut inside a decay of its own; a decay from the rate there; then another rate."""
    at_fork = learning_rate(decaying("cosine"), 1500)
    settings = rate(
        *rate_pieces(0.009, 100),
        {"from": 1000, "to": 2000, "shape": "cosine", "start": 0.009, "end": 0.001},
        {"from": 1500, "to": 1600, "shape": "linear", "start": at_fork, "end": 0.0002},
        {"from": 1600, "shape": "constant", "start": 0.0005},
    )
    for position in (1, 100, 999, 1000, 1001, 1499, 1500):
        assert learning_rate(settings, position) == learning_rate(decaying("cosine"), position)
    assert learning_rate(settings, 1501) == pytest.approx(at_fork - (at_fork - 0.0002) / 100, rel=1e-12)
    table = {1600: 0.0002, 1601: 0.0005, 2000: 0.0005, 2001: 0.0005, 10**15: 0.0005}
    assert {p: learning_rate(settings, p) for p in table} == table, "an update belongs to the piece it was trained in"


@given(st.sampled_from(["linear", "cosine", "sqrt"]), st.integers(0, 3000), st.integers(0, 3000))
def test_never_rises_after_the_warm_up_and_stays_in_range(shape: str, a: int, b: int) -> None:
    settings = decaying(shape)
    low, high = sorted((a, b))
    assert 0.0 <= learning_rate(settings, low) <= 0.009
    if low >= 100:
        assert learning_rate(settings, low) >= learning_rate(settings, high) >= 0.001
    if high <= 100:
        assert learning_rate(settings, low) <= learning_rate(settings, high)


def test_weight_decay_is_constant_without_a_reference_batch() -> None:
    assert [weight_decay(optimizer_settings(weight_decay=0.2), n) for n in (1, 1000)] == [0.2, 0.2]


def test_weight_decay_follows_the_batch() -> None:
    settings = optimizer_settings(weight_decay=0.2, weight_decay_batch=1000)
    assert [weight_decay(settings, n) for n in (1000, 500, 4000)] == pytest.approx([0.2, 0.1, 0.8], rel=1e-15)
