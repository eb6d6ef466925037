"""What the tests of the operators along a row share: an operator's kernels against its float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor

from neuronspark.kernels import launch

FP32_LIMIT = 1e-5
BF16_ROUNDING = 2**-9
"""The largest relative error of rounding one number to bf16."""


@contextmanager
def small_blocks(device: torch.device, blocks: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """In the interpreter, kernels run with these blocks, so that a short row has many; a card keeps what is pinned."""
    if device.type == "cpu":
        table = launch.table()
        pinned = {name: table[name][launch.ANY] for name in blocks}
        launch.use({name: {launch.ANY: {**pinned[name], "blocks": dict(blocks[name])}} for name in blocks})
    try:
        yield
    finally:
        launch.use({})


def run(
    kernels: str, function: Callable[..., Tensor], inputs: Mapping[str, Tensor], weights: Tensor
) -> dict[str, Tensor]:
    """The output, and the gradient of sum(weights * output) with respect to every input, by NEURONSPARK_KERNELS."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NEURONSPARK_KERNELS", kernels)
        output = function(**leaves)
        gradients = torch.autograd.grad(output, list(leaves.values()), weights.to(output.dtype))
    named = zip(leaves, gradients, strict=True)
    return {"output": output.detach(), **{f"gradient of {name}": gradient for name, gradient in named}}


def assert_right(
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    weights: Tensor,
    seed: int,
    terms: Mapping[str, tuple[str, int]] | None = None,
    roundings: int = 1,
) -> dict[str, Tensor]:
    """The kernels agree with the reference in float64 on the same inputs; returns what the kernels gave.

    Allowed is 1e-5, or for bf16 inputs 1.5 times the error of the bf16 reference, or some `roundings` if that is more.
    `terms` names, for the gradient of an input, the input whose gradient holds the terms that it is the sum of, and
    the axis that remains: its error is relative to the sum of their sizes, since the sum itself may cancel to nothing.
    """
    found = run("triton", function, inputs, weights)
    weights = weights.to(found["output"].dtype)  # the gradient that the kernels were given
    exact = run("reference", function, {name: tensor.double() for name, tensor in inputs.items()}, weights.double())
    bf16 = any(tensor.dtype == torch.bfloat16 for tensor in inputs.values())
    plain = run("reference", function, inputs, weights) if bf16 else exact
    for name, expected in exact.items():
        mine = found[name]
        scale = expected
        if terms and name.removeprefix("gradient of ") in terms:
            of, axis = terms[name.removeprefix("gradient of ")]
            summed = exact[f"gradient of {of}"].abs()
            scale = summed.sum([other for other in range(summed.dim()) if other != axis])
        assert mine.shape == expected.shape, f"{name}: shape {tuple(mine.shape)}, expected {tuple(expected.shape)}"
        assert mine.dtype == (plain[name].dtype if bf16 else torch.float32), f"{name} is {mine.dtype}"
        per_scale = float(expected.norm() / scale.norm().clamp(min=1e-30))
        rounded = max(1.5 * relative_error(plain[name], expected) * per_scale, roundings * BF16_ROUNDING)
        allowed = rounded if bf16 else FP32_LIMIT
        error = relative_error(mine, expected) * per_scale
        assert error <= allowed, f"{name}: {error:.2e} off, allowed {allowed:.2e}; NEURONSPARK_TEST_SEED={seed}"
    return found


def assert_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor], seed: int) -> None:
    """Both runs gave the same bits."""
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{name} differs; NEURONSPARK_TEST_SEED={seed}"


def assert_capturable(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], weights: Tensor) -> None:
    """A forward and backward pass replayed from a CUDA graph gives the eager bits."""
    eager = run("triton", function, inputs, weights)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        captured = run("triton", function, inputs, weights)
    for tensor in captured.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, tensor in eager.items():
        assert torch.equal(tensor, captured[name]), f"{name} differs in a replayed graph"
