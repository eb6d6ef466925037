"""One run: a model of an arm is built, trained on one pass over the data, read, and gone; what is left is a row.

    rate: linear warm-up, constant, linear to 0          AdamW, decoupled decay 0.1, the gradient clipped at norm 1

The engine is the trainer's: captured graphs on a GPU, operators one by one on a CPU. The seed is that of the starting
weights and of the order of the rows.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from typing import Any, Protocol, runtime_checkable

import numpy as np

from benchmarks.study import readings
from benchmarks.study.arms import ARMS, SIZES, Arm, shallow
from benchmarks.study.data import StudyData
from nstrain.base.errors import NstrainError
from nstrain.settings.model import validate
from nstrain.settings.run import LengthSettings, OptimizerSettings, RatePiece
from nstrain.train.engine import EagerEngine, UpdateReadings, train_update
from nstrain.train.schedule import learning_rate

WEIGHT_DECAY = 0.1
CURVE_UPDATES = 6
"""Updates a point of the curve is the mean of."""
TIMED_FROM = 10
"""Updates before the speed is measured."""


@runtime_checkable
class ClosableEngine(Protocol):
    """An engine that holds a device's memory."""

    def close_arena(self) -> int:
        """Give it back."""


class OutOfTime(NstrainError):
    """A run that would not have ended in its time."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How every arm of a part is trained."""

    row_tokens: int = 2048
    rows: int = 32
    """Rows of an update."""
    epochs: int = 1
    warm_up: float = 0.06
    """Share of the tokens over which the rate rises."""
    decay: float = 0.4
    """Share of the tokens over which it falls to 0."""
    long_rows: bool = False
    """Whether rows of 8K and 32K tokens are read as well."""
    expected_s: float = 75.0
    """What a run is thought to take before one has."""
    limit_s: float = 180.0
    """A run that takes longer is given up."""

    def rate_pieces(self, peak: float, tokens: int) -> tuple[RatePiece, ...]:
        """The rate over all of a run's tokens."""
        warm, fall = round(self.warm_up * tokens), round((1 - self.decay) * tokens)
        pieces = [
            {"from": 0, "to": warm, "shape": "linear", "start": 0.0, "end": peak},
            {"from": warm, "shape": "constant", "start": peak},
            {"from": fall, "to": tokens, "shape": "linear", "start": peak, "end": 0.0},
        ]
        return tuple(validate(RatePiece, piece, "study") for piece in pieces)


@dataclasses.dataclass(frozen=True)
class Job:
    """What identifies a run, beside the data and the commit."""

    arm: str
    size: str
    rate: float
    seed: int = 0
    recipe: str = "one epoch"

    def __str__(self) -> str:
        return f"{self.arm} {self.size} @ {self.rate:g} seed {self.seed}"


RECIPES = {
    "one epoch": Recipe(),
    "final": Recipe(epochs=2, long_rows=True, expected_s=300.0, limit_s=480.0),
    "toy": Recipe(row_tokens=32, rows=8, long_rows=True, expected_s=1.0),
}


def run(job: Job, data: StudyData, device: str, deadline: float | None = None) -> tuple[dict[str, Any], bool]:
    """Train and read a job's model: the part of its row that this process knows, and whether all memory was given back.

    `deadline` is a time of `time.monotonic()`. Raises `OutOfTime` past it or past the recipe's limit.
    """
    recipe, arm = RECIPES[job.recipe], ARMS[job.arm]
    began = time.monotonic()
    end = min(began + recipe.limit_s, deadline or float("inf"))
    with arm.in_force():
        config = arm.configure(SIZES[job.size])
        engine = _engine(arm, config, job, device)
        training = _train(engine, data, job, recipe, SIZES[job.size].micro_rows, end)
        found = {
            "parameters": config.parameter_count(),
            "flops_per_token": config.flops_per_token(recipe.row_tokens),
            **training,
            **_read(engine, data, arm, recipe),
        }
        is_clean = _give_back(engine)
    return {**found, "seconds": time.monotonic() - began}, is_clean


