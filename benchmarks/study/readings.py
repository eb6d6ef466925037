"""What a trained model is asked before its run ends; no model outlives its run.

Losses are means over targets in nats. A position's bin k holds the targets 2^(k-1) ... 2^k - 1 of a row (bin 0: the
first one). Shapes: n rows of L inputs and one more token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.study.data import EOS_ID, Rows, StudyData
from benchmarks.study.probes import all_probes
from nstrain.train.engine import EagerEngine
from nstrain.train.position_readings import document_losses

TOKENS_AT_ONCE = 65_536
PROBED_ROWS = 8
PROBE_TASK_ROWS = 32

Losses = npt.NDArray[np.float32]


def losses_of(engine: EagerEngine, rows: Rows) -> Losses:
    """The loss of every target of rows, [n, L], some rows at a time."""
    at_once = max(1, TOKENS_AT_ONCE // (rows.shape[1] - 1))
    return np.concatenate(
        [engine.token_losses(rows[first : first + at_once]) for first in range(0, len(rows), at_once)]
    )


def validation(engine: EagerEngine, data: StudyData) -> dict[str, Any]:
    """Loss by source, their mean, and loss by position in the row and in the document."""
    by_source = {source: losses_of(engine, rows) for source, rows in data.sources.items()}
    means = {source: float(losses.mean(dtype=np.float64)) for source, losses in by_source.items()}
    losses = np.concatenate(list(by_source.values())).astype(np.float64)
    rows = np.concatenate(list(data.sources.values()))
    documents = document_losses(losses, rows, EOS_ID, np.ones(len(rows)))
    prefix = f"val_{losses.shape[1]}/docpos/"
    return {
        "val": float(np.mean(list(means.values()))),
        "val_by_source": means,
        "val_by_position": by_position(losses),
        "val_by_document_position": {name.removeprefix(prefix): loss for name, loss in documents.items()},
    }


def by_position(losses: npt.NDArray[np.floating[Any]]) -> list[float]:
    """Mean loss of each bin of positions."""
    bins = np.frexp(np.arange(losses.shape[1]))[1]
    means = losses.mean(axis=0, dtype=np.float64)
    return [float(means[bins == k].mean()) for k in range(int(bins.max()) + 1)]


def long_rows(engine: EagerEngine, data: StudyData) -> dict[str, Any]:
    """Loss on rows beyond the training length, in all and by position."""
    found = {}
    for length, rows in data.long_rows.items():
        losses = losses_of(engine, rows)
        found[str(length)] = {"loss": float(losses.mean(dtype=np.float64)), "by_position": by_position(losses)}
    return found


def tasks(engine: EagerEngine, row_tokens: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Induction and recall."""
    probes = all_probes(row_tokens, PROBE_TASK_ROWS, vocabulary)
    return {probe.name: probe.score(losses_of(engine, probe.tokens)) for probe in probes}


def health(engine: EagerEngine, data: StudyData) -> dict[str, dict[str, float]]:
    """Quantiles of NeuronSpark's probe over (row, member) pairs of all layers, by reading (docs/reference/metrics.md).

    Empty for a model without a probe.
    """
    rows = np.concatenate([rows[:2] for rows in data.sources.values()])[:PROBED_ROWS]
    return quantiles(engine.probe(rows, EOS_ID, rows.shape[1] - 1, attention=False))


def quantiles(readings: Mapping[str, Mapping[str, npt.NDArray[np.floating[Any]]]]) -> dict[str, dict[str, float]]:
    """Least, median, greatest and mean of each reading over rows, members and layers; NaN marks rows without it."""
    values: dict[str, list[npt.NDArray[np.floating[Any]]]] = {}
    for of_part in readings.values():
        for name, found in of_part.items():
            values.setdefault(name, []).append(np.asarray(found, dtype=np.float64).reshape(-1))
    summary = {}
    for name, pieces in sorted(values.items()):
        together = np.concatenate(pieces)
        together = together[np.isfinite(together)]
        if len(together):
            least, median, greatest = np.quantile(together, (0.0, 0.5, 1.0), method="inverted_cdf")
            summary[name] = {
                "min": float(least), "p50": float(median), "max": float(greatest), "mean": float(together.mean())
            }  # fmt: skip
    if "dendritic/retention" in values:
        kept = np.concatenate(values["dendritic/retention"])
        summary["dendritic/retention"]["frac_gt_0.9"] = float((kept > 0.9).mean())
    return summary
