"""A model's weights in one safetensors file (https://github.com/huggingface/safetensors, "Format").

Tensors lie there by the parameters' names; the file's metadata holds the configuration as JSON under "config", so that
the file alone gives the model back. A file without one, such as a trainer's checkpoint, needs its configuration beside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronspark.config import ConfigError, ModelConfig
from neuronspark.model import NeuronSpark

CONFIG_KEY = "config"
"""The metadata's entry that holds the configuration."""
PARTIAL_SUFFIX = ".partial"
"""Ends the name of a file that is still being written."""
_NAMED_AT_MOST = 5


class WeightsError(ValueError):
    """A weights file that does not give a model; the message names the file, the tensors or fields, and the remedy."""


def save_weights(model: NeuronSpark, path: Path | str) -> None:
    """Write all parameters, in the dtypes they have, and the configuration; the file appears whole or not at all.

    Needs host memory for a copy of the weights. Raises WeightsError if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    # Copies: the parameters may be views of one buffer, which the format's writer refuses.
    tensors = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        save_file(tensors, partial, {CONFIG_KEY: json.dumps(model.config.to_dict()), "format": "pt"})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be written ({error})") from error
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_weights(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    config: ModelConfig | None = None,
) -> NeuronSpark:
    """The model of a weights file, on a device; `dtype` is its compute dtype (default: the device's, see NeuronSpark).

    `config` is for a file that holds none of its own. Raises WeightsError for a file that is not safetensors, has no
    configuration or another one than `config`, or whose tensors are not exactly the configuration's parameters:
    missing, unknown, of another shape or without floating-point numbers are named.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            config = _config_of(path, file.metadata() or {}, config)
            model = NeuronSpark(config, device, seed=None, compute_dtype=dtype)
            parameters = dict(model.named_parameters())
            _refuse_other_tensors(path, {name: file.get_slice(name) for name in file.keys()}, parameters)  # noqa: SIM118
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(file.get_tensor(name))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error})") from None
    except SafetensorError as error:
        raise WeightsError(
            f"{path}: expected tensors in the safetensors format, found something else ({error})"
        ) from None
    model.refresh()
    return model


def _config_of(path: Path, metadata: dict[str, str], given: ModelConfig | None) -> ModelConfig:
    """The configuration in a file's metadata, or the one given for a file that has none."""
    if CONFIG_KEY not in metadata:
        if given is None:
            raise WeightsError(f"{path}: its metadata has no {CONFIG_KEY!r}; give the model's configuration beside it")
        return given
    try:
        stored = ModelConfig.from_dict(json.loads(metadata[CONFIG_KEY]))
    except (ConfigError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: the configuration in its metadata is not a model's: {error}") from None
    if given is not None and given != stored:
        ours, theirs = given.to_dict(), stored.to_dict()
        differing = [f"{name} {theirs[name]!r}, not {ours[name]!r}" for name in ours if ours[name] != theirs[name]]
        raise WeightsError(f"{path}: it holds another model's weights, with {', '.join(differing)}")
    return stored


def _refuse_other_tensors(path: Path, found: dict[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Raise WeightsError unless the file's tensors are exactly the parameters, in shape and kind."""
    problems = [_listed("missing", [name for name in parameters if name not in found])]
    problems.append(_listed("not this model's", sorted(name for name in found if name not in parameters)))
    for name, parameter in parameters.items():
        if name in found and found[name].get_shape() != list(parameter.shape):
            problems.append(f"{name} has shape {found[name].get_shape()}, expected {list(parameter.shape)}")
        elif name in found and found[name].get_dtype() not in ("F64", "F32", "F16", "BF16"):
            problems.append(f"{name} holds {found[name].get_dtype()}, expected floating-point numbers")
    told = [problem for problem in problems if problem]
    if told:
        more = f"; and {len(told) - _NAMED_AT_MOST} more" if len(told) > _NAMED_AT_MOST else ""
        raise WeightsError(
            f"{path}: its tensors are not those of the configuration: {'; '.join(told[:_NAMED_AT_MOST])}{more}"
        )


def _listed(what: str, names: list[str]) -> str:
    """The first few names, and how many more there are; empty for none."""
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{what}: {', '.join(names[:_NAMED_AT_MOST])}{more}" if names else ""
