"""run.json: everything that decides what a training line computes, and when it saves, validates and prints.

Fields that decide what is computed keep their value for the line's whole life (`FIXED_FIELDS`); the others may be
edited between launches. The learning rate, the batch and the row length are functions of the position in the data, in
tokens, so that no launch, skip or restart can move them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import pydantic

from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import Refusal
from nstrain.settings.model import Settings, dump, load

RUN_FORMAT: Literal[1] = 1
METRICS_VERSION = 1
"""The set of readings a line records. A change of names, conditions or formulas raises it."""

FIXED_FIELDS = (
    "format", "id", "metrics", "data", "model", "seed", "threads", "device", "tokens_per_update", "rows",
    "learning_rate", "optimizer",
)  # fmt: skip
"""Top-level fields that a line keeps for life: a change is refused unless `allow_changes` lists the field."""

Positive = pydantic.Field(gt=0)


class DataSettings(Settings):
    """Where the line's tokens come from."""

    work: str
    """The data line's directory (absolute)."""
    ahead_cycles: int = pydantic.Field(default=1, ge=1)
    """How many cycles the preparer keeps ready beyond the one in use."""


class ModelSettings(Settings):
    """The model: a preset's name, and its whole configuration as it was when the line was made."""

    preset: str
    """Name of the preset the configuration came from."""
    config: dict[str, Any]
    """The model's configuration, as the model package's `ModelConfig.to_dict()` gives it."""


class BatchPiece(Settings):
    """One piece of a batch-size ramp; the updates that start at a position in [from, to) take `tokens` tokens."""

    from_tokens: int = pydantic.Field(ge=0, alias="from")
    """First position, in tokens, at which this piece holds."""
    to_tokens: int | None = pydantic.Field(alias="to")
    """Position at which the next piece takes over; null in the last piece."""
    tokens: int = Positive
    """Tokens of an update."""


class RowPiece(Settings):
    """The row length from a data cycle on."""

    from_cycle: int = pydantic.Field(ge=1)
    """First cycle that is cut into rows of this length."""
    row_tokens: int = Positive
    """Target tokens of a row; divides the data line's unit."""


class LengthSettings(Settings):
    """How rows of one length are pushed through the device; changes the speed and not the data."""

    micro_rows: int = Positive
    """Rows of one forward and backward pass."""
    recompute: Literal["none", "dendritic", "all"] = "none"
    """Layers whose activations are computed again in the backward pass instead of being kept."""


