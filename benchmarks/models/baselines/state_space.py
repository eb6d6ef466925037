"""The layer of a Mamba-2: a selective state space with a scalar decay a head (Dao and Gu, 2405.21060).

    z, [v, B, C], dt = W_in RMSNorm(h);  v, B, C <- silu(their causal convolution over k tokens)
    dt = softplus(dt + dt_bias),  A = -exp(A_log)
    V_t = exp(A dt_t) V_{t-1} + dt_t v_t (x) B_t ;  y_t = V_t C_t + skip v_t
    h <- h + W_out RMSNorm(y * silu(z))

The recurrence is NeuronSpark's dendritic scan with another input factor. Shapes: B rows, L tokens, T = B L, w width,
H heads of P channels, I = H P, N states, G groups of B and C, C channels of the convolution, k its taps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from baselines.config import ModelConfig
from baselines.operators import convolved_silu, silu_product, taps_uniform
from neuronspark import parameters
from neuronspark.dendritic import inverse_softplus
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.parameters import ParameterModule, ParameterSpec

FIRST_STEP = (1e-3, 1e-1)
"""Range of a head's mean step dt at the start, log-uniform."""
FIRST_LEAK = (1.0, 16.0)
"""Range of -A at the start, uniform."""


def _drawn_step(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """dt_bias for log-uniform steps."""
    low, high = (math.log(bound) for bound in FIRST_STEP)
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return inverse_softplus((low + share * (high - low)).exp()).float()


def _drawn_leak(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A_log for uniform leaks."""
    low, high = FIRST_LEAK
    return (low + torch.rand(shape, generator=generator) * (high - low)).log()


def state_space_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The parameters of one state-space layer."""
    width, inner, heads, taps = config.width, config.inner_width, config.state_heads, config.convolution_tokens

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> ParameterSpec:
        return ParameterSpec((outputs, inputs), "matrix", parameters.fan_in_normal(scale))

    return {
        "norm": ParameterSpec((width,), "norm", parameters.constant(1.0)),
        "w_z": matrix(inner, width),
        "w_vbc": matrix(config.convolved_width, width),
        "w_dt": matrix(heads, width),
        "convolution": ParameterSpec((config.convolved_width, taps), "matrix", taps_uniform(taps)),
        "convolution_bias": ParameterSpec((config.convolved_width,), "neuron", taps_uniform(taps)),
        "dt_bias": ParameterSpec((heads,), "neuron", _drawn_step),
        "a_log": ParameterSpec((heads,), "neuron", _drawn_leak),
        "skip": ParameterSpec((heads,), "neuron", parameters.constant(1.0)),
        "gated_norm": ParameterSpec((inner,), "norm", parameters.constant(1.0)),
        "w_out": matrix(width, inner, 1 / math.sqrt(len(config.layers))),
    }


class StateSpaceLayer(ParameterModule):
    """One state-space layer; its parameters are those of `state_space_specs`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, h_Tw: Tensor, row_tokens: int) -> Tensor:
        """The residual stream after the layer; T is a whole number of rows of `row_tokens` tokens."""
        config = self.config
        by_row = (-1, row_tokens)
        x_Tw = rms_norm(h_Tw, tapped(self.norm), config.norm_eps)
        z_TI, vbc_TC, dt_TH = project(x_Tw, self.w_z, self.w_vbc, self.w_dt)
        vbc_BLC = convolved_silu(vbc_TC.unflatten(0, by_row), self.convolution, tapped(self.convolution_bias))
        states = config.state_groups * config.state_width
        v_BLI, b_BLGN, c_BLGN = vbc_BLC.split((config.inner_width, states, states), -1)
        b_BLGN, c_BLGN = (part.unflatten(-1, (config.state_groups, -1)) for part in (b_BLGN, c_BLGN))

        dt_BLH = functional.softplus(at_least_fp32(dt_TH) + tapped(self.dt_bias)).unflatten(0, by_row)
        log_decay_BLH = dt_BLH * -tapped(self.a_log).exp()
        v_BLHP = v_BLI.unflatten(-1, (config.state_heads, -1))
        y_BLHP = dendritic_scan(v_BLHP, log_decay_BLH, dt_BLH, b_BLGN, c_BLGN, tapped(self.skip))

        u_TI = rms_norm(silu_product(z_TI, y_BLHP.reshape(z_TI.shape)), tapped(self.gated_norm), config.norm_eps)
        return project_onto(h_Tw, u_TI, self.w_out)
