"""An update's row: its readings under the names that the journal, plots and mirrors know (docs/reference/metrics.md).

Everything that depends on the clock or the machine is named time/... or perf/...; all else is equal in two runs of one
line. A change of names, conditions or formulas raises `nstrain.settings.run.METRICS_VERSION`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nstrain.train.engine import UpdateReadings
from nstrain.train.plan import Update

Row = dict[str, float]
"""Ints and floats by name; update and generation are the journal's key and not in it."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the schedules gave an update."""

    learning_rate: float
    weight_decay: float


def start_row(cycle: int, row_tokens: int) -> Row:
    """The row of update 0: the state before any training; the first validation's readings are added to it."""
    return {"tokens": 0, "cycle": cycle, "row_tokens": row_tokens, "rows": 0, "skipped": 0, "smaller": 0}


def update_row(
    update: Update, readings: UpdateReadings, rates: Rates, rows_by_source: Mapping[str, int], update_s: float
) -> Row:
    """The row of a trained (or skipped) update, which took `update_s` seconds with the reading of its rows."""
    return {
        "tokens": update.tokens_after,
        "cycle": update.cycle,
        "row_tokens": update.row_tokens,
        "rows": update.rows,
        "skipped": int(readings.skipped),
        "smaller": int(update.smaller),
        "train/loss": readings.loss,
        **{f"train/loss/{term}": value for term, value in readings.terms.items()},
        "train/grad_norm": readings.grad_norm,
        **{f"train/grad_norm/{part}": norm for part, norm in readings.part_norms.items()},
        **{f"train/grad_norm/group/{group}": norm for group, norm in readings.group_norms.items()},
        "train/learning_rate": rates.learning_rate,
        "train/weight_decay": rates.weight_decay,
        **{f"train/rows/{source}": rows for source, rows in rows_by_source.items()},
        "time/update_s": update_s,
        "perf/tokens_per_s": update.tokens / update_s,
    }
