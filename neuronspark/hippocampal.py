"""The hippocampal layer: few heads with an explicit memory of the row's events, then a feed-forward of neurons.

The pool read (kernels/pool_read.py) is attention over addresses [q ; beta p_t] and [k ; p_{s-1}]: event s scores high
when what preceded it looks like now (the induction match). A product-key memory, in the layers that have one, adds what
it reads right after the pool (memory.py). Equations: the functions below, in order.

Shapes: B rows, L tokens, T = B L, d width, h heads of d_h channels, K trace channels, r match width, f feed-forward.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark import parameters
from neuronspark.config import ModelConfig
from neuronspark.kernels.addresses import addresses
from neuronspark.kernels.arbitration import arbitrate
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.pool_read import pool_read
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.trace_scan import trace_of_logits
from neuronspark.memory import add_memory
from neuronspark.neuron import excitatory_times, excitatory_times_signed, signed_of_norm, threshold_spec
from neuronspark.parameters import ParameterModule, ParameterSpec

CLOCK_BIAS = (-9.0, -4.0)
"""Clock bias of the first and last head: a clock step of 1e-4 to 2e-2 a token."""
WRITE_BIAS = 3.0
MATCH_GAIN = (0.5, 4.0)
TRACE_BIAS = (-4.0, 1.5)
"""Decay bias of the first and last trace channel: an e-fold of 55 tokens to 0.6 of one."""
COPY_BIAS = 2.0
NOVELTY_WEIGHT = 0.5
READ_GAIN_BIAS = 0.54
"""softplus(0.54) = 1: reads start at their own size."""
CONTROL_STD = 0.05
"""Standard deviation at the start of the clock's, tag's, copy's and gain's inputs, beside their biases."""
CONTROLS = 4


def hippocampal_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The parameters of one hippocampal layer."""
    d, heads, ffn, trace = config.width, config.pool_heads, config.ffn_width, config.trace_width
    addressed = d + trace
    out_scale = 1 / math.sqrt(2 * len(config.layers))

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> ParameterSpec:
        return ParameterSpec((outputs, inputs), "matrix", parameters.fan_in_normal(scale))

    def per_head(first: float, last: float) -> ParameterSpec:
        return ParameterSpec((heads,), "neuron", parameters.values(torch.linspace(first, last, heads)))

    return {
        "norm": ParameterSpec((d,), "norm", parameters.constant(1.0)),
        "w_trace": matrix(trace, d),
        "w_decay": matrix(trace, d),
        "decay_bias": ParameterSpec((trace,), "neuron", parameters.values(torch.linspace(*TRACE_BIAS, trace))),
        "w_q": matrix(d, addressed),
        "w_k": matrix(d, addressed),
        "w_p": matrix(config.match_width, addressed),
        "query_gain": per_head(1.0, 1.0),
        "match_gain": per_head(*MATCH_GAIN),
        "w_v": matrix(d, d),
        "w_control": matrix(CONTROLS * heads, d, CONTROL_STD),
        "clock_bias": per_head(*CLOCK_BIAS),
        "write_bias": per_head(WRITE_BIAS, WRITE_BIAS),
        "copy_bias": per_head(COPY_BIAS, COPY_BIAS),
        "novelty_weight": per_head(NOVELTY_WEIGHT, NOVELTY_WEIGHT),
        "read_gain_bias": per_head(READ_GAIN_BIAS, READ_GAIN_BIAS),
        "w_gate": matrix(d, d),
        "gate_log_threshold": threshold_spec(d, config),
        "w_o": matrix(d, d, out_scale),
        "ffn_norm": ParameterSpec((d,), "norm", parameters.constant(1.0)),
        "ffn_in_log_threshold": threshold_spec(d, config),
        "w_ffn_gate": matrix(ffn, d),
        "w_ffn_up": matrix(ffn, d),
        "ffn_gate_log_threshold": threshold_spec(ffn, config),
        "ffn_up_log_threshold": threshold_spec(ffn, config),
        "w_ffn_down": matrix(d, ffn, out_scale),
    }


