"""Validation: weights by stratum, the recipe's mix, the plain mean, and training left undisturbed."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.base.errors import Refusal
from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import TENSOR_KINDS
from nstrain.train.validation import source_readings, validate


@dataclasses.dataclass(frozen=True)
class Row:
    source: str
    weight: float
    tokens: npt.NDArray[np.int64]


def held_out(sources: dict[str, list[float]]) -> list[Row]:
    weights = [(source, weight) for source, ws in sources.items() for weight in ws]
    tokens = random_rows(len(weights), seed=77)
    return [Row(source, weight, tokens[i]) for i, (source, weight) in enumerate(weights)]


def engine_of() -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=1), optimizer_settings())
    engine.set_length(LengthSettings(micro_rows=3))
    return engine


def test_readings_follow_the_formulas() -> None:
    rows = held_out({"books": [0.5, 0.25, 0.25], "code": [0.9, 0.1]})
    losses = TinyModel(seed=1).token_losses(torch.from_numpy(np.stack([r.tokens for r in rows]))).double().mean(1)
    books = float(0.5 * losses[0] + 0.25 * losses[1] + 0.25 * losses[2])
    code = float(0.9 * losses[3] + 0.1 * losses[4])
    assert validate(engine_of(), rows, 3, {"books": 3, "code": 1}) == pytest.approx(
        {
            "val_8/books": books,
            "val_8/code": code,
            "val_8/mix": 0.75 * books + 0.25 * code,
            "val_8/mean": (books + code) / 2,
        },
        rel=1e-6,
    )


def test_a_source_outside_the_recipe_counts_in_the_mean_alone() -> None:
    readings = source_readings(16, {"a": 2.0, "b": 4.0, "c": 9.0}, {"b": 1, "a": 1})
    assert readings == {"val_16/a": 2.0, "val_16/b": 4.0, "val_16/c": 9.0, "val_16/mix": 3.0, "val_16/mean": 5.0}


def test_a_source_of_the_recipe_without_held_out_rows_is_refused() -> None:
    with pytest.raises(Refusal, match=r"source 'b' of the recipe has no held-out row.*data val"):
        source_readings(16, {"a": 2.0}, {"a": 1, "b": 1})


def test_readings_do_not_depend_on_how_rows_fall_into_micro_batches() -> None:
    rows = held_out({"a": [0.25] * 4, "b": [1.0]})
    first = validate(engine_of(), rows, 3, {"a": 1, "b": 1})
    assert validate(engine_of(), rows, 3, {"a": 1, "b": 1}) == first


def test_training_is_not_disturbed() -> None:
    with_validation, without = engine_of(), engine_of()
    rows = held_out({"a": [0.5, 0.5], "b": [1.0]})
    for seed in range(4):
        batch = random_rows(5, seed=seed)
        validate(with_validation, rows, 3, {"a": 1, "b": 2})
        assert train_update(with_validation, batch, 3, 1e-2, 0.1) == train_update(without, batch, 3, 1e-2, 0.1)
    for kind in TENSOR_KINDS:
        for name, array in with_validation.flat.export(kind).items():
            assert array.tobytes() == without.flat.export(kind)[name].tobytes()
    assert all((group.main_grad == 0).all() for group in with_validation.flat.groups)
