"""Quantal neurons: excitatory (0 ... D quanta) and signed (-D ... D), alone and joined to what feeds or reads them.

The equations are in kernels/quantal.py. The joined forms have the values of the steps one after the other; as one
operator they move fewer bytes.
"""

from __future__ import annotations

import math

from torch import Tensor

from neuronspark.config import ModelConfig
from neuronspark.kernels.gated_release import gated_release
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.norm_release import norm_release
from neuronspark.kernels.quantal import release
from neuronspark.kernels.release_product import release_product, release_times
from neuronspark.parameters import ParameterSpec, constant


def threshold_spec(channels: int, config: ModelConfig) -> ParameterSpec:
    """The logarithms of a neuron's channel thresholds."""
    return ParameterSpec((channels,), "neuron", constant(math.log(config.threshold_init)))


def excitatory(u_TC: Tensor, log_threshold_C: Tensor, config: ModelConfig) -> Tensor:
    """Release 0 to D quanta a channel."""
    return release(u_TC, tapped(log_threshold_C), 0, config.spike_levels, config.surrogate_margin)


def signed(u_TC: Tensor, log_threshold_C: Tensor, config: ModelConfig) -> Tensor:
    """Release -D to D quanta a channel: an excitatory and an inhibitory population."""
    return release(u_TC, tapped(log_threshold_C), -config.spike_levels, config.spike_levels, config.surrogate_margin)


def signed_of_norm(x_TC: Tensor, gain_C: Tensor, log_threshold_C: Tensor, config: ModelConfig) -> Tensor:
    """signed(RMSNorm(x))."""
    gain_C, log_threshold_C = tapped(gain_C), tapped(log_threshold_C)
    levels = (-config.spike_levels, config.spike_levels)
    return norm_release(x_TC, gain_C, config.norm_eps, log_threshold_C, levels, config.surrogate_margin)


def signed_of_gated_norm(
    y_THP: Tensor, z_THP: Tensor, gain_HP: Tensor, log_threshold_I: Tensor, config: ModelConfig
) -> Tensor:
    """signed(head-wise RMSNorm(y * silu(z))): [T, I] with I = H P. The gain comes tapped."""
    levels = (-config.spike_levels, config.spike_levels)
    return gated_release(
        y_THP, z_THP, gain_HP, config.norm_eps, tapped(log_threshold_I), levels, config.surrogate_margin
    )


def excitatory_times_signed(
    gate_TC: Tensor, gate_log_threshold_C: Tensor, up_TC: Tensor, up_log_threshold_C: Tensor, config: ModelConfig
) -> Tensor:
    """excitatory(gate) * signed(up)."""
    return release_product(
        gate_TC,
        tapped(gate_log_threshold_C),
        (0, config.spike_levels),
        up_TC,
        tapped(up_log_threshold_C),
        (-config.spike_levels, config.spike_levels),
        config.surrogate_margin,
    )


def excitatory_times(gate_TC: Tensor, log_threshold_C: Tensor, x_TC: Tensor, config: ModelConfig) -> Tensor:
    """excitatory(gate) * x."""
    return release_times(gate_TC, tapped(log_threshold_C), (0, config.spike_levels), x_TC, config.surrogate_margin)
