"""`nstrain model show`: what a preset or a configuration holds and costs, without building it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nstrain.base.disk import read_json
from nstrain.base.errors import Refusal

if TYPE_CHECKING:
    from nstrain.train.model import ModelCost

DEFAULT_ROW_TOKENS = 4096


def describe_model(model: str, row_tokens: int = DEFAULT_ROW_TOKENS) -> ModelCost:
    """A preset by its name, or a configuration in a JSON file, in rows of `row_tokens` tokens or the longest it reads.

    Raises `Refusal` for what is neither.
    """
    from nstrain.train.model import model_cost  # torch stands behind it

    if not model.endswith(".json"):
        return model_cost(model, row_tokens)
    value = read_json(Path(model))
    if not isinstance(value, dict):
        raise Refusal(f"{model}: expected a model's configuration, a JSON object, found {type(value).__name__}")
    try:
        return model_cost(value, row_tokens)
    except Refusal as error:
        raise Refusal(f"{model}: {error}") from None


def describe_presets(row_tokens: int = DEFAULT_ROW_TOKENS) -> dict[str, ModelCost]:
    """Every preset by its name."""
    from nstrain.train.model import preset_names

    return {name: describe_model(name, row_tokens) for name in preset_names()}
