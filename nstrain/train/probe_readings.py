"""From a model's probe to an update's row: which statistic of which reading, over which pairs, weighted how.

A probe gives, by part and reading, a number for every row and member (head, channel, bin's head, or whole layer). A
statistic is over the (row, member) pairs: of one layer for val_<L>/<kind>/<layer>/..., of all layers together for
val_<L>/<kind>/.... A pair has its row's weight, which is what the row counts in val_<L>/mix. Formulas of the readings:
docs/reference/metrics.md.

A quantile is the smallest value that at least that share of the weight does not exceed: always a value that occurs,
whatever the order of the pairs. A row without a boundary has no reading at boundaries: all its members are NaN, and its
pairs are left out. Any other NaN makes the statistic NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nstrain.base.errors import Refusal
from nstrain.record.alarms import NEURONS

FloatArray = npt.NDArray[np.float64]
Statistic = Callable[[FloatArray, FloatArray], float]
"""Of values and their weights > 0, of one shape, at least one."""

ROWS_PART = "rows"
"""The part of a probe that holds what belongs to the rows and to no layer."""


# --- statistics ----------------------------------------------------------------------------------------------


def weighted_quantile(values: FloatArray, weights: FloatArray, share: float) -> float:
    """The smallest value that at least `share` of the weight does not exceed; NaN if any value is."""
    if np.isnan(values).any():
        return float("nan")
    order = np.lexsort((weights, values))  # by value, equal ones by weight: the sums do not depend on the order given
    reached = np.cumsum(weights[order])
    # The tolerance is for a sum of weights that rounding leaves a hair below the share it is.
    index = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12)))
    return float(values[order][min(index, values.size - 1)])


def weighted_mean(values: FloatArray, weights: FloatArray) -> float:
    """sum of weight * value / sum of weights."""
    return float((values * weights).sum() / weights.sum())


def fraction_above(values: FloatArray, weights: FloatArray, bound: float) -> float:
    """The share of the weight on values above a bound; NaN if any value is."""
    if np.isnan(values).any():
        return float("nan")
    return float(weights[values > bound].sum() / weights.sum())


def largest(values: FloatArray, weights: FloatArray) -> float:
    """The largest value; NaN if any is."""
    return float(values.max())


def total(values: FloatArray, weights: FloatArray) -> float:
    """The plain sum: a count."""
    return float(values.sum())


P50 = functools.partial(weighted_quantile, share=0.5)
P90 = functools.partial(weighted_quantile, share=0.9)


# --- which statistics a reading has ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of one reading."""

    unit: str
    """Of a row and member; of a fraction of the weight, whatever the reading, it is "share"."""
    statistics: Mapping[str, Statistic]
    """By what is added to the reading's name; nothing is added for ''."""
    of_head: Statistic | None = None
    """Over a head's rows, for <reading>_head<h> of each layer; None: heads are not listed."""
    may_lack: bool = False
    """Whether rows may lack the reading: such a row's members are all NaN."""
    of_rows: bool = False
    """Whether it belongs to the rows and to no layer."""


_MEAN: Mapping[str, Statistic] = {"": weighted_mean}
_P50_MAX: Mapping[str, Statistic] = {"_p50": P50, "_max": largest}
_P50_P90_MAX: Mapping[str, Statistic] = {"_p50": P50, "_p90": P90, "_max": largest}
_ABOVE_HALF: Mapping[str, Statistic] = {"_frac_gt_0.5": functools.partial(fraction_above, bound=0.5)}
_ABOVE_90: Mapping[str, Statistic] = {"_frac_gt_0.9": functools.partial(fraction_above, bound=0.9)}


def _of_heads(unit: str) -> Rule:
    return Rule(unit, _P50_MAX, of_head=weighted_mean)


