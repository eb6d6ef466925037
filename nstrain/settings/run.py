"""run.json: everything that decides what a training line computes, and when it saves, validates and prints.

Fields that decide what is computed keep their value for the line's whole life (`FIXED_FIELDS`); the others may be
edited between launches. The learning rate, the batch and the row length are functions of the position in the data, in
tokens, so that no launch, skip or restart can move them.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from nstrain.base.disk import atomic_write_json
from nstrain.settings.model import Natural, Positive, Settings, Whole, WholeNumber, dump, load

RUN_FORMAT: Literal[1] = 1
METRICS_VERSION = 2
"""The set of readings a line records. A change of names, conditions or formulas raises it."""

FIXED_FIELDS = (
    "format", "id", "metrics", "data", "model", "seed", "threads", "device", "tokens_per_update", "rows",
    "learning_rate", "optimizer", "ema", "validation", "tracker", "branch",
)  # fmt: skip
"""Top-level fields that a line keeps for life: a change is refused unless `allow_changes` lists the field."""

FREE_PARTS: dict[str, tuple[str, ...]] = {"data": ("ahead_cycles",), "validation": ("every_updates",)}
"""Parts of those that may be edited all the same: when something is done, not what."""

HELD_OUT = "held_out"
"""What else `allow_changes` may name: the data line's held-out text, which a line keeps for life as well."""

NEVER_CHANGED = frozenset({"format", "id", "metrics", "branch"})
"""Those of them that `allow_changes` cannot name."""


class DataSettings(Settings):
    """Where the line's tokens come from."""

    work: str
    """The data line's directory (absolute)."""
    ahead_cycles: Positive = 1
    """How many cycles the preparer keeps ready beyond the one in use."""


class ModelSettings(Settings):
    """The model: a preset's name, and its whole configuration as it was when the line was made."""

    preset: str
    """Name of the preset the configuration came from."""
    config: dict[str, Any]
    """The model's configuration, as the model package's `ModelConfig.to_dict()` gives it."""


class BatchPiece(Settings):
    """One piece of a batch-size ramp; the updates that start at a position in [from, to) take `tokens` tokens."""

    from_tokens: Natural = pydantic.Field(alias="from")
    """First position, in tokens, at which this piece holds."""
    to_tokens: Whole | None = pydantic.Field(alias="to")
    """Position at which the next piece takes over; null in the last piece."""
    tokens: Positive
    """Tokens of an update."""


class RowPiece(Settings):
    """The row length from a data cycle on."""

    from_cycle: Positive
    """First cycle that is cut into rows of this length."""
    row_tokens: Positive
    """Target tokens of a row; divides the data line's unit."""


class LengthSettings(Settings):
    """How rows of one length are pushed through the device; changes the speed and not the data."""

    micro_rows: Positive
    """Rows of one forward and backward pass."""
    recompute: Literal["none", "dendritic", "all"] = "none"
    """Layers whose activations are computed again in the backward pass instead of being kept."""


class RatePiece(Settings):
    """A piece of the learning rate: it holds from `from` until the next piece begins.

    `constant` stays at `start`. The others go from `start` at `from` to `end` at `to`, and stay there: a rise is the
    warm-up, a fall the decay.
    """

    from_tokens: Natural = pydantic.Field(alias="from")
    """Position, in tokens, at which this piece takes over from the one before."""
    to_tokens: Whole | None = pydantic.Field(default=None, alias="to")
    """Position at which the rate has reached `end`; null for `constant`."""
    shape: Literal["constant", "linear", "cosine", "sqrt"]
    """linear; cosine (half a cosine wave); sqrt (goes with the root of the way: steep first); or constant."""
    start: float = pydantic.Field(ge=0)
    """The rate at `from`."""
    end: float | None = pydantic.Field(default=None, ge=0)
    """The rate at and after `to`; null for `constant`."""

    @pydantic.model_validator(mode="after")
    def _whole(self) -> RatePiece:
        if self.shape == "constant":
            if self.to_tokens is not None or self.end is not None:
                raise ValueError("a constant piece has no to and no end; it holds until the next piece begins")
        elif self.to_tokens is None or self.end is None:
            raise ValueError(f"a {self.shape} piece needs to and end")
        elif self.to_tokens <= self.from_tokens:
            raise ValueError(f"to must be greater than from ({self.from_tokens:,}), found {self.to_tokens:,}")
        return self


RatePieces = tuple[RatePiece, ...]
"""A learning rate as a function of the position in tokens; `nstrain.train.schedule.learning_rate` reads it."""


class EmaSettings(Settings):
    """The weights' moving average: what a decay of the learning rate would give, without decaying.

    Each update moves it by tokens / horizon_tokens of the way to the weights (Zhang et al., arXiv 2410.21676).
    """

    horizon_tokens: Positive
    """Tokens over which it averages."""
    from_tokens: Natural
    """Position at which it begins, as a copy of the weights."""


