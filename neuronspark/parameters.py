"""Parameters as a table: each layer states its parameters' names, shapes, groups and starting values once.

The model, its optimizer groups and its parameter count are all read from that table, so none can miss a parameter.

Random starting values are drawn on the CPU in fp32 from a generator of their own, seeded by a hash of
(seed, parameter name): adding, removing or resizing one parameter leaves every other one's values as they were, and
the values do not depend on the device or on the compute dtype (but for rounding to it).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

GROUPS = ("matrix", "embedding", "memory", "neuron", "norm")
"""Optimizer groups: matrices, the embedding, memory tables, neurons and scalars (no decay), norm gains (no decay)."""

Initialiser = Callable[[torch.Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter before it exists."""

    shape: tuple[int, ...]
    """Its shape."""
    group: str
    """Its optimizer group, one of GROUPS."""
    init: Initialiser
    """Its starting values, from its own generator and its shape."""


class ParameterModule(nn.Module):
    """A module whose parameters come from a table instead of assignments in its constructor."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...


def normal(std: float) -> Initialiser:
    """Independent normal values of standard deviation `std`."""
    return lambda generator, shape: torch.randn(shape, generator=generator) * std


def fan_in_normal(scale: float = 1.0) -> Initialiser:
    """A matrix [out, in] whose outputs have standard deviation `scale` for inputs of unit variance."""
    return lambda generator, shape: torch.randn(shape, generator=generator) * (scale / math.sqrt(shape[-1]))


def constant(value: float) -> Initialiser:
    """The same value everywhere."""
    return lambda _, shape: torch.full(shape, value)


def values(tensor: Tensor) -> Initialiser:
    """Given values, of exactly the parameter's shape."""
    return lambda _, shape: tensor.reshape(shape).float()


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """The generator of one parameter's starting values; its seed is a 63-bit hash of (seed, name)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def is_matrix(spec: ParameterSpec) -> bool:
    """Whether a parameter is held in the compute dtype; all others are at least fp32."""
    return spec.group in ("matrix", "embedding", "memory")


def add_parameters(
    module: ParameterModule,
    specs: Mapping[str, ParameterSpec],
    *,
    prefix: str,
    seed: int | None,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> None:
    """Register the table's parameters on `module`; `prefix` + name is the name their generators are keyed by.

    Without a seed, and on the meta device, they have no starting values.
    """
    scalar_dtype = torch.promote_types(compute_dtype, torch.float32)
    for name, spec in specs.items():
        dtype = compute_dtype if is_matrix(spec) else scalar_dtype
        if seed is None or device.type == "meta":
            start = torch.empty(spec.shape, dtype=dtype, device=device)
        else:
            start = spec.init(seeded_generator(seed, prefix + name), spec.shape).to(device=device, dtype=dtype)
        module.register_parameter(name, nn.Parameter(start))