class RowOperators(Protocol):
    """What a hippocampal layer does along its rows; all else it does to each token alone."""

    def trace(self, u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
        """The trace of u under the decays of logits: kernels/trace_scan.py."""

    def preceding(self, p_BLr: Tensor) -> Tensor | None:
        """Of projections p, that of the token before each row's first: [B, r], or None if there is none."""

    def read(
        self, query_BhLa: Tensor, key_BhLa: Tensor, v_BhLd: Tensor, clock_step_BhL: Tensor, log_write_BhL: Tensor
    ) -> Tensor:
        """What each token reads from its row's events so far: kernels/pool_read.py."""


class WholeRows:
    """The row operators over whole rows, as in training; decoding has others, which go on from a state."""

    trace = staticmethod(trace_of_logits)
    read = staticmethod(pool_read)

    @staticmethod
    def preceding(p_BLr: Tensor) -> None:
        """None: a row's first token has none before it."""


WHOLE_ROWS = WholeRows()


@dataclasses.dataclass(frozen=True)
class PoolEvents:
    """What a layer's tokens bring to its pool, and how each will use what it reads there."""

    x: Tensor
    """The layer's normalised input: [T, d]"""
    query: Tensor
    """[B, h, L, a]"""
    key: Tensor
    """[B, h, L, a]"""
    value: Tensor
    """[B, h, L, d_h]"""
    clock_step: Tensor
    """delta >= 0, at least fp32: [B, h, L]"""
    log_write: Tensor
    """The logarithm of the write tag, <= 0, at least fp32: [B, h, L]"""
    copy: Tensor
    """The comparator's copy input, before its bias: [B, h, L]"""
    gain: Tensor
    """The comparator's read gain input, before its bias: [B, h, L]"""
    gate: Tensor
    """The potentials of the gate's neurons: [T, d]"""


class HippocampalLayer(ParameterModule):
    """One hippocampal layer; its parameters are those of `hippocampal_specs`, and `memory_specs` if it has a memory."""

    def __init__(self, config: ModelConfig, has_memory: bool = False) -> None:
        super().__init__()
        self.config = config
        self.has_memory = has_memory

    def forward(self, h_Td: Tensor, row_tokens: int, rotary: Tensor, along: RowOperators = WHOLE_ROWS) -> Tensor:
        """The residual stream after the layer; T is a whole number of rows of `row_tokens` tokens."""
        events = self.events(h_Td, row_tokens, rotary, along)
        read_BhLd = along.read(events.query, events.key, events.value, events.clock_step, events.log_write)
        h_Td = self.respond(h_Td, events, read_BhLd)
        if self.has_memory:
            h_Td = add_memory(self, h_Td, events.x, self.config)
        _, gate_Tf, up_Tf = self.feed_forward_sides(h_Td)
        return self.feed_forward(h_Td, gate_Tf, up_Tf)

    def events(self, h_Td: Tensor, row_tokens: int, rotary: Tensor, along: RowOperators) -> PoolEvents:
        """The tokens' events: everything up to the pool read."""
        x_Td = rms_norm(h_Td, tapped(self.norm), self.config.norm_eps)
        trace_TK, decay_TK, v_Td, control, gate_Td = project(
            x_Td, self.w_trace, self.w_decay, self.w_v, self.w_control, self.w_gate
        )
        trace_TK = self._trace(trace_TK, decay_TK, row_tokens, along)
        query_BhLa, key_BhLa = self._addresses(torch.cat((x_Td, trace_TK), 1), row_tokens, rotary, along)
        v_BhLd = self._heads(v_Td, row_tokens).transpose(1, 2).contiguous()
        clock, write, copy, gain = (
            at_least_fp32(control).view(-1, row_tokens, CONTROLS, self.config.pool_heads).permute(2, 0, 3, 1).unbind(0)
        )
        clock_step_BhL = functional.softplus(clock + tapped(self.clock_bias)[:, None])
        log_write_BhL = functional.logsigmoid(write + tapped(self.write_bias)[:, None])
        return PoolEvents(x_Td, query_BhLa, key_BhLa, v_BhLd, clock_step_BhL, log_write_BhL, copy, gain, gate_Td)

    def respond(self, h_Td: Tensor, events: PoolEvents, read_BhLd: Tensor) -> Tensor:
        """The residual stream with what the tokens make of their reads: h + W_o (neuron(gate) * mixed)."""
        biases = tapped(self.copy_bias), tapped(self.novelty_weight), tapped(self.read_gain_bias)
        mixed_Td = arbitrate(read_BhLd, events.value, events.copy, events.gain, *biases)
        gated_Td = excitatory_times(events.gate, self.gate_log_threshold, mixed_Td, self.config)
        return project_onto(h_Td, gated_Td, self.w_o)

    def feed_forward_sides(self, h_Td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s = neuron(RMSNorm(h)), signed, [T, d], and the potentials of the gate and up neurons, W s, [T, f] each."""
        s_Td = signed_of_norm(h_Td, self.ffn_norm, self.ffn_in_log_threshold, self.config)
        gate_Tf, up_Tf = project(s_Td, self.w_ffn_gate, self.w_ffn_up)
        return s_Td, gate_Tf, up_Tf

    def feed_forward(self, h_Td: Tensor, gate_Tf: Tensor, up_Tf: Tensor) -> Tensor:
        """h + W_down (neuron(gate) * neuron(up)); the up side is signed."""
        fired_Tf = excitatory_times_signed(
            gate_Tf, self.ffn_gate_log_threshold, up_Tf, self.ffn_up_log_threshold, self.config
        )
        return project_onto(h_Td, fired_Tf, self.w_ffn_down)

    def _heads(self, x_Td: Tensor, row_tokens: int) -> Tensor:
        """[T, d] -> [B, L, h, d_h]."""
        return x_Td.view(-1, row_tokens, self.config.pool_heads, self.config.pool_head_width)

    def _trace(self, trace_TK: Tensor, decay_TK: Tensor, row_tokens: int, along: RowOperators) -> Tensor:
        """c_t = lambda_t c_{t-1} + (1 - lambda_t) W_c x_t with log lambda = -softplus(W_decay x + bias)."""
        by_row = (-1, row_tokens)
        bias_K = tapped(self.decay_bias)
        return along.trace(trace_TK.unflatten(0, by_row), decay_TK.unflatten(0, by_row), bias_K).flatten(0, 1)

    def _addresses(self, xc_Te: Tensor, row_tokens: int, rotary: Tensor, along: RowOperators) -> tuple[Tensor, Tensor]:
        """Queries and keys of the pool read, both [B, h, L, d_h + r], from [x ; c]: kernels/addresses.py."""
        q_Td, k_Td, p_Tr = project(xc_Te, self.w_q, self.w_k, self.w_p)
        gains = tapped(self.query_gain), tapped(self.match_gain)
        before_Br = along.preceding(p_Tr.unflatten(0, (-1, row_tokens)))
        return addresses(q_Td, k_Td, p_Tr, *gains, rotary, row_tokens, self.config.norm_eps, before_Br)
