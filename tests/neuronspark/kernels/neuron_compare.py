"""What the tests of the kernels with neurons share: running a function with its gradients, and keeping off the ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from kernel_compare import relative_error
from torch import Tensor
from triton_here import DEVICE

from neuronspark.kernels import launch

MARGIN = 1.0
TIE = 1e-3
"""How near to a tie, in quanta, another way to compute u / theta may round to the other side."""
BF16_ROUNDING = 2**-8 + 1e-5
"""The largest relative error of one rounding to bf16, and a little for the fp32 arithmetic before it."""


def _fuse_multiply_add() -> None:
    """Triton 3.6's interpreter rounds a fused multiply-add twice; the card does once, and u / theta rests on it."""
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):  # type: ignore[no-untyped-def]
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


if DEVICE.type == "cpu":
    _fuse_multiply_add()


@contextmanager
def few_programs(device: torch.device, programs: int = 3) -> Iterator[None]:
    """Each kernel runs as few programs, so that a program walks over several tokens though there are not many.

    The sum over programs takes wide blocks: the interpreter's time goes by the program.
    """
    card = launch.card_of(device)
    saved = {}
    for name, launches in launch.table().items():
        chosen = launches.get(card) or launches[launch.ANY]
        own = {"sum_partials": {"BLOCK_P": 2, "BLOCK_C": 1024}}.get(name, {"PROGRAMS": programs})
        if set(own) <= set(chosen["blocks"]):
            saved[name] = {card: {**chosen, "blocks": {**chosen["blocks"], **own}}}
    launch.use(saved)
    try:
        yield
    finally:
        launch.use({})


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of sum(weights * output) with respect to every input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


def ambiguous(ratio: Tensor, levels: tuple[int, int]) -> Tensor:
    """Where u / theta (float64) is so near to a tie or to the window's edge that its side depends on rounding."""
    lowest, highest = levels
    tie = ((ratio - ratio.floor() - 0.5).abs() < TIE) & (ratio > lowest - 1) & (ratio < highest + 1)
    edge = ((ratio - (lowest - MARGIN)).abs() < TIE) | ((ratio - (highest + MARGIN)).abs() < TIE)
    return tie | edge


def assert_near(
    names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], seed: int, fp32: float = 1e-5
) -> None:
    """Every result within `fp32` of the float64 one, or within one rounding to bf16 if that is its dtype."""
    assert len(names) == len(found) == len(expected)
    for name, mine, other in zip(names, found, expected, strict=True):
        assert mine.shape == other.shape, (name, mine.shape, other.shape)
        limit = BF16_ROUNDING if mine.dtype == torch.bfloat16 else fp32
        error = relative_error(mine, other)
        assert error < limit, f"{name} is {error:.2e} off (limit {limit:.1e}), NEURONSPARK_TEST_SEED={seed}"


def assert_same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Two runs gave the same bits."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(one, other), f"result {index} differs between two runs"
