"""Quantal neurons: excitatory (0 ... D quanta) and signed (-D ... D). The equations are in kernels/quantal.py."""

from __future__ import annotations

import math

from torch import Tensor

from neuronspark.config import ModelConfig
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.quantal import release
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