class BranchSettings(Settings):
    """Where a branch line comes from; written by `nstrain branch`."""

    from_run: str = pydantic.Field(alias="from")
    """The parent line's directory when the branch was made."""
    line: str
    """The parent's id."""
    at_cycle: Positive
    """The parent's data cycle at whose end the branch begins."""
    update: Positive
    """The parent's update there; the branch counts on from it."""
    tokens: Positive
    """The position there; the branch counts on from it."""


LARGEST_BETA = 0.99999
"""AdamW's numbers are fp32: nearer to 1, what a new gradient counts is lost in the rounding of 1 - beta."""

SMALLEST_EPS = 1e-20
"""Likewise: an eps that fp32 takes for 0 makes NaN of every weight that has no gradient."""

SMALLEST_CLIP_NORM = 1e-20
"""Likewise: a gradient's norm over less can pass fp32's range, and every update would be skipped as not finite."""


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the global gradient, clipped by its norm."""

    beta1: float = pydantic.Field(default=0.9, ge=0, le=LARGEST_BETA)
    """Decay of the first moment an update."""
    beta2: float = pydantic.Field(default=0.95, ge=0, le=LARGEST_BETA)
    """Decay of the second moment an update."""
    eps: float = pydantic.Field(default=1e-8, ge=SMALLEST_EPS)
    """Added to the root of the second moment."""
    weight_decay: float = pydantic.Field(default=0.1, ge=0)
    """Decoupled weight decay (times the rate) of matrices, embedding and memory tables."""
    weight_decay_batch: Positive | None = None
    """Tokens an update at which `weight_decay` holds; the decay is in proportion to the batch. null: constant."""
    clip_norm: float = pydantic.Field(ge=SMALLEST_CLIP_NORM)
    """The gradient is scaled down to this global norm."""


class ValidationSettings(Settings):
    """When and on how much held-out text the line is validated (always at update 0 and at every cycle's end).

    Which rows are read is fixed for the line's life: its readings are comparable from the first to the last.
    """

    every_updates: Positive
    """Updates between two validations."""
    rows_per_source: Positive
    """Held-out rows of a source at least; every stratum has one or more."""
    probe_rows_per_source: Positive | None = None
    """Rows of a source, at most, that are also probed: of its heaviest strata; null: all."""
    long_rows_per_source: Natural = 4
    """Rows of a source, at most, at the model's longest context, where that exceeds the training length; 0: none."""


class CheckpointSettings(Settings):
    """When the line saves (always at its start, at cycle ends, at length changes and when it stops)."""

    every_updates: Positive | None = None
    """Updates between rolling checkpoints; null: by time only."""
    every_minutes: float | None = pydantic.Field(default=30.0, gt=0)
    """Minutes between rolling checkpoints; null: by updates only."""
    keep_last: Positive = 2
    """Rolling checkpoints that stay."""

    @pydantic.model_validator(mode="after")
    def _some(self) -> CheckpointSettings:
        if self.every_updates is None and self.every_minutes is None:
            raise ValueError("every_updates and every_minutes cannot both be null")
        return self


class GuardSettings(Settings):
    """When the line stops by itself, and how long its trainer may be silent before it is taken to hang."""

    max_consecutive_skips: Positive = 20
    """Updates in a row that may be skipped for a gradient norm that is not finite."""
    loss_jump: float = pydantic.Field(default=8.0, gt=0)
    """Deviations above the updates before it (`train/loss_jump`) from which a loss is an alarm; the line goes on."""
    watchdog_s: float = pydantic.Field(default=1800.0, gt=0)
    """Seconds that an update, or a wait for the checkpoint's writer, may take before the trainer is taken to hang; a
    wait for data or the GPU that lasts longer is notified."""
    start_s: float = pydantic.Field(default=3600.0, gt=0)
    """Seconds that the trainer's start may take up to the first row, and each first update of a row length, which
    compiles kernels and captures graphs."""
    validation_s: float = pydantic.Field(default=3600.0, gt=0)
    """Seconds that may pass between two signs of life of a validation (each takes a few rows)."""
    save_s: float = pydantic.Field(default=900.0, gt=0)
    """Seconds that the checkpoint of a stop may take."""
    gpu_check_every: Positive = 20
    """Updates between two looks at the GPU's other processes."""

    def budget_s(self, stage: str) -> float:
        """Seconds that a trainer may stay in a stage without another beat of its heartbeat."""
        budgets = {
            "starting": self.start_s,
            "capturing": self.start_s,
            "validating": self.validation_s,
            "stopping": self.save_s,
        }
        return budgets.get(stage, self.watchdog_s)


def _service_name(value: str) -> str:
    """A name that the service takes: its client's own rule, and no spaces around it."""
    if set(value) & set("/\\#?%:") or value != value.strip():
        raise ValueError("expected a name without any of / \\ # ? % : and without spaces around it")
    return value


def _service_address(value: str) -> str:
    if not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", value):
        raise ValueError("expected an address like https://wandb.example.org, without a key in it")
    return value


ServiceName = Annotated[str, pydantic.Field(min_length=1, max_length=128), pydantic.AfterValidator(_service_name)]


class TrackerSettings(Settings):
    """The experiment tracker that the line's journal is copied to, by a process of its own (nstrain.mirror)."""

    service: Literal["wandb"]
    """wandb: Weights & Biases, or another server that speaks its protocol."""
    project: ServiceName
    """The project in which the line's runs stand, one a generation."""
    entity: ServiceName | None = None
    """The user or team whose project it is; null: whom the service takes the key's owner to work for."""
    base_url: Annotated[str, pydantic.AfterValidator(_service_address)] | None = None
    """The server's address; null: the one that the service's client is set to."""


class RunSettings(Settings):
    """A training line's configuration (run.json)."""

    format: Annotated[Literal[1], WholeNumber] = RUN_FORMAT
    """Version of this file's format."""
    id: str
    """The line's own name among the consumers of its data line; made by `new`."""
    metrics: Whole = METRICS_VERSION
    """METRICS_VERSION of the code that started the line; never changes."""
    data: DataSettings
    model: ModelSettings
    seed: Natural = pydantic.Field(lt=2**63)
    """Seed of the initial weights."""
    threads: Positive
    """Threads of a CPU trainer; part of what makes its sums come out the same."""
    device: Literal["cpu", "cuda"]
    """Where the model runs."""
    tokens_per_update: Positive | tuple[BatchPiece, ...]
    """Tokens of an update: a number, or a ramp of pieces that only grows at its end."""
    rows: tuple[RowPiece, ...]
    """Row length by cycle; only grows at its end."""
    lengths: dict[str, LengthSettings]
    """By row length (in tokens): how its rows are pushed through the device."""
    learning_rate: RatePieces
    """Warm-up, constant stretches and decays over tokens; only grows at its end."""
    optimizer: OptimizerSettings
    ema: EmaSettings | None = None
    """The weights' moving average; null: none is kept."""
    validation: ValidationSettings
    checkpoints: CheckpointSettings
    guards: GuardSettings = GuardSettings()
    print_every: Positive = 10
    """Updates between two rows in run.log; one with a validation's readings is printed in any case."""
    tracker: TrackerSettings | None = None
    """Where the journal is copied to; null: nowhere."""
    branch: BranchSettings | None = None
    """Of a branch: its parent, and where it left it."""
    allow_changes: tuple[str, ...] = ()
    """Fixed fields whose change is meant, or `held_out`: that the held-out text was gathered anew. An entry allows one
    change; to change a field again, list it once more."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        _refuse_rows(self.rows)
        _refuse_ramp(self.batch_pieces)
        _refuse_rates(self.learning_rate)
        # What a branch's parent trained before the fork is not trained again.
        begins = self.branch.tokens if self.branch is not None else 0
        for row in self.rows:
            if str(row.row_tokens) not in self.lengths:
                raise ValueError(f"lengths has no entry for rows of {row.row_tokens} tokens")
            for piece in self.batch_pieces:
                if (piece.to_tokens is None or piece.to_tokens > begins) and piece.tokens % row.row_tokens:
                    raise ValueError(
                        f"tokens_per_update: {piece.tokens:,} is not a multiple of the row length {row.row_tokens:,}"
                    )
        unknown = set(self.allow_changes) - {*FIXED_FIELDS, HELD_OUT}
        if unknown:
            raise ValueError(f"allow_changes: no fixed field is called {', '.join(sorted(unknown))}")
        never = NEVER_CHANGED & set(self.allow_changes)
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


def _refuse_rows(rows: tuple[RowPiece, ...]) -> None:
    if not rows or rows[0].from_cycle != 1:
        raise ValueError("rows must begin with a piece from_cycle 1")
    if any(b.from_cycle <= a.from_cycle for a, b in itertools.pairwise(rows)):
        raise ValueError("rows: from_cycle must grow from piece to piece")


def _refuse_ramp(pieces: tuple[BatchPiece, ...]) -> None:
    if not pieces or pieces[0].from_tokens != 0 or pieces[-1].to_tokens is not None:
        raise ValueError("tokens_per_update must begin with a piece from 0 and end with a piece to null")
    for a, b in itertools.pairwise(pieces):
        if a.to_tokens != b.from_tokens or b.from_tokens <= a.from_tokens:
            raise ValueError(
                "tokens_per_update: each piece must begin where the one before it ends, "
                f"found to {a.to_tokens} followed by from {b.from_tokens}"
            )


def _refuse_rates(pieces: RatePieces) -> None:
    if not pieces or pieces[0].from_tokens != 0:
        raise ValueError("learning_rate must begin with a piece from 0")
    for a, b in itertools.pairwise(pieces):
        if b.from_tokens <= a.from_tokens:
            raise ValueError(
                "learning_rate: from must grow from piece to piece, "
                f"found from {a.from_tokens} followed by from {b.from_tokens}"
            )


def load_run(path: Path) -> RunSettings:
    """run.json, validated. Raises `Refusal`."""
    return load(RunSettings, path)


def save_run(path: Path, settings: RunSettings) -> None:
    """Write run.json with every field, replacing it as a whole."""
    atomic_write_json(path, dump(settings))