def warm_up(job: Job, letter: str, data: StudyData, device: str) -> None:
    """Compile what a job's layers of one kind will need, with a model of one such layer: nothing else comes of it."""
    recipe, arm = RECIPES[job.recipe], ARMS[job.arm]
    with arm.in_force():
        config = shallow(arm.configure(SIZES[job.size]), letter)
        engine = EagerEngine(arm.build(config, device, job.seed), _optimizer())
        micro_rows = SIZES[job.size].micro_rows
        engine.set_length(LengthSettings(micro_rows=micro_rows))
        train_update(engine, next(data.updates(recipe.row_tokens, recipe.rows, 0, 1)), micro_rows, 1e-4, WEIGHT_DECAY)
        _read(engine, data, arm, recipe)


def _optimizer() -> OptimizerSettings:
    return validate(OptimizerSettings, {"clip_norm": 1.0, "weight_decay": WEIGHT_DECAY}, "study")


def _engine(arm: Arm, config: Any, job: Job, device: str) -> EagerEngine:
    if not device.startswith("cuda"):
        return EagerEngine(arm.build(config, device, job.seed), _optimizer())
    from nstrain.train.graphs import GraphEngine

    return GraphEngine(arm.build(config, device, job.seed), _optimizer(), SIZES[job.size].arena_bytes)


def _give_back(engine: EagerEngine) -> bool:
    """Whether a device's memory is free for the next run: if not, only the end of the process frees it."""
    if not isinstance(engine, ClosableEngine):
        return True
    try:
        engine.close_arena()
    except NstrainError:
        traceback.print_exc()
        return False
    return True


# --- training ----------------------------------------------------------------------------------------------------


def _train(
    engine: EagerEngine, data: StudyData, job: Job, recipe: Recipe, micro_rows: int, end: float
) -> dict[str, Any]:
    update_tokens = recipe.rows * recipe.row_tokens
    total = data.updates_an_epoch(recipe.row_tokens, recipe.rows) * recipe.epochs * update_tokens
    pieces = recipe.rate_pieces(job.rate, total)
    engine.set_length(LengthSettings(micro_rows=min(micro_rows, recipe.rows)))
    taken: list[UpdateReadings] = []
    timed_from = time.monotonic()
    for number, rows in enumerate(data.updates(recipe.row_tokens, recipe.rows, job.seed, recipe.epochs), 1):
        rate = learning_rate(pieces, number * update_tokens)
        taken.append(train_update(engine, rows, min(micro_rows, recipe.rows), rate, WEIGHT_DECAY))
        if number == TIMED_FROM:
            timed_from = time.monotonic()
        if time.monotonic() > end:
            raise OutOfTime(f"{job} was given up after {number} of {total // update_tokens} updates")
    timed_s = time.monotonic() - timed_from
    return {
        "tokens": total,
        "updates": len(taken),
        "curve": _curve(taken, update_tokens),
        "gradient": _gradient_summary(taken),
        "tokens_per_s": max(0, len(taken) - TIMED_FROM) * update_tokens / timed_s,
    }


def _curve(taken: list[UpdateReadings], update_tokens: int) -> list[list[float]]:
    """[tokens so far, mean training loss since the point before]."""
    points = range(CURVE_UPDATES, len(taken) + 1, CURVE_UPDATES)
    losses = [update.loss for update in taken]
    return [[end * update_tokens, round(float(np.mean(losses[end - CURVE_UPDATES : end])), 5)] for end in points]


def _gradient_summary(taken: list[UpdateReadings]) -> dict[str, Any]:
    """The norm before clipping, over the second half; and of all updates, how many were clipped and skipped."""
    later = taken[len(taken) // 2 :]
    norms = np.array([update.grad_norm for update in later])
    p50, p90, greatest = np.quantile(norms, (0.5, 0.9, 1.0))
    return {
        "p50": float(p50),
        "p90": float(p90),
        "max": float(greatest),
        "clipped": float(np.mean([update.grad_norm > 1 for update in taken])),
        "skipped": sum(update.skipped for update in taken),
        "by_group": {
            group: float(np.median([update.group_norms[group] for update in later])) for group in later[0].group_norms
        },
        "by_part": {
            part: float(np.median([update.part_norms[part] for update in later])) for part in later[0].part_norms
        },
    }


# --- reading -----------------------------------------------------------------------------------------------------


def _read(engine: EagerEngine, data: StudyData, arm: Arm, recipe: Recipe) -> dict[str, Any]:
    found = readings.validation(engine, data)
    found["tasks"] = readings.tasks(engine, recipe.row_tokens, data.vocabulary)
    if recipe.long_rows:
        found["long_rows"] = readings.long_rows(engine, data)
    if arm.is_probed:
        found["health"] = readings.health(engine, data)
    return found
