"""Learning rate and weight decay: tables before, at and after each edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import optimizer_settings

from nstrain.settings.model import validate
from nstrain.settings.run import LearningRate
from nstrain.train.schedule import learning_rate, weight_decay


def rate(**fields: Any) -> LearningRate:
    return validate(LearningRate, fields, "learning_rate")


def decaying(shape: str, final: float = 0.001) -> LearningRate:
    return rate(
        peak=0.009,
        warmup_tokens=100,
        decay={"from_tokens": 1000, "to_tokens": 2000, "shape": shape, "final": final},
    )


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, 0.0), (1, 0.00009), (50, 0.0045), (99, 0.00891), (100, 0.009), (101, 0.009), (10**15, 0.009)],
)
def test_warm_up_then_constant(position: int, expected: float) -> None:
    assert learning_rate(rate(peak=0.009, warmup_tokens=100), position) == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_the_first_update_is_at_the_peak() -> None:
    assert learning_rate(rate(peak=0.009), 1) == 0.009


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
    settings = rate(peak=0.5, warmup_tokens=10, decay={"from_tokens": 10, "to_tokens": 20})
    assert [learning_rate(settings, p) for p in (9, 10, 11, 19, 20)] == pytest.approx([0.45, 0.5, 0.45, 0.05, 0.0])


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
