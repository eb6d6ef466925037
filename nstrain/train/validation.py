"""Validation: what a line reads of the held-out rows, and of its optimizer, at one moment of its training.

    val_<L>/...        losses by source and place in the document, probes of the layers: rows of the training length L
    val_<P>/...        losses by source and place in the row, probes: rows of the model's longest context, one at a time
    ema/val_<L>/...    losses under the weights' moving average, and ema/val_<P>/... on one long row of each source
    opt/...            sizes of weights, moments and AdamW's next step

docs/reference/metrics.md has the formulas, reading_table.py when each is there. Nothing of the training state is
touched: the update after a validation has the bits that it would have had without one. Which rows are asked for what
depends on their index: weights by distance, which cost most, are read from every second row and every fourth long row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.settings.run import RunSettings
from nstrain.train.engine import Engine, TokenRows, micro_batches
from nstrain.train.held_out import Asked, FloatArray, HeldOut, RowSet
from nstrain.train.optimizer_summaries import OptimizerSummaries
from nstrain.train.position_readings import document_bins, document_losses, segment_losses
from nstrain.train.probe_readings import ProbedBatch, probe_row
from nstrain.train.reading_table import Declared, Facts, RowsRead, is_layer, other_names, validation_names
from nstrain.train.readings import Row

ATTENTION_EVERY = 2
LONG_ATTENTION_EVERY = 4
"""Every so many rows are asked for the weights by distance."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where a line stands when it validates."""

    row_tokens: int
    """The training row length."""
    micro_rows: int
    """Rows of that length that go through the device at a time."""
    recipe: Mapping[str, int]
    """The sources' shares in the cycle being trained."""
    learning_rate: float
    """The last update's."""


