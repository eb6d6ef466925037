"""Baselines for NeuronSpark behind the trainer's contract: Llama-like and Mamba-2-like language models.

One package for both: a model is a pattern of two kinds of layer (config.py), attention alone is the Llama, state-space
layers alone are the Mamba-2. It is trained by naming this directory in host.json: {"neuronspark": ".../baselines"}.
Operators come from `neuronspark.kernels` where both sides need the same one, so that a comparison compares the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baselines.config import ModelConfig
from baselines.model import Baseline as NeuronSpark  # the name a model package's model has for the trainer
from baselines.presets import load_preset, preset_names
from neuronspark.kernels.launch import use_saved
from neuronspark.kernels.launch import used_table as kernel_table
from neuronspark.kernels.operators import KERNEL_OPERATORS as SHARED_KERNELS

KERNEL_OPERATORS = {
    **SHARED_KERNELS,
    "_product_forward_kernel": "gated product",
    "_product_backward_kernel": "gated product",
    "_turn_kernel": "rotary positions",
    "_convolution_forward_kernel": "short convolution",
    "_convolution_backward_kernel": "short convolution",
}
"""The operator of each Triton kernel, by the kernel's name."""


def use_kernels(table: Mapping[str, Any]) -> None:
    """Have kernels run with the launch configurations of an earlier `kernel_table`; ValueError if they do not fit."""
    use_saved(table, ("neuronspark.kernels", "baselines"))


__all__ = [
    "KERNEL_OPERATORS",
    "ModelConfig",
    "NeuronSpark",
    "kernel_table",
    "load_preset",
    "preset_names",
    "use_kernels",
]
