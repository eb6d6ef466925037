"""What an arm swaps in `neuronspark` where no field of a configuration says it.

A swap replaces an attribute of a module or class by a function of it; `swapped` does so for a while. Parameters that an
arm does not use stay: their gradients are zero, and the others keep their starting values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from neuronspark import dendritic, hippocampal
from neuronspark.config import ModelConfig
from neuronspark.hippocampal import HippocampalLayer, PoolEvents
from neuronspark.kernels.gated_release import gated_release
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.rmsnorm import rms_norm


@dataclasses.dataclass(frozen=True)
class Swap:
    """One replacement."""

    place: Any
    """A module or class."""
    name: str
    replacement: Callable[[Any], Any]
    """The new attribute, from the one that is there."""


@contextlib.contextmanager
def swapped(*swaps: Swap) -> Iterator[None]:
    """The replacements, until the end of the block."""
    with contextlib.ExitStack() as stack:
        for swap in swaps:
            before = getattr(swap.place, swap.name)
            setattr(swap.place, swap.name, swap.replacement(before))
            stack.callback(setattr, swap.place, swap.name, before)
        yield


def _instead(function: Any) -> Callable[[Any], Any]:
    return lambda _: function


# --- no spikes: an excitatory neuron is SiLU, a signed one the identity ----------------------------------------------


def silu_product(gate_TC: Tensor, x_TC: Tensor) -> Tensor:
    """silu(gate) * x, by the baselines' operator."""
    from baselines.operators import silu_product

    product: Tensor = silu_product(gate_TC, x_TC)
    return product


def _gated_norm(y_THP: Tensor, z_THP: Tensor, gain_HP: Tensor, _: Tensor, config: ModelConfig) -> Tensor:
    gated_THP = silu_product(z_THP.contiguous(), y_THP.contiguous())
    return rms_norm(gated_THP, gain_HP, config.norm_eps).flatten(1)


def _norm(x_TC: Tensor, gain_C: Tensor, _: Tensor, config: ModelConfig) -> Tensor:
    return rms_norm(x_TC, tapped(gain_C), config.norm_eps)


def _gate_times(gate_TC: Tensor, _: Tensor, x_TC: Tensor, config: ModelConfig) -> Tensor:
    return silu_product(gate_TC, x_TC)


def _gate_times_up(gate_TC: Tensor, _: Tensor, up_TC: Tensor, __: Tensor, config: ModelConfig) -> Tensor:
    return silu_product(gate_TC, up_TC)


NO_SPIKES = (
    Swap(dendritic, "signed_of_gated_norm", _instead(_gated_norm)),
    Swap(hippocampal, "signed_of_norm", _instead(_norm)),
    Swap(hippocampal, "excitatory_times", _instead(_gate_times)),
    Swap(hippocampal, "excitatory_times_signed", _instead(_gate_times_up)),
)


# --- excitatory dendritic neurons ------------------------------------------------------------------------------------


def _excitatory_of_gated_norm(
    y_THP: Tensor, z_THP: Tensor, gain_HP: Tensor, log_threshold_I: Tensor, config: ModelConfig
) -> Tensor:
    levels = (0, config.spike_levels)
    return gated_release(
        y_THP, z_THP, gain_HP, config.norm_eps, tapped(log_threshold_I), levels, config.surrogate_margin
    )


EXCITATORY_DENDRITIC = (Swap(dendritic, "signed_of_gated_norm", _instead(_excitatory_of_gated_norm)),)


# --- hippocampal mechanisms left out ---------------------------------------------------------------------------------


def _without_match(addresses: Any) -> Any:
    def without(q: Tensor, k: Tensor, p: Tensor, query_gain: Tensor, match_gain: Tensor, *rest: Any) -> Any:
        return addresses(q, k, p, query_gain, torch.zeros_like(match_gain), *rest)

    return without


def _events_with(**fields: Callable[[PoolEvents], Tensor]) -> Callable[[Any], Any]:
    """`HippocampalLayer.events` with some fields made anew."""

    def replacement(events: Any) -> Any:
        def changed(self: HippocampalLayer, *arguments: Any) -> PoolEvents:
            found: PoolEvents = events(self, *arguments)
            return dataclasses.replace(found, **{name: make(found) for name, make in fields.items()})

        return changed

    return replacement


def _no_trace(
    self: HippocampalLayer, trace_TK: Tensor, decay_TK: Tensor, row_tokens: int, along: hippocampal.RowOperators
) -> Tensor:
    return torch.zeros_like(trace_TK)


def _read_alone(read_BhLd: Tensor, *_: Tensor) -> Tensor:
    return read_BhLd.transpose(1, 2).flatten(2).flatten(0, 1)


NO_MATCH = (Swap(hippocampal, "addresses", _without_match),)
NO_CLOCK = (
    Swap(HippocampalLayer, "events", _events_with(clock_step=lambda events: torch.zeros_like(events.clock_step))),
)
NO_TAG = (Swap(HippocampalLayer, "events", _events_with(log_write=lambda events: torch.zeros_like(events.log_write))),)
NO_TRACE = (Swap(HippocampalLayer, "_trace", _instead(_no_trace)),)
NO_ARBITRATION = (Swap(hippocampal, "arbitrate", _instead(_read_alone)),)


# --- dendritic heads that start plainly -----------------------------------------------------------------------------


def _plain_leaks(heads: int) -> tuple[Tensor, Tensor]:
    """e-folds log-uniform over 2 ... 1000 tokens, one head in eight over 4K ... 64K, all steps 0.3 ... 0.02."""
    slow = max(1, heads // dendritic.HEADS_PER_SLOW_HEAD)
    tau = torch.cat(
        (
            dendritic._log_spaced(*dendritic.FAST_EFOLD_TOKENS, heads - slow),
            dendritic._log_spaced(4096.0, 65_536.0, slow),
        )
    )
    dt = dendritic._log_spaced(*dendritic.FAST_STEP, heads)
    return 1 / (tau * dt), dt


PLAIN_HEADS = (
    Swap(dendritic, "starting_leaks", _instead(_plain_leaks)),
    Swap(dendritic, "STEP_STD", _instead(1.0)),
    Swap(dendritic, "LARGEST_INPUT_GAIN", _instead(1.0)),
)
