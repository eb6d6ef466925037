"""The hippocampal layer: few heads with an explicit memory of the row's events, then a feed-forward of neurons.

The pool read (kernels/pool_read.py) is attention over addresses [q ; beta p_t] and [k ; p_{s-1}]: event s scores high
when what preceded it looks like now (the induction match). Equations: the functions below, in order.

Shapes: B rows, L tokens, T = B L, d width, h heads of d_h channels, K trace channels, r match width, f feed-forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark import parameters
from neuronspark.config import ModelConfig
from neuronspark.kernels.arbitration import blend, cosine
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.pool_read import pool_read
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.rotary import rotary_norm
from neuronspark.kernels.trace_scan import trace_scan
from neuronspark.neuron import excitatory, signed, threshold_spec
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
QUERY_SHARPNESS = 4.0
MATCH_SHARPNESS = 2.0
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


class HippocampalLayer(ParameterModule):
    """One hippocampal layer; its parameters are those of `hippocampal_specs`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, h_Td: Tensor, row_tokens: int, rotary: Tensor) -> Tensor:
        """The residual stream after the layer; T is a whole number of rows of `row_tokens` tokens."""
        x_Td = rms_norm(h_Td, tapped(self.norm), self.config.norm_eps)
        trace_TK, decay_TK, v_Td, control, gate_Td = project(
            x_Td, self.w_trace, self.w_decay, self.w_v, self.w_control, self.w_gate
        )
        trace_TK = self._trace(trace_TK, decay_TK, row_tokens)
        query_BhLa, key_BhLa = self._addresses(torch.cat((x_Td, trace_TK), 1), row_tokens, rotary)
        v_BhLd = self._heads(v_Td, row_tokens).transpose(1, 2).contiguous()
        clock, write, copy, gain = (
            at_least_fp32(control).view(-1, row_tokens, CONTROLS, self.config.pool_heads).permute(2, 0, 3, 1).unbind(0)
        )
        clock_step_BhL = functional.softplus(clock + tapped(self.clock_bias)[:, None])
        log_write_BhL = functional.logsigmoid(write + tapped(self.write_bias)[:, None])
        read_BhLd = pool_read(query_BhLa, key_BhLa, v_BhLd, clock_step_BhL, log_write_BhL)
        mixed_Td = self._arbitrate(read_BhLd, v_BhLd, copy, gain)
        gate_Td = excitatory(gate_Td, self.gate_log_threshold, self.config)
        h_Td = project_onto(h_Td, gate_Td * mixed_Td, self.w_o)
        return self._feed_forward(h_Td)

    def _heads(self, x_Td: Tensor, row_tokens: int) -> Tensor:
        """[T, d] -> [B, L, h, d_h]."""
        return x_Td.view(-1, row_tokens, self.config.pool_heads, self.config.pool_head_width)

    def _trace(self, trace_TK: Tensor, decay_TK: Tensor, row_tokens: int) -> Tensor:
        """c_t = lambda_t c_{t-1} + (1 - lambda_t) W_c x_t with log lambda = -softplus(W_decay x + bias)."""
        log_decay_TK = -functional.softplus(at_least_fp32(decay_TK) + tapped(self.decay_bias))
        shape = (-1, row_tokens, trace_TK.shape[-1])
        trace_BLK = trace_scan(at_least_fp32(trace_TK).view(shape), log_decay_TK.view(shape))
        return trace_BLK.to(trace_TK.dtype).reshape(trace_TK.shape)

    def _addresses(self, xc_Te: Tensor, row_tokens: int, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [4 gain q / sqrt(d_h) ; 2 beta p_t / r] and keys [k ; p_{s-1}], both [B, h, L, d_h + r]."""
        config = self.config
        q_Td, k_Td, p_Tr = project(xc_Te, self.w_q, self.w_k, self.w_p)
        q_BhLd = rotary_norm(self._heads(q_Td, row_tokens), rotary, config.norm_eps)
        k_BhLd = rotary_norm(self._heads(k_Td, row_tokens), rotary, config.norm_eps)
        unit_gain_r = torch.ones(config.match_width, dtype=rotary.dtype, device=rotary.device)
        p_BLr = rms_norm(p_Tr, unit_gain_r, config.norm_eps).unflatten(0, (-1, row_tokens))
        before_BLr = functional.pad(p_BLr[:, :-1], (0, 0, 1, 0))

        q_scale_h = tapped(self.query_gain) * (QUERY_SHARPNESS / math.sqrt(config.pool_head_width))
        p_scale_h = tapped(self.match_gain) * (MATCH_SHARPNESS / config.match_width)
        query_BhLd = (q_BhLd * q_scale_h[:, None, None]).to(q_Td.dtype)
        match_BhLr = (p_BLr[:, None] * p_scale_h[:, None, None]).to(q_Td.dtype)
        preceding_BhLr = before_BLr[:, None].expand_as(match_BhLr)
        return torch.cat((query_BhLd, match_BhLr), -1), torch.cat((k_BhLd, preceding_BhLr), -1)

    def _arbitrate(self, read_BhLd: Tensor, v_BhLd: Tensor, copy_BhL: Tensor, gain_BhL: Tensor) -> Tensor:
        """g pi r + (1 - pi) v, pi = sigmoid(a + w.x - b nu), nu = (1 - cos(r, v)) / 2, g = softplus(.): [T, d]."""
        novelty_BhL = (1 - cosine(read_BhLd, v_BhLd)) / 2
        pi_BhL = torch.sigmoid(
            copy_BhL + tapped(self.copy_bias)[:, None] - tapped(self.novelty_weight)[:, None] * novelty_BhL
        )
        read_gain_BhL = functional.softplus(gain_BhL + tapped(self.read_gain_bias)[:, None])
        return blend(read_BhLd, v_BhLd, read_gain_BhL * pi_BhL, 1 - pi_BhL).flatten(2).flatten(0, 1)

    def _feed_forward(self, h_Td: Tensor) -> Tensor:
        """h + W_down(neuron(W_gate s) * neuron(W_up s)), s = neuron(RMSNorm(h)); s and the up side are signed."""
        config = self.config
        x_Td = rms_norm(h_Td, tapped(self.ffn_norm), config.norm_eps)
        s_Td = signed(x_Td, self.ffn_in_log_threshold, config)
        gate_Tf, up_Tf = project(s_Td, self.w_ffn_gate, self.w_ffn_up)
        gate_Tf = excitatory(gate_Tf, self.ffn_gate_log_threshold, config)
        up_Tf = signed(up_Tf, self.ffn_up_log_threshold, config)
        return project_onto(h_Td, gate_Tf * up_Tf, self.w_ffn_down)
