"""What a dendritic layer reveals: how long its heads keep their potentials, whether they flush at boundaries, firing.

All but the firing are functions of the log decays a_t = A dt_t that the recurrence runs on. With S = a_2 + ... + a_L,
what the row's first token left decays by after its last:

    retention               exp(S)
    retention32k            exp(32768 S / (L - 1)): the same over 32,768 tokens of the row's average decay
    tau                     (L - 1) / |S| tokens; infinite for a head that never decays
    retention_seg<k>        exp(a_2 + ... up to the end of segment k of the training length)
    boundary_retention      the mean over the row's boundaries of exp(a_e + a_{e+1})
    boundary_step_ratio     mean dt of the boundaries' tokens / mean dt elsewhere; A is one number a head and leaves it

Shapes: T = B L tokens, H heads, I inner channels; every reading of a head is [B, H].
"""

from __future__ import annotations

from torch import Tensor

from neuronspark.dendritic import DendriticLayer
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.linear import project_onto
from neuronspark.probe_rows import PartReadings, ProbedRows, fired_counts, firing

LONG_TOKENS = 32_768
"""The length that `retention32k` speaks of."""

DENDRITIC_READINGS = (
    "dendritic/retention",
    "dendritic/retention32k",
    "dendritic/tau",
    "dendritic/boundary_retention",
    "dendritic/boundary_step_ratio",
    "dendritic/firing",
)
LONG_DENDRITIC_READINGS = ("dendritic/retention_seg<k>", "dendritic/firing_seg<k>")
"""On rows longer than the training length only."""


def probe_dendritic(layer: DendriticLayer, h_Td: Tensor, rows: ProbedRows) -> tuple[Tensor, PartReadings]:
    """The residual stream after the layer, with the bits of its forward, and the layer's readings."""
    readings: PartReadings = {}

    def scan(v_BLHP: Tensor, log_decay_BLH: Tensor, *others: Tensor) -> Tensor:
        readings.update(decay_readings(log_decay_BLH, rows))
        return dendritic_scan(v_BLHP, log_decay_BLH, *others)

    s_TI = layer.spikes(h_Td, rows.row_tokens, scan)
    readings |= firing(rows, "dendritic/firing", fired_counts(s_TI), s_TI.shape[1])
    return project_onto(h_Td, s_TI, layer.w_out), readings


def decay_readings(log_decay_BLH: Tensor, rows: ProbedRows) -> PartReadings:
    """All readings of log decays a_t = A dt_t <= 0 of rows of at least two tokens."""
    decayed_BH = log_decay_BLH.new_zeros(log_decay_BLH.shape[0], log_decay_BLH.shape[2]).double()
    by_segment: PartReadings = {}
    for k, (first, end) in enumerate(rows.segments):
        if end > 1:  # the first token's own decay multiplies an empty state
            decayed_BH = decayed_BH + rows.total(lambda at: log_decay_BLH[:, at], max(first, 1), end)
        by_segment[f"dendritic/retention_seg{k}"] = decayed_BH.exp()
    steps = rows.row_tokens - 1
    kept_BH = rows.total(lambda at: _kept_across(log_decay_BLH, rows.boundary, at), 0, steps)
    return {
        "dendritic/retention": decayed_BH.exp(),
        "dendritic/retention32k": (decayed_BH * (LONG_TOKENS / steps)).exp(),
        "dendritic/tau": steps / decayed_BH.abs(),
        "dendritic/boundary_retention": kept_BH / rows.boundaries,
        "dendritic/boundary_step_ratio": rows.boundary_ratio(log_decay_BLH),
        **(by_segment if rows.is_long else {}),
    }


def _kept_across(log_decay_BLH: Tensor, boundary_BL: Tensor, at: slice) -> Tensor:
    """exp(a_t + a_{t+1}) where t is a boundary's EOS, else 0, for a block of tokens t: [B, b, H]."""
    both_BbH = log_decay_BLH[:, at] + log_decay_BLH[:, at.start + 1 : at.stop + 1]
    return both_BbH.exp_() * boundary_BL[:, at, None]