class Validation:
    """The validations of one trainer. Owns the held-out rows of the lengths it has seen."""

    def __init__(self, engine: Engine, settings: RunSettings, data: DataLine, progress: Callable[[], None]) -> None:
        """`progress` is called now and then. Raises `Refusal` if the model does not say what its probe gives."""
        self._engine, self._settings, self._data, self._progress = engine, settings, data, progress
        self._declared = Declared.by(engine.model)
        self._held_out: dict[int, HeldOut] = {}
        self._warm: set[int] = set()
        """Training lengths at which rows have gone through each probe."""

    def held_out(self, row_tokens: int) -> HeldOut:
        """The held-out rows of a training length."""
        if row_tokens not in self._held_out:
            self._held_out[row_tokens] = HeldOut.open(self._data, self._settings, row_tokens)
        return self._held_out[row_tokens]

    # ---- a whole validation ---------------------------------------------------------------------------------------

    def read(self, moment: Moment) -> Row:
        """All readings, and what they took under time/.

        Raises `Refusal` if a source of the recipe has no held-out row.
        """
        self._warm.add(moment.row_tokens)
        seconds: dict[str, float] = {}
        began = time.monotonic()
        rows = self.held_out(moment.row_tokens)
        losses_nL = self._losses(rows.losses, moment.micro_rows)
        weights_n = rows.losses.mix_weights(moment.recipe)
        row: Row = source_losses(f"val_{moment.row_tokens}", rows.losses, losses_nL, moment.recipe)
        row |= document_losses(losses_nL, rows.losses.tokens, self._data.eos_id, weights_n)
        with _timed(seconds, "time/validation_probe_s"):
            row |= self._probe(rows.probed, ATTENTION_EVERY, moment.micro_rows, moment)
        if rows.long is not None:
            with _timed(seconds, "time/validation_long_s"):
                row |= self._read_long(rows.long, moment)
        if self._engine.flat.ema_begun:
            with _timed(seconds, "time/validation_ema_s"), self._engine.ema_weights():
                row |= self._read_average(rows, moment)
        row |= optimizer_readings(self._engine.optimizer_summaries(moment.learning_rate))
        return row | seconds | {"time/validation_s": time.monotonic() - began}

    def _read_long(self, long: RowSet, moment: Moment) -> Row:
        losses_nL = self._losses(long, 1)
        row: Row = source_losses(f"val_{long.row_tokens}", long, losses_nL, moment.recipe)
        row |= segment_losses(losses_nL, long.tokens, moment.row_tokens, long.mix_weights(moment.recipe))
        return row | self._probe(long, LONG_ATTENTION_EVERY, 1, moment)

    def _read_average(self, rows: HeldOut, moment: Moment) -> Row:
        losses_nL = self._losses(rows.losses, moment.micro_rows)
        row: Row = source_losses(f"ema/val_{moment.row_tokens}", rows.losses, losses_nL, moment.recipe)
        if rows.long is not None:
            some = rows.long.some_a_source(1)
            row |= source_losses(f"ema/val_{some.row_tokens}", some, self._losses(some, 1), moment.recipe)
        return row

    def _losses(self, rows: RowSet, at_once: int) -> FloatArray:
        """Each target's loss, [rows, L]."""
        return np.concatenate([self._losses_of(batch) for batch in micro_batches(rows.tokens, at_once)])

    def _losses_of(self, rows: TokenRows) -> FloatArray:
        self._progress()
        return self._engine.token_losses(rows).astype(np.float64)

    def _probe(self, rows: RowSet, attention_every: int, at_once: int, moment: Moment) -> Row:
        """The probes of those rows that count in the mix."""
        if not self._declared.members:
            return {}
        weights_n = rows.mix_weights(moment.recipe)
        batches = []
        for attention in (True, False):
            asked = [i for i in np.flatnonzero(weights_n) if (i % attention_every == 0) == attention]
            for first in range(0, len(asked), at_once):
                some = asked[first : first + at_once]
                self._progress()
                found = self._engine.probe(rows.tokens[some], self._data.eos_id, moment.row_tokens, attention)
                batches.append(ProbedBatch(found, weights_n[some]))
        return probe_row(batches, rows.row_tokens)

    # ---- what must be there ---------------------------------------------------------------------------------------

    def other_names(self, row: Row, moment: Moment) -> str | None:
        """What is wrong with a validation's readings; None if they are exactly those of this line at that moment."""
        return other_names(row, validation_names(self.facts(moment)))

    def facts(self, moment: Moment) -> Facts:
        """What decides which readings a validation has."""
        rows, eos_id = self.held_out(moment.row_tokens), self._data.eos_id

        def read(of: RowSet, attention_every: int) -> RowsRead:
            attention = (index % attention_every == 0 for index in range(len(of.tokens)))
            return RowsRead(of.row_tokens, Asked.of(of, of.mix_weights(moment.recipe), attention, eos_id))

        weights_n = rows.losses.mix_weights(moment.recipe)
        bins = document_bins(rows.losses.tokens, eos_id, weights_n)
        return Facts(
            sources=tuple(dict.fromkeys(rows.losses.sources)),
            groups=tuple(group.name for group in self._engine.flat.groups),
            parts=self._engine.flat.part_names,
            declared=self._declared,
            train=dataclasses.replace(read(rows.probed, ATTENTION_EVERY), docpos_bins=bins),
            long=None if rows.long is None else read(rows.long, LONG_ATTENTION_EVERY),
            average=self._engine.flat.ema_begun,
        )

    # ---- before a capture -----------------------------------------------------------------------------------------

    def warm(self, moment: Moment) -> Row:
        """One row through each probe, so that its memory is taken and its kernels are compiled; its readings.

        A launch that has not validated at a length does this before it captures there, once; then there are none.
        """
        if moment.row_tokens in self._warm:
            return {}
        self._warm.add(moment.row_tokens)
        rows = self.held_out(moment.row_tokens)
        row: Row = {}
        for of in (rows.probed, rows.long):
            if of is None:
                continue
            first = of.tokens[:1]
            row[f"val_{of.row_tokens}/{of.sources[0]}"] = float(self._losses_of(first).mean())
            found = self._engine.probe(first, self._data.eos_id, moment.row_tokens, True)
            row |= probe_row([ProbedBatch(found, np.ones(1))], of.row_tokens)
        return row


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Keeps under a name the seconds that a block took."""
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


def source_losses(prefix: str, rows: RowSet, losses_nL: FloatArray, recipe: Mapping[str, int]) -> dict[str, float]:
    """<prefix>/<source>, /mix and /mean from the losses of their rows' targets.

    A source's loss is the sum of its rows' parts times their mean losses. Raises `Refusal` if a source of the recipe
    has no held-out row.
    """
    by_source: dict[str, list[float]] = {}
    for source, part, loss in zip(rows.sources, rows.parts, losses_nL.mean(axis=1), strict=True):
        by_source.setdefault(source, []).append(float(part * loss))
    losses = {source: math.fsum(parts) for source, parts in by_source.items()}
    for source in recipe:
        if source not in losses:
            raise Refusal(f"source {source!r} of the recipe has no held-out row; run `nstrain data val` again")
    mix = math.fsum(share * losses[source] for source, share in recipe.items()) / sum(recipe.values())
    return {
        **{f"{prefix}/{source}": loss for source, loss in losses.items()},
        f"{prefix}/mix": mix,
        f"{prefix}/mean": math.fsum(losses.values()) / len(losses),
    }


def optimizer_readings(summaries: OptimizerSummaries) -> dict[str, float]:
    """The opt/ readings; parts that are no layer are set apart, since they may have the name of a group."""
    row: dict[str, float] = {}
    for group, of_group in summaries.groups.items():
        row |= {f"opt/{group}/{name}": value for name, value in dataclasses.asdict(of_group).items()}
    for part, of_part in summaries.parts.items():
        prefix = f"opt/{part}" if is_layer(part) else f"opt/part/{part}"
        for name in ("param_norm", "update_norm", "update_ratio"):
            row[f"{prefix}/{name}"] = getattr(of_part, name)
    return row
