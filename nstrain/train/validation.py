"""Validation: the loss of each source on its held-out rows, and two means of them.

    val_<L>/<source>   sum over the source's rows of weight * mean loss of the row (weights of a source sum to 1)
    val_<L>/mix        these weighted by the recipe of the cycle being trained
    val_<L>/mean       their plain mean

L is the row length. The engine's training state is not touched: the update after a validation has the bits it would
have had without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nstrain.base.errors import Refusal
from nstrain.train.engine import Engine, micro_batches


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


def validate(
    engine: Engine, rows: Sequence[HeldOutRow], micro_rows: int, recipe: Mapping[str, int]
) -> dict[str, float]:
    """Readings by name. `recipe` holds the shares of the sources in /mix.

    Raises `Refusal` if a source of the recipe has no held-out row.
    """
    tokens = np.stack([row.tokens for row in rows])
    losses = np.concatenate([engine.row_losses(batch) for batch in micro_batches(tokens, micro_rows)])
    by_source: dict[str, list[float]] = {}
    for row, loss in zip(rows, losses, strict=True):
        by_source.setdefault(row.source, []).append(row.weight * float(loss))
    return source_readings(
        tokens.shape[1] - 1, {source: math.fsum(parts) for source, parts in by_source.items()}, recipe
    )


def source_readings(row_tokens: int, losses: Mapping[str, float], recipe: Mapping[str, int]) -> dict[str, float]:
    """The readings of a validation from the sources' losses."""
    for source in recipe:
        if source not in losses:
            raise Refusal(f"source {source!r} of the recipe has no held-out row; run `nstrain data val` again")
    mix = math.fsum(share * losses[source] for source, share in recipe.items()) / sum(recipe.values())
    prefix = f"val_{row_tokens}"
    return {
        **{f"{prefix}/{source}": loss for source, loss in losses.items()},
        f"{prefix}/mix": mix,
        f"{prefix}/mean": math.fsum(losses.values()) / len(losses),
    }
