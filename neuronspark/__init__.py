"""NeuronSpark: a spiking language model of dendritic and hippocampal layers. Needs torch; safetensors for weights."""

from __future__ import annotations

from neuronspark.config import ConfigError, ModelConfig, padded_vocabulary
from neuronspark.kernels.launch import table as kernel_table
from neuronspark.kernels.launch import use as use_kernels
from neuronspark.kernels.operators import KERNEL_OPERATORS
from neuronspark.model import NeuronSpark
from neuronspark.presets import load_preset, preset_names
from neuronspark.weights import WeightsError, load_weights, save_weights

__all__ = [
    "KERNEL_OPERATORS",
    "ConfigError",
    "ModelConfig",
    "NeuronSpark",
    "WeightsError",
    "kernel_table",
    "load_preset",
    "load_weights",
    "padded_vocabulary",
    "preset_names",
    "save_weights",
    "use_kernels",
]
