"""What a hippocampal layer reveals: its trace, clock and tags, where its heads look, the comparator, memory and firing.

Means are over a row's tokens; [B, h] for the h heads unless said otherwise.

    decay_tau       1 / mean(-log lambda) tokens, [B, K] for the trace's K channels
    clock_tau       1 / mean(delta) tokens; clock_boundary_step_ratio  mean delta at boundaries / mean delta elsewhere
    write           mean write tag w
    rope_ext_q, _k  the share of the queries' (keys') energy in rotary pairs whose wavelength, 2 pi base^(2i/d) tokens,
                    exceeds the training length; after norm and turn, so every token counts the same and a query gain
                    nothing. rope_ext_pairs_frac: how many of the pairs those are, as a share; one number a model
    copy_pi, novelty, read_gain         the comparator's pi, nu and g, means
    pkm_entropy     mean entropy in nats of a memory head's weights over the slots it reads, [B, memory heads]
    pkm_slots_used  how many different slots the row's tokens read, over all memory heads, [B, 1]
    pkm_gate        mean gate, [B, 1]
    gate_firing, ffn_in_firing, ffn_gate_firing, ffn_up_firing    shares of tokens and channels that release, [B, 1]
    attn_...        probe_attention.py

Shapes: B rows, L tokens, T = B L, h heads of d channels, K trace channels, f feed-forward, n slots a token reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from neuronspark.config import ModelConfig
from neuronspark.hippocampal import HippocampalLayer, PoolEvents, WholeRows
from neuronspark.kernels.arbitration import compare
from neuronspark.kernels.gradient import at_least_fp32
from neuronspark.kernels.trace_scan import log_decay
from neuronspark.memory import address_memory, answer_memory
from neuronspark.neuron import excitatory, signed
from neuronspark.probe_attention import probe_attention
from neuronspark.probe_rows import PartReadings, ProbedRows, fired_counts, firing

HIPPOCAMPAL_READINGS = (
    "hippocampal/decay_tau",
    "hippocampal/clock_tau",
    "hippocampal/clock_boundary_step_ratio",
    "hippocampal/write",
    "hippocampal/rope_ext_q",
    "hippocampal/rope_ext_k",
    "hippocampal/copy_pi",
    "hippocampal/novelty",
    "hippocampal/read_gain",
    "hippocampal/gate_firing",
    "hippocampal/ffn_in_firing",
    "hippocampal/ffn_gate_firing",
    "hippocampal/ffn_up_firing",
)
LONG_HIPPOCAMPAL_READINGS = (
    "hippocampal/gate_firing_seg<k>",
    "hippocampal/ffn_in_firing_seg<k>",
    "hippocampal/ffn_gate_firing_seg<k>",
    "hippocampal/ffn_up_firing_seg<k>",
)
"""On rows longer than the training length only."""
MEMORY_READINGS = ("hippocampal/pkm_entropy", "hippocampal/pkm_slots_used", "hippocampal/pkm_gate")


class _ProbedRowOperators(WholeRows):
    """The row operators of training; `decay_tau_BK` is what the trace's decays were."""

    def __init__(self, rows: ProbedRows) -> None:
        self._rows = rows
        self.decay_tau_BK = torch.empty(0)

    def trace(self, u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
        """The trace; the means of its log decays are kept."""
        self.decay_tau_BK = 1 / self._rows.mean(lambda at: -log_decay(logit_BLK[:, at], bias_K))
        return WholeRows.trace(u_BLK, logit_BLK, bias_K)


def probe_hippocampal(
    layer: HippocampalLayer, h_Td: Tensor, rotary: Tensor, rows: ProbedRows, attention: bool
) -> tuple[Tensor, PartReadings]:
    """The residual stream after the layer, with the bits of its forward, and the layer's readings.

    Without `attention` those of probe_attention.py are left out.
    """
    config = layer.config
    along = _ProbedRowOperators(rows)
    events = layer.events(h_Td, rows.row_tokens, rotary, along)
    read_BhLd = along.read(events.query, events.key, events.value, events.clock_step, events.log_write)
    readings = {
        "hippocampal/decay_tau": along.decay_tau_BK,
        **_pool_readings(events, config, rows),
        **_comparator_readings(layer, events, read_BhLd, rows),
    }
    if attention:
        addresses = events.query, events.key
        readings |= probe_attention(*addresses, events.clock_step, events.log_write, rows)
    h_Td = layer.respond(h_Td, events, read_BhLd)
    gate = functools.partial(excitatory, log_threshold_C=layer.gate_log_threshold, config=config)
    readings |= _firing(rows, "gate", events.gate, gate)
    if layer.has_memory:
        slots_Thk, weights_Thk, gate_T = address_memory(layer, events.x, config)
        readings |= memory_readings(slots_Thk, weights_Thk, gate_T, rows)
        h_Td = answer_memory(layer, h_Td, slots_Thk, weights_Thk, gate_T)
    s_Td, gate_Tf, up_Tf = layer.feed_forward_sides(h_Td)
    ffn_gate = functools.partial(excitatory, log_threshold_C=layer.ffn_gate_log_threshold, config=config)
    ffn_up = functools.partial(signed, log_threshold_C=layer.ffn_up_log_threshold, config=config)
    readings |= _firing(rows, "ffn_in", s_Td)
    readings |= _firing(rows, "ffn_gate", gate_Tf, ffn_gate)
    readings |= _firing(rows, "ffn_up", up_Tf, ffn_up)
    return layer.feed_forward(h_Td, gate_Tf, up_Tf), readings


def _firing(
    rows: ProbedRows, name: str, u_TC: Tensor, neuron: Callable[[Tensor], Tensor] | None = None
) -> PartReadings:
    """The firing of `neuron(u)`, or of u if it was released already."""
    return firing(rows, f"hippocampal/{name}_firing", fired_counts(u_TC, neuron), u_TC.shape[1])


def _pool_readings(events: PoolEvents, config: ModelConfig, rows: ProbedRows) -> PartReadings:
    """Clock, write tags, and the energy in slow rotary pairs."""
    step_BLh, log_write_BLh = events.clock_step.transpose(1, 2), events.log_write.transpose(1, 2)
    extended = extended_pairs(config, rows.train_length)
    width = config.pool_head_width
    return {
        "hippocampal/clock_tau": 1 / rows.mean(lambda at: step_BLh[:, at]),
        "hippocampal/clock_boundary_step_ratio": rows.boundary_ratio(step_BLh),
        "hippocampal/write": rows.mean(lambda at: log_write_BLh[:, at].exp()),
        "hippocampal/rope_ext_q": _energy_share(events.query[..., :width], extended, rows),
        "hippocampal/rope_ext_k": _energy_share(events.key[..., :width], extended, rows),
    }


def extended_pairs(config: ModelConfig, train_length: int) -> range:
    """The rotary pairs whose wavelength exceeds the training length; they follow each other."""
    pairs = config.pool_head_width // 2
    found = [i for i in range(pairs) if 2 * math.pi * config.rope_base ** (i / pairs) > train_length]
    return range(found[0], found[-1] + 1) if found else range(0)


def _energy_share(x_BhLd: Tensor, pairs: range, rows: ProbedRows) -> Tensor:
    """The share of the energy of queries or keys in these pairs: [B, h]. Pair i is channels i and i + d/2."""
    all_pairs = range(x_BhLd.shape[3] // 2)

    def energies(at: slice, pairs: range) -> Tensor:
        by_half = x_BhLd[:, :, at].unflatten(3, (2, -1))[..., pairs.start : pairs.stop]
        return torch.linalg.vector_norm(at_least_fp32(by_half), dim=(3, 4)).square_().transpose(1, 2)

    return rows.total(lambda at: energies(at, pairs)) / rows.total(lambda at: energies(at, all_pairs))


def _comparator_readings(
    layer: HippocampalLayer, events: PoolEvents, read_BhLd: Tensor, rows: ProbedRows
) -> PartReadings:
    """Means of pi, nu and g."""

    def novelty_pi_gain(at: slice) -> Tensor:
        vectors = read_BhLd[:, :, at], events.value[:, :, at]
        inputs = events.copy[..., at], events.gain[..., at]
        found = compare(*vectors, *inputs, layer.copy_bias, layer.novelty_weight, layer.read_gain_bias)
        return torch.cat(found, 1).transpose(1, 2)

    novelty_Bh, pi_Bh, gain_Bh = rows.mean(novelty_pi_gain).chunk(3, 1)
    return {"hippocampal/copy_pi": pi_Bh, "hippocampal/novelty": novelty_Bh, "hippocampal/read_gain": gain_Bh}


def memory_readings(slots_Thk: Tensor, weights_Thk: Tensor, gate_T: Tensor, rows: ProbedRows) -> PartReadings:
    """The readings of a memory's slots, weights and gate, as `memory.address_memory` gives them."""
    by_row = (rows.rows, rows.row_tokens)
    weights_BLhk, gate_BL1 = weights_Thk.unflatten(0, by_row), gate_T.view(*by_row, 1)
    in_order_Bn = slots_Thk.view(rows.rows, -1).sort(1).values
    used_B1 = 1 + (in_order_Bn[:, 1:] != in_order_Bn[:, :-1]).sum(1, keepdim=True)
    return {
        "hippocampal/pkm_entropy": rows.mean(lambda at: torch.special.entr(weights_BLhk[:, at]).sum(3)),
        "hippocampal/pkm_slots_used": used_B1.double(),
        "hippocampal/pkm_gate": rows.mean(lambda at: gate_BL1[:, at]),
    }
