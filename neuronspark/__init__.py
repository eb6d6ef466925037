"""NeuronSpark: a spiking language model of dendritic and hippocampal layers. Needs torch and nothing else."""

from __future__ import annotations

from neuronspark.config import ConfigError, ModelConfig, padded_vocabulary
from neuronspark.model import NeuronSpark
from neuronspark.presets import load_preset, preset_names

__all__ = ["ConfigError", "ModelConfig", "NeuronSpark", "load_preset", "padded_vocabulary", "preset_names"]