class DecayPiece(Settings):
    """The learning rate's way down."""

    from_tokens: int = pydantic.Field(ge=0)
    """Position at which the rate is still `peak`."""
    to_tokens: int = Positive
    """Position at which the rate has reached `final`, where it stays."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """linear; cosine (half a cosine wave); sqrt (1 - sqrt of the way)."""
    final: float = pydantic.Field(default=0.0, ge=0)
    """The rate at and after `to_tokens`."""

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> DecayPiece:
        if self.to_tokens <= self.from_tokens:
            raise ValueError(f"to_tokens must be greater than from_tokens ({self.from_tokens:,})")
        return self


class LearningRate(Settings):
    """Warm-up, constant, decay; read at an update's position after it."""

    peak: float = Positive
    """The rate after warm-up."""
    warmup_tokens: int = pydantic.Field(default=0, ge=0)
    """The rate grows linearly from 0 at position 0 to `peak` here."""
    decay: DecayPiece | None = None
    """When and how the rate falls; null keeps it constant."""

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> LearningRate:
        if self.decay is not None and self.decay.from_tokens < self.warmup_tokens:
            raise ValueError("decay.from_tokens lies inside the warm-up")
        if self.decay is not None and self.decay.final > self.peak:
            raise ValueError("decay.final is above peak")
        return self


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the global gradient, clipped by its norm."""

    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment an update."""
    beta2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment an update."""
    eps: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = pydantic.Field(default=0.1, ge=0)
    """Decoupled weight decay (times the rate) of matrices, embedding and memory tables."""
    weight_decay_batch: int | None = pydantic.Field(default=None, gt=0)
    """Tokens an update at which `weight_decay` holds; the decay is in proportion to the batch. null: constant."""
    clip_norm: float = Positive
    """The gradient is scaled down to this global norm."""


class ValidationSettings(Settings):
    """When and on how much held-out text the line is validated (always at update 0 and at every cycle's end)."""

    every_updates: int = Positive
    """Updates between two validations."""
    rows_per_source: int = Positive
    """Held-out rows of a source at least; every stratum has one or more."""


class CheckpointSettings(Settings):
    """When the line saves (always at its start, at cycle ends, at length changes and when it stops)."""

    every_updates: int | None = pydantic.Field(default=None, gt=0)
    """Updates between rolling checkpoints; null: by time only."""
    every_minutes: float | None = pydantic.Field(default=30.0, gt=0)
    """Minutes between rolling checkpoints; null: by updates only."""
    keep_last: int = pydantic.Field(default=2, ge=1)
    """Rolling checkpoints that stay."""

    @pydantic.model_validator(mode="after")
    def _some(self) -> CheckpointSettings:
        if self.every_updates is None and self.every_minutes is None:
            raise ValueError("every_updates and every_minutes cannot both be null")
        return self


class GuardSettings(Settings):
    """When the line stops by itself."""

    max_consecutive_skips: int = pydantic.Field(default=20, gt=0)
    """Updates in a row that may be skipped for a gradient norm that is not finite."""


class RunSettings(Settings):
    """A training line's configuration (run.json)."""

    format: Literal[1] = RUN_FORMAT
    """Version of this file's format."""
    id: str
    """The line's own name among the consumers of its data line; made by `new`."""
    metrics: int = METRICS_VERSION
    """METRICS_VERSION of the code that started the line; never changes."""
    data: DataSettings
    model: ModelSettings
    seed: int = pydantic.Field(ge=0, lt=2**63)
    """Seed of the initial weights."""
    threads: int = Positive
    """Threads of a CPU trainer; part of what makes its sums come out the same."""
    device: Literal["cpu", "cuda"]
    """Where the model runs."""
    tokens_per_update: pydantic.PositiveInt | tuple[BatchPiece, ...]
    """Tokens of an update: a number, or a ramp of pieces that only grows at its end."""
    rows: tuple[RowPiece, ...]
    """Row length by cycle; only grows at its end."""
    lengths: dict[str, LengthSettings]
    """By row length (in tokens): how its rows are pushed through the device."""
    learning_rate: LearningRate
    optimizer: OptimizerSettings
    validation: ValidationSettings
    checkpoints: CheckpointSettings
    guards: GuardSettings = GuardSettings()
    print_every: int = pydantic.Field(default=10, gt=0)
    """Updates between two rows in run.log; the row of an update that validated is always printed."""
    allow_changes: tuple[str, ...] = ()
    """Fixed fields whose change is meant; see FIXED_FIELDS."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        if not self.rows or self.rows[0].from_cycle != 1:
            raise ValueError("rows must begin with a piece from_cycle 1")
        if any(b.from_cycle <= a.from_cycle for a, b in itertools.pairwise(self.rows)):
            raise ValueError("rows: from_cycle must grow from piece to piece")
        pieces = self.batch_pieces
        if not pieces or pieces[0].from_tokens != 0 or pieces[-1].to_tokens is not None:
            raise ValueError("tokens_per_update must begin with a piece from 0 and end with a piece to null")
        for a, b in itertools.pairwise(pieces):
            if a.to_tokens != b.from_tokens or b.from_tokens <= a.from_tokens:
                raise ValueError(
                    "tokens_per_update: each piece must begin where the one before it ends, "
                    f"found to {a.to_tokens} followed by from {b.from_tokens}"
                )
        for row in self.rows:
            if str(row.row_tokens) not in self.lengths:
                raise ValueError(f"lengths has no entry for rows of {row.row_tokens} tokens")
            for piece in pieces:
                if piece.tokens % row.row_tokens:
                    raise ValueError(
                        f"tokens_per_update: {piece.tokens:,} is not a multiple of the row length {row.row_tokens:,}"
                    )
        unknown = set(self.allow_changes) - set(FIXED_FIELDS)
        if unknown:
            raise ValueError(f"allow_changes: no fixed field is called {', '.join(sorted(unknown))}")
        never = {"format", "id", "metrics"} & set(self.allow_changes)
        if never:
            raise ValueError(f"allow_changes: {', '.join(sorted(never))} can never change")
        return self

    @property
    def batch_pieces(self) -> tuple[BatchPiece, ...]:
        """tokens_per_update as a ramp, also when it is one number."""
        if isinstance(self.tokens_per_update, int):
            return (BatchPiece.model_validate({"from": 0, "to": None, "tokens": self.tokens_per_update}),)
        return self.tokens_per_update

    def row_tokens_at(self, cycle: int) -> int:
        """The row length of a cycle."""
        return next(piece.row_tokens for piece in reversed(self.rows) if piece.from_cycle <= cycle)

    def batch_tokens_at(self, position_tokens: int) -> int:
        """Tokens of the update that starts at a position."""
        return next(p.tokens for p in reversed(self.batch_pieces) if p.from_tokens <= position_tokens)


def load_run(path: Path) -> RunSettings:
    """run.json, validated. Raises `Refusal`."""
    return load(RunSettings, path)


def save_run(path: Path, settings: RunSettings) -> None:
    """Write run.json with every field, replacing it as a whole."""
    atomic_write_json(path, dump(settings))


def refuse_changed_fields(old: dict[str, Any], new: RunSettings, where: str) -> None:
    """Refuse a fixed field that differs from what the line was trained with, unless `allow_changes` lists it.

    `old` is the run.json stored in the newest checkpoint. `rows` and a ramp may grow at their end.
    Raises `Refusal` naming every changed field, both values and the ways to mend it.
    """
    now = dump(new)
    problems = []
    for name in FIXED_FIELDS:
        if name in new.allow_changes or now[name] == old.get(name) or _grown(old.get(name), now[name]):
            continue
        problems.append(_first_difference(name, old.get(name), now[name]))
    if problems:
        raise Refusal(
            f"{where}: fields that a line keeps for life differ from those of its newest checkpoint: "
            + "; ".join(problems)
            + ". Put the old value back, or list the field's name in allow_changes if the change is meant."
        )


def _grown(old: Any, new: Any) -> bool:
    """Whether a list of pieces kept all it had: its last piece may have been given an end that was open before.

    One number of tokens an update is a ramp of one piece.
    """
    if isinstance(old, int):
        old = [{"from": 0, "to": None, "tokens": old}]
    if not (isinstance(old, list) and isinstance(new, list) and 0 < len(old) <= len(new)):
        return False
    last = dict(new[len(old) - 1])
    if old[-1].get("to", 0) is None and len(new) > len(old):
        last["to"] = None
    return [*new[: len(old) - 1], last] == old


def _first_difference(place: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return _first_difference(f"{place}.{key}", old.get(key), new.get(key))
    return f"{place} was {old!r} and is now {new!r}"
