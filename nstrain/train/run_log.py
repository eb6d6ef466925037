"""A row of readings as run.log prints it: a line for its training, a block for its validation, its alarms.

A validation has hundreds of readings; printed are the losses and the few that say most about each kind of layer. All
are in the journal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from nstrain.base.units import human_count
from nstrain.record.alarms import in_short

Row = Mapping[str, float]

KEY_READINGS = {
    "dendritic": ("tau_p50", "tau_p90", "tau_max", "retention_p50", "retention_frac_gt_0.9",
                  "boundary_step_ratio_p50", "firing"),
    "hippocampal": ("decay_tau_p50", "clock_tau_p50", "write_p50", "attn_mean_log2_p50", "attn_beyond_train_p50",
                    "copy_pi", "read_gain", "pkm_slots_used", "gate_firing"),
}  # fmt: skip
"""The readings of each kind of layer, over the model, that are printed where they are there."""


def printed(update: int, row: Row, alarms: Sequence[str] = ()) -> str:
    """A row for people: a line for training, more if it holds a validation, one for each of the first alarms."""
    alarm_lines = [f"  ALARM {alarm}" for alarm in in_short(list(alarms))]
    return "\n".join([_of_training(update, row), *validation_lines(row), *alarm_lines])


def validation_lines(row: Row) -> list[str]:
    """What a validation says in short, as indented lines; none for a row without one."""
    return [f"  {name:<22}{text}" for name, text in validation_block(row)]


def _of_training(update: int, row: Row) -> str:
    parts = [f"u{update}", f"{human_count(row['tokens'])} tokens", f"cycle {row['cycle']}"]
    if "train/loss" in row:
        parts += [
            f"loss {_number(row['train/loss'])}",
            f"grad norm {_number(row['train/grad_norm'])}",
            f"rate {row['train/learning_rate']:.3g}",
            f"{human_count(row['perf/tokens_per_s'])} tokens/s",
        ]
    if row["smaller"]:
        parts.append("smaller: the cycle's last rows")
    if row["skipped"]:
        parts.append("SKIPPED: the gradient norm is not finite")
    return "  ".join(parts)


def validation_block(row: Row) -> list[tuple[str, str]]:
    """What a validation says in short: lines of what each is about, and its text."""
    lines = []
    lengths = sorted({int(found[1]) for name in row if (found := re.match(r"(?:ema/)?val_(\d+)/", name))})
    for row_tokens in lengths:
        for kind, prefix in (("rows", f"val_{row_tokens}/"), ("average", f"ema/val_{row_tokens}/")):
            if losses := _losses(row, prefix):
                lines.append((f"{row_tokens:,}-token {kind}", losses))
        for kind, names in KEY_READINGS.items():
            readings = [(name, row.get(f"val_{row_tokens}/{kind}/{name}")) for name in names]
            if text := "  ".join(f"{_name(name)} {_short(value)}" for name, value in readings if value is not None):
                lines.append((f"  {kind}", text))
    ratios = {name.split("/")[1]: v for name, v in row.items() if re.fullmatch(r"opt/\w+/update_ratio", name)}
    groups = [f"{name} {value:.2g}" for name, value in ratios.items() if not name.startswith("layer")]
    if groups:
        lines.append(("step / weights", "  ".join(groups)))
    if "time/validation_s" in row:
        parts = [("probes", "probe"), ("long rows", "long"), ("average", "ema")]
        seconds = [(what, row.get(f"time/validation_{name}_s", 0.0)) for what, name in parts]
        some = ", ".join(f"{what} {value:.1f}" for what, value in seconds if value)
        more = sum(name.startswith(("val_", "ema/", "opt/")) for name in row)
        lines.append(("validation", f"{row['time/validation_s']:.1f} s{some and f' ({some})'}, {more:,} readings"))
    return lines


def _losses(row: Row, prefix: str) -> str:
    """The losses of one row length: the mix, the mean, the sources, and the end of the row over its beginning."""
    names = [name for name in row if name.startswith(prefix) and "/" not in name.removeprefix(prefix)]
    names.sort(key=lambda name: {"mix": 0, "mean": 1}.get(name.removeprefix(prefix), 2))  # sources in their own order
    texts = [f"{name.removeprefix(prefix)} {_number(row[name])}" for name in names]
    ratio = row.get(f"{prefix}pos/last_over_first")
    return "  ".join(texts + ([] if ratio is None else [f"last/first segment {ratio:.3f}"]))


def _name(reading: str) -> str:
    """A reading's name in words."""
    return reading.replace("_frac_gt_", " > ").replace("_", " ")


def _short(value: float) -> str:
    """Three digits, large numbers as counts."""
    return human_count(value) if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)
