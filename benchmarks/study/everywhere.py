"""The arm with a signed neuron before every projection: nearly every matrix product then has quanta as its input.

Each projection of a normalised stream gets neurons of its own, and so does what the hippocampal gate lets through. The
thresholds are parameters of the layer, and each hangs, as an attribute, on the parameter in whose operator it is used:
that is how the swapped operators find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

import neuronspark.model
from benchmarks.study.swaps import Swap, swapped
from neuronspark import dendritic, hippocampal, memory
from neuronspark.config import ModelConfig
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.quantal import release
from neuronspark.kernels.release_product import release_product
from neuronspark.neuron import threshold_spec
from neuronspark.parameters import ParameterSpec

INPUT = "input_log_threshold"
"""On a projection's first weight: the thresholds of the neurons that it reads."""
MIXED = "mixed_log_threshold"
"""On the hippocampal gate's thresholds: those of what it lets through."""
CONTROLS = ("w_dt", "w_decay", "w_control", "w_memory_gate")


@dataclasses.dataclass(frozen=True)
class Options:
    """Which neurons."""

    spike_levels: int | None = None
    """D of the neurons before a projection; None: that of the configuration."""
    controls: bool = True
    """Whether dt, the trace's decay, clock, tag, copy, gain and the memory's gate see quanta as well."""
    trained: bool = True
    """Whether the new thresholds are trained."""


def _input_widths(config: ModelConfig, kind: str, has_memory: bool) -> dict[str, int]:
    """The first weight of every projection that has no neurons before it, and the channels it reads."""
    if kind == "D":
        return {"w_z": config.width}
    memory_query = {"w_memory_query": config.width} if has_memory else {}
    return {"w_trace": config.width, "w_q": config.width + config.trace_width, **memory_query}


def _more_specs(parameter_specs: Any) -> Any:
    def specs(config: ModelConfig) -> dict[str, ParameterSpec]:
        found: dict[str, ParameterSpec] = parameter_specs(config)
        for index, kind in enumerate(config.layers):
            prefix = f"{neuronspark.model.layer_name(index)}."
            for name, channels in _input_widths(config, kind, index in config.memory_layers).items():
                found[f"{prefix}{name}_{INPUT}"] = threshold_spec(channels, config)
            if kind == "H":
                found[f"{prefix}{MIXED}"] = threshold_spec(config.width, config)
        return found

    return specs


def _hang_thresholds(build: Any) -> Any:
    def built(self: Any, config: ModelConfig, *arguments: Any, **options: Any) -> None:
        build(self, config, *arguments, **options)
        for index, kind in enumerate(config.layers):
            layer = self.get_submodule(neuronspark.model.layer_name(index))
            for parameter in layer.parameters():
                parameter.study_config = config
            for name in _input_widths(config, kind, index in config.memory_layers):
                setattr(getattr(layer, name), INPUT, getattr(layer, f"{name}_{INPUT}"))
            for name in CONTROLS:
                if hasattr(layer, name):
                    getattr(layer, name).is_control = True
            if kind == "H":
                setattr(layer.gate_log_threshold, MIXED, getattr(layer, MIXED))

    return built


@contextlib.contextmanager
def in_force(options: Options) -> Iterator[None]:
    """The arm, until the end of the block."""

    def threshold(parameter: Tensor) -> Tensor:
        return tapped(parameter) if options.trained else parameter.detach()

    def projecting(project: Any) -> Any:
        def of_quanta(x_TC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            log_threshold_C = getattr(weights[0], INPUT, None)
            if log_threshold_C is None:
                products: tuple[Tensor, ...] = project(x_TC, *weights)
                return products
            config: ModelConfig = weights[0].study_config  # type: ignore[attr-defined]
            levels = options.spike_levels or config.spike_levels
            s_TC = release(x_TC, threshold(log_threshold_C), -levels, levels, config.surrogate_margin)
            plain = [w for w in weights if getattr(w, "is_control", False) and not options.controls]
            by_weight = dict(zip(map(id, plain), project(x_TC, *plain), strict=True)) if plain else {}
            others = [w for w in weights if id(w) not in by_weight]
            by_weight |= dict(zip(map(id, others), project(s_TC, *others), strict=True))
            return tuple(by_weight[id(w)] for w in weights)

        return of_quanta

    def mixing(_: Any) -> Any:
        def gated(gate_TC: Tensor, log_threshold_C: Tensor, x_TC: Tensor, config: ModelConfig) -> Tensor:
            levels, margin = config.spike_levels, config.surrogate_margin
            mixed_log_threshold_C = threshold(getattr(log_threshold_C, MIXED))
            return release_product(
                gate_TC, tapped(log_threshold_C), (0, levels), x_TC, mixed_log_threshold_C, (-levels, levels), margin
            )

        return gated

    with swapped(
        Swap(neuronspark.model, "parameter_specs", _more_specs),
        Swap(neuronspark.model.NeuronSpark, "__init__", _hang_thresholds),
        Swap(dendritic, "project", projecting),
        Swap(hippocampal, "project", projecting),
        Swap(memory, "project", projecting),
        Swap(hippocampal, "excitatory_times", mixing),
    ):
        yield
