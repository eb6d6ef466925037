"""Named model configurations, one JSON file each."""

from __future__ import annotations

import difflib
import json
from importlib import resources

from neuronspark.config import ConfigError, ModelConfig


def preset_names() -> list[str]:
    """The names of the presets that come with the package, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_preset(name: str) -> ModelConfig:
    """The configuration of a preset; ConfigError names the nearest one if there is none of that name."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no model preset {name!r}: did you mean {near!r}? Presets: {', '.join(names)}")
    text = resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return ModelConfig.from_dict(json.loads(text))