RULES: Mapping[str, Rule] = {
    "dendritic/retention": Rule("share", {**_P50_MAX, **_ABOVE_90, **_ABOVE_HALF}),
    "dendritic/retention32k": Rule("share", _ABOVE_HALF),
    "dendritic/retention_seg<k>": Rule("share", _P50_MAX),
    "dendritic/tau": Rule("tokens", _P50_P90_MAX),
    "dendritic/boundaries": Rule("count", {"": total}, of_rows=True),
    "dendritic/boundary_retention": Rule("share", _P50_MAX, may_lack=True),
    "dendritic/boundary_step_ratio": Rule("ratio", _P50_MAX, may_lack=True),
    "hippocampal/decay_tau": Rule("tokens", _P50_P90_MAX),
    "hippocampal/clock_tau": Rule("tokens", _P50_MAX, of_head=P50),
    "hippocampal/clock_boundary_step_ratio": Rule("ratio", {"": P50}, may_lack=True),
    "hippocampal/write": _of_heads("0 ... 1"),
    "hippocampal/rope_ext_q": _of_heads("share"),
    "hippocampal/rope_ext_k": _of_heads("share"),
    "hippocampal/rope_ext_pairs_frac": Rule("share", _MEAN, of_rows=True),
    "hippocampal/copy_pi": Rule("0 ... 1", _MEAN),
    "hippocampal/novelty": Rule("0 ... 1", _MEAN),
    "hippocampal/read_gain": Rule("factor", _MEAN),
    "hippocampal/pkm_entropy": Rule("nats", _MEAN),
    "hippocampal/pkm_slots_used": Rule("slots", _MEAN),
    "hippocampal/pkm_gate": Rule("0 ... 1", _MEAN),
    "hippocampal/attn_dist_bin<k>": Rule("share", _MEAN),
    "hippocampal/attn_beyond_train": _of_heads("share"),
    "hippocampal/attn_mean_log2": _of_heads("log2 tokens"),
    "hippocampal/attn_entropy": _of_heads("nats"),
    **dict.fromkeys(NEURONS, Rule("share", _MEAN)),
    **{f"{name}_seg<k>": Rule("share", _MEAN) for name in NEURONS},
}
"""By the reading's name; <k> is the number of a segment or bin."""


def rule_of(reading: str) -> Rule:
    """The rule of a reading, whose bin's or segment's number may be any. Raises `Refusal` if it has none."""
    rule = RULES.get(re.sub(r"(_seg|_bin)\d+$", r"\1<k>", reading))
    if rule is None:
        raise Refusal(
            f"the model's probe gives {reading!r}, which has no rule in nstrain/train/probe_readings.py; add one there "
            "that says which statistics of it belong into the journal"
        )
    return rule


# --- rows --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProbedBatch:
    """What a model's probe says of some rows. A reading may be missing from some batches: it was not asked of them."""

    readings: Mapping[str, Mapping[str, FloatArray]]
    """By part and name: [rows, members]."""
    weights: FloatArray
    """Of each row; 0 leaves a row out (padding)."""


def probe_row(batches: Sequence[ProbedBatch], row_tokens: int) -> dict[str, float]:
    """The readings for the journal, by name. Raises `Refusal` for a reading without a rule."""
    pairs: dict[str, dict[str, tuple[FloatArray, FloatArray]]] = {}
    for part, name in _in_order(batches):
        values, weights = _gather(batches, part, name)
        having = ~np.isnan(values).all(axis=1) if rule_of(name).may_lack else slice(None)
        pairs.setdefault(name, {})[part] = values[having], weights[having]
    row: dict[str, float] = {}
    for name, by_part in pairs.items():
        rule, (kind, _, reading) = rule_of(name), name.partition("/")
        prefix = f"val_{row_tokens}/{kind}"
        together = [np.concatenate([_flat(*pair)[which] for pair in by_part.values()]) for which in (0, 1)]
        row |= _statistics(f"{prefix}/{reading}", rule, together[0], together[1])
        for part, (values, weights) in by_part.items():
            if part == ROWS_PART:
                continue
            row |= _statistics(f"{prefix}/{part}/{reading}", rule, *_flat(values, weights))
            if rule.of_head is not None and weights.size:
                for head, of_rows in enumerate(values.T):
                    row[f"{prefix}/{part}/{reading}_head{head}"] = rule.of_head(of_rows, weights)
    return row


def _in_order(batches: Sequence[ProbedBatch]) -> dict[tuple[str, str], None]:
    """Every (part, name) of the batches, in the order they first appear."""
    return {(part, name): None for batch in batches for part, readings in batch.readings.items() for name in readings}


def _gather(batches: Sequence[ProbedBatch], part: str, name: str) -> tuple[FloatArray, FloatArray]:
    """The values [rows, members] of the batches that have a reading, and the rows' weights, all > 0."""
    having = [batch for batch in batches if name in batch.readings.get(part, {})]
    values = np.concatenate([np.asarray(batch.readings[part][name], np.float64) for batch in having])
    weights = np.concatenate([batch.weights for batch in having])
    return values[weights > 0], weights[weights > 0]


def _flat(values: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The (row, member) pairs: values and weights of one length."""
    return values.reshape(-1), np.repeat(weights, values.shape[1])


def _statistics(name: str, rule: Rule, values: FloatArray, weights: FloatArray) -> dict[str, float]:
    if not values.size:
        return {}
    return {name + suffix: statistic(values, weights) for suffix, statistic in rule.statistics.items()}
