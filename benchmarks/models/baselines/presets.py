"""The baselines' named configurations: the sizes of NeuronSpark's presets, with the same vocabulary and row length."""

from __future__ import annotations

import difflib

from baselines.config import ModelConfig
from neuronspark.config import ConfigError

VOCABULARY = 130_560
"""As NeuronSpark's large presets count without a line."""

PRESETS = {
    "llama-tiny": ModelConfig(8192, 256, "A" * 2, 32_768, ffn_width=704, head_width=64),
    "llama-1p3b": ModelConfig(VOCABULARY, 2048, "A" * 20, 32_768, ffn_width=5760),
    "llama-1p7b": ModelConfig(VOCABULARY, 2048, "A" * 28, 32_768, ffn_width=5632),
    "llama-2b": ModelConfig(VOCABULARY, 2560, "A" * 21, 32_768, ffn_width=7168),
    "mamba2-tiny": ModelConfig(8192, 256, "S" * 4, 32_768, state_width=64),
    "mamba2-2b": ModelConfig(VOCABULARY, 2560, "S" * 42, 32_768),
}


def preset_names() -> list[str]:
    """The names of the presets, sorted."""
    return sorted(PRESETS)


def load_preset(name: str) -> ModelConfig:
    """The configuration of a preset; ConfigError names the nearest one if there is none of that name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no model preset {name!r}: did you mean {near!r}? Presets: {', '.join(preset_names())}")
    return PRESETS[name]
