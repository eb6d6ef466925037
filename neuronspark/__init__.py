"""NeuronSpark: a spiking language model of dendritic and hippocampal layers. Needs torch; safetensors for weights."""

from __future__ import annotations

from neuronspark.config import ConfigError, ModelConfig, padded_vocabulary
from neuronspark.kernels.backend import kernel_choice
from neuronspark.kernels.launch import use_saved as use_kernels
from neuronspark.kernels.launch import used_table as kernel_table
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
    "kernel_choice",
    "kernel_table",
    "load_preset",
    "load_weights",
    "padded_vocabulary",
    "preset_names",
    "save_weights",
    "use_kernels",
]
