"""The sums over programs that end a parameter's gradient, at the shapes that ns-2b's backwards give them.

Bytes: the partial sums once, and the sums. The buffers are of a few megabytes, so that time is latency more than bytes;
the L2 cache is flushed before each run here, and holds them in a trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from harness import Ceilings, Reading, milliseconds

from neuronspark.kernels import launch
from neuronspark.kernels.partial_sums_triton import CANDIDATES, MANY, SUM, SUM_MANY, sum_partials

SHAPES = ((2, 264, 2560), (1, 660, 7040), (2, 2048, 40), (3, 256, 40))
"""(parameters, programs, channels): of norm + neuron, a neuron, addresses and the comparator."""


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Every shape."""
    for shape in SHAPES:
        partials = torch.randn(shape, device="cuda")
        moved = 4.0 * (partials.numel() + shape[0] * shape[2])
        yield Reading(f"partial sums {shape}", milliseconds(lambda partials=partials: sum_partials(partials)), 0, moved)


def search() -> Iterator[tuple[str, launch.Launch, float]]:
    """Every candidate at the shapes of its class."""
    for shape in SHAPES:
        partials = torch.randn(shape, device="cuda")
        name = SUM_MANY if shape[1] > MANY else SUM
        for candidate in CANDIDATES[name]:
            launch.use({name: {launch.ANY: dataclasses.asdict(candidate)}})
            try:
                yield f"{name} {shape}", candidate, milliseconds(lambda partials=partials: sum_partials(partials))
            finally:
                launch.use({})
