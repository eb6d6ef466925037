"""The dendritic layer: many heads of leaky compartments, a selective state space read out by signed quantal neurons.

    dt = softplus(W_dt x + dt_bias),  A = -exp(A_log)
    V_t = exp(A dt_t) V_{t-1} + dt_t g v_t (x) B_t ;  y_t = V_t C_t / sqrt(N) + skip v_t
    u = head-wise RMSNorm(y * silu(z)) ;  h <- h + W_out neuron(u)

Shapes: B rows, L tokens, T = B L, d width, H heads, P compartments a head, I = H P, N states, G groups of B and C.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark import parameters
from neuronspark.config import ModelConfig
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.neuron import signed_of_gated_norm, threshold_spec
from neuronspark.parameters import ParameterModule, ParameterSpec

FAST_EFOLD_TOKENS = (2.0, 1000.0)
"""Shortest and longest e-fold length of the fast heads at the start."""
FAST_STEP = (0.3, 0.02)
"""Mean step dt of the shortest and of the longest fast head at the start."""
SLOW_EFOLD_TOKENS = (40_000.0, 256_000.0)
"""Shortest and longest e-fold length of the slow-leak heads at the start."""
HEADS_PER_SLOW_HEAD = 8
"""One head in this many is a slow-leak head."""
STEP_STD = 0.1
"""Standard deviation of dt_raw at the start: at 1 it would inflate the mean dt 1.6 times and shorten every memory."""
LARGEST_INPUT_GAIN = 16.0


def starting_leaks(heads: int) -> tuple[Tensor, Tensor]:
    """(-A, dt) of every head at the start, fp64, fastest first; a head's e-fold length in tokens is 1 / (-A dt).

    A slow-leak head has A = -1 and dt = 1 / tau, so that a step of a few units flushes it; with a tiny A nothing could.
    """
    slow = max(1, heads // HEADS_PER_SLOW_HEAD) if heads > 1 else 0
    fast_tau = _log_spaced(*FAST_EFOLD_TOKENS, heads - slow)
    fast_dt = _log_spaced(*FAST_STEP, heads - slow)
    slow_dt = 1 / _log_spaced(*SLOW_EFOLD_TOKENS, slow)
    return torch.cat((1 / (fast_tau * fast_dt), torch.ones_like(slow_dt))), torch.cat((fast_dt, slow_dt))


def _log_spaced(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(math.log(first), math.log(last), count, dtype=torch.float64).exp()


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y > 0, exact for a tiny y."""
    return y + torch.log(-torch.expm1(-y))


def dendritic_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The parameters of one dendritic layer."""
    d, inner, heads = config.width, config.inner_width, config.dendritic_heads
    bc_shape = (2, config.state_groups, config.state_width)
    leak, dt = starting_leaks(heads)
    input_gain = (2 / dt).sqrt().clamp(max=LARGEST_INPUT_GAIN)
    return {
        "norm": ParameterSpec((d,), "norm", parameters.constant(1.0)),
        "w_z": ParameterSpec((inner, d), "matrix", parameters.fan_in_normal()),
        "w_v": ParameterSpec((inner, d), "matrix", parameters.fan_in_normal()),
        "w_bc": ParameterSpec((math.prod(bc_shape), d), "matrix", parameters.fan_in_normal()),
        "w_dt": ParameterSpec((heads, d), "matrix", parameters.fan_in_normal(STEP_STD)),
        "bc_gain": ParameterSpec(bc_shape, "norm", parameters.constant(1.0)),
        "bc_bias": ParameterSpec(bc_shape, "neuron", parameters.constant(1.0)),
        "dt_bias": ParameterSpec((heads,), "neuron", parameters.values(inverse_softplus(dt))),
        "a_log": ParameterSpec((heads,), "neuron", parameters.values(leak.log())),
        "input_gain": ParameterSpec((heads,), "neuron", parameters.values(input_gain)),
        "skip": ParameterSpec((heads,), "neuron", parameters.constant(1.0)),
        "soma_norm": ParameterSpec((inner,), "norm", parameters.constant(1.0)),
        "log_threshold": threshold_spec(inner, config),
        "w_out": ParameterSpec((d, inner), "matrix", parameters.fan_in_normal(1 / math.sqrt(2 * len(config.layers)))),
    }


class DendriticLayer(ParameterModule):
    """One dendritic layer; its parameters are those of `dendritic_specs`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, h_Td: Tensor, row_tokens: int, scan: Callable[..., Tensor] = dendritic_scan) -> Tensor:
        """The residual stream after the layer; T is a whole number of rows of `row_tokens` tokens.

        `scan` is the recurrence along the rows; decoding puts one there that goes on from a state.
        """
        return project_onto(h_Td, self.spikes(h_Td, row_tokens, scan), self.w_out)

    def spikes(self, h_Td: Tensor, row_tokens: int, scan: Callable[..., Tensor] = dendritic_scan) -> Tensor:
        """What the layer's neurons release, [T, I], before it is projected onto the residual stream."""
        config = self.config
        heads, compartments = config.dendritic_heads, config.dendritic_head_width
        by_row = (-1, row_tokens)
        x_Td = rms_norm(h_Td, tapped(self.norm), config.norm_eps)
        z_TI, v_TI, bc_T2GN, dt_TH = project(x_Td, self.w_z, self.w_v, self.w_bc, self.w_dt)

        bc_gain, bc_bias = tapped(self.bc_gain), tapped(self.bc_bias)
        bc = rms_norm(bc_T2GN.unflatten(-1, bc_gain.shape), bc_gain, config.norm_eps) + bc_bias
        b_BLGN, c_BLGN = (part.to(h_Td.dtype).unflatten(0, by_row) for part in bc.unbind(1))
        c_BLGN = c_BLGN * config.state_width**-0.5

        dt_BLH = functional.softplus(at_least_fp32(dt_TH) + tapped(self.dt_bias)).unflatten(0, by_row)
        log_decay_BLH = dt_BLH * -tapped(self.a_log).exp()
        factor_BLH = dt_BLH * tapped(self.input_gain)
        v_BLHP = v_TI.view(*dt_BLH.shape, compartments)
        y_BLHP = scan(v_BLHP, log_decay_BLH, factor_BLH, b_BLGN, c_BLGN, tapped(self.skip))

        gain_HP = tapped(self.soma_norm).view(heads, compartments)
        z_THP = z_TI.unflatten(1, gain_HP.shape)
        return signed_of_gated_norm(y_BLHP.flatten(0, 1), z_THP, gain_HP, self.log_threshold, config)
