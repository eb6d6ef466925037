"""The held-out rows of a validation: which ones, what each weighs, and what their tokens let be read.

Rows of the training length are `losses` and, as many as are asked for, `probed`; the long rows are of the model's
longest context, where that exceeds the training length. Which rows those are depends on the data line and run.json's
`validation` alone, never on how many rows go through the device at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nstrain.data.line import DataLine
from nstrain.data.val import ValidationRows
from nstrain.settings.run import RunSettings
from nstrain.train.model import IGNORED_TOKEN, longest_row

FloatArray = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.int64]


class HeldOutRow(Protocol):
    """A row of `nstrain.data.val.ValidationRows`."""

    @property
    def source(self) -> str:
        """The source it was held out of."""

    @property
    def weight(self) -> float:
        """What its mean loss counts in the source's loss."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """L + 1 token ids."""


@dataclasses.dataclass(frozen=True)
class RowSet:
    """Rows of one length in a fixed order; a row's place in it is its index."""

    sources: tuple[str, ...]
    """The source of each row."""
    parts: FloatArray
    """What each row's mean loss counts in its source's loss; of a source they sum to 1."""
    tokens: TokenArray
    """[rows, L + 1]"""

    @classmethod
    def of(cls, rows: Sequence[HeldOutRow]) -> RowSet:
        """These rows."""
        parts = np.array([row.weight for row in rows])
        return cls(tuple(row.source for row in rows), parts, np.stack([row.tokens for row in rows]))

    @property
    def row_tokens(self) -> int:
        """L."""
        return self.tokens.shape[1] - 1

    def mix_weights(self, recipe: Mapping[str, int]) -> FloatArray:
        """What each row counts in val_<L>/mix: its part in its source's loss times the source's share."""
        shares = np.array([recipe.get(source, 0) for source in self.sources]) / sum(recipe.values())
        return self.parts * shares

    def some_a_source(self, most: int) -> RowSet:
        """Of each source at most so many rows, those with the largest parts (the first of equal ones).

        Their parts sum to 1 again: they stand for the source.
        """
        chosen: list[int] = []
        parts: list[float] = []
        for source in dict.fromkeys(self.sources):
            of_source = [index for index, of in enumerate(self.sources) if of == source]
            kept = sorted(sorted(of_source, key=lambda index: (-self.parts[index], index))[:most])
            whole = math.fsum(self.parts[kept]) if len(kept) < len(of_source) else 1.0
            chosen += kept
            parts += [float(self.parts[index] / whole) for index in kept]
        return RowSet(tuple(self.sources[index] for index in chosen), np.array(parts), self.tokens[chosen])


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The rows of validations at one training length."""

    losses: RowSet
    """Rows of the training length, for losses."""
    probed: RowSet
    """Rows of the training length, for probes; some of those of `losses`, or all."""
    long: RowSet | None
    """Rows of the longest context, for both; None if there are none."""

    @classmethod
    def open(cls, data: DataLine, settings: RunSettings, row_tokens: int) -> HeldOut:
        """The rows at a training length. Raises `Refusal` if the line has no held-out text that fits."""

        def cut(length: int, rows_per_source: int) -> RowSet:
            return RowSet.of(ValidationRows.open(data, length, rows_per_source).rows)

        validation = settings.validation
        losses = cut(row_tokens, validation.rows_per_source)
        probed, most = losses, validation.probe_rows_per_source
        if most is not None:  # also where `losses` are few: of many strata they are a row each
            probed = cut(row_tokens, min(most, validation.rows_per_source)).some_a_source(most)
        long_tokens, most_long = (
            long_row_tokens(settings, data.unit_tokens, row_tokens),
            validation.long_rows_per_source,
        )
        long = None if long_tokens is None else cut(long_tokens, most_long).some_a_source(most_long)
        return cls(losses, probed, long)


def long_row_tokens(settings: RunSettings, unit_tokens: int, row_tokens: int) -> int | None:
    """P: the longest row that the model reads and the data line can be cut into; None if rows are as long already."""
    longest = longest_row(settings)
    if longest is None or not settings.validation.long_rows_per_source:
        return None
    fits = next(length for length in range(min(longest, unit_tokens), 0, -1) if unit_tokens % length == 0)
    return fits if fits > row_tokens else None


@dataclasses.dataclass(frozen=True)
class Asked:
    """What can be read from some rows, whatever the model: it follows from their tokens and weights."""

    boundary: bool
    """Whether a row that counts has a boundary between two documents."""
    step_ratio: bool
    """Whether such a row has tokens elsewhere, too."""
    attention: bool
    """Whether a row that is asked for the weights by distance counts."""

    @classmethod
    def of(cls, rows: RowSet, weights_n: FloatArray, attention: Iterable[bool], eos_id: int) -> Asked:
        """Of rows with these weights in the mix, asked for weights by distance or not."""
        inputs = rows.tokens[:, :-1]
        boundary = np.zeros(inputs.shape, bool)
        boundary[:, :-1] = (inputs[:, :-1] == eos_id) & (inputs[:, 1:] != IGNORED_TOKEN)
        at_boundary = boundary.copy()
        at_boundary[:, 1:] |= boundary[:, :-1]
        counts = weights_n > 0
        has_boundary = boundary.any(axis=1) & counts
        return cls(
            boundary=bool(has_boundary.any()),
            step_ratio=bool((has_boundary & ~at_boundary.all(axis=1)).any()),
            attention=bool((np.array(list(attention)) & counts).any()),
        )
