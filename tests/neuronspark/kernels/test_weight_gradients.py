"""Weight gradients accumulated in fp32, against float64."""

from __future__ import annotations

import hashlib

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor

from neuronspark.kernels import gradient
from neuronspark.kernels.backend import KERNELS_VARIABLE
from neuronspark.kernels.linear import project, project_onto

SHAPES = [(1, 1, 1), (5, 3, 130), (130, 200, 70), (128, 256, 257)]
"""(tokens, outputs, inputs): one of each, none a multiple of a block, just over one."""
GPU_SHAPES = [(16384, 2560, 640), (4099, 129, 2563), (16384, 80, 2560)]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


MOST = 5e-5
"""Relative error: fp32 sums over 16,384 tokens inside a matrix unit reach 2e-5; a product rounded to bf16 has 2e-3."""


def check(tokens: int, outputs: int, inputs: int, seed: int, device: torch.device) -> None:
    """dY is a slice of a wider tensor, X every second row of another; the total lies inside a flat buffer."""
    dy_TO = bf16(tokens, outputs + 8, device=device)[:, 8:]
    x_TI = bf16(2 * tokens, inputs, device=device)[::2]
    flat = torch.randn(64 + outputs * inputs + 64, device=device)
    before = flat.clone()
    total_OI = flat[64:-64].view(outputs, inputs)
    expected = total_OI.double() + dy_TO.double().t() @ x_TI.double()
    gradient.add_product(total_OI, dy_TO.t(), x_TI)
    error = relative_error(total_OI, expected)
    assert error < MOST, f"T {tokens}, O {outputs}, I {inputs}, seed {seed}: relative error {error:.2e}"
    assert torch.equal(flat[:64], before[:64]), "wrote before the weight's part of the buffer"
    assert torch.equal(flat[-64:], before[-64:]), "wrote behind the weight's part of the buffer"


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_sums_against_float64(tokens: int, outputs: int, inputs: int, seed: int, device: torch.device) -> None:
    check(tokens, outputs, inputs, seed, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), GPU_SHAPES)
def test_large_sums_against_float64(tokens: int, outputs: int, inputs: int, seed: int, device: torch.device) -> None:
    check(tokens, outputs, inputs, seed, device)


def test_layers_gradients_reach_main_grad_in_fp32(seed: int, device: torch.device) -> None:
    """A product that was rounded to bf16 on its way would be a hundred times further."""
    x_TI, base_TO = bf16(70, 48, device=device).requires_grad_(), bf16(70, 32, device=device).requires_grad_()
    weights = [bf16(outputs, 48, device=device).requires_grad_() for outputs in (32, 17, 32)]
    for weight in weights:
        weight.main_grad = torch.ones(weight.shape, device=device)  # type: ignore[attr-defined]
    outputs = [*project(x_TI, *weights[:2]), project_onto(base_TO, x_TI, weights[2])]
    gradients = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    for index, (weight, dy_TO) in enumerate(zip(weights, gradients, strict=True)):
        assert weight.grad is None
        expected = 1 + dy_TO.double().t() @ x_TI.detach().double()
        error = relative_error(weight.main_grad, expected)  # type: ignore[attr-defined]
        assert error < MOST, f"weight {index}, seed {seed}: relative error {error:.2e}"
    dx_TI = sum(dy_TO.double() @ weight.detach().double() for weight, dy_TO in zip(weights, gradients, strict=True))
    assert x_TI.grad is not None
    assert relative_error(x_TI.grad, dx_TI) < 1e-2  # type: ignore[arg-type]


def test_weight_without_main_grad_receives_its_gradient(seed: int, device: torch.device) -> None:
    x_TI, weight = bf16(33, 20, device=device), bf16(9, 20, device=device).requires_grad_()
    (y_TO,) = project(x_TI, weight)
    dy_TO = torch.randn_like(y_TO)
    y_TO.backward(dy_TO)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert relative_error(weight.grad, dy_TO.double().t() @ x_TI.double()) < 1e-2, f"seed {seed}"


@pytest.mark.parametrize("held", [0.0, 3.0, float("nan")])
def test_put_product_forgets_what_was_there(held: float, seed: int, device: torch.device) -> None:
    left_MT, right_TN = bf16(40, 9, device=device).t(), bf16(40, 21, device=device)
    total_MN = torch.full((9, 21), held, device=device)
    gradient.put_product(total_MN, left_MT, right_TN)
    assert relative_error(total_MN, left_MT.double() @ right_TN.double()) < MOST, f"seed {seed}"


def test_same_bits_again(seed: int, device: torch.device) -> None:
    size = 2048 if device.type == "cuda" else 130
    dy_TO, x_TI = bf16(size, 129, device=device), bf16(size, 136, device=device)
    digests = set()
    for _ in range(3):
        total_OI = torch.ones(129, 136, device=device)
        gradient.add_product(total_OI, dy_TO.t(), x_TI)
        digests.add(hashlib.sha256(total_OI.cpu().numpy().tobytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [80, 2560])
def test_graph_gives_the_bits_of_eager(outputs: int, seed: int, device: torch.device) -> None:
    dy_TO, x_TI = bf16(4096, outputs, device=device), bf16(4096, 2560, device=device)
    eager, captured = (torch.ones(outputs, 2560, device=device) for _ in range(2))
    for _ in range(3):
        gradient.add_product(eager, dy_TO.t(), x_TI)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        gradient.add_product(captured, dy_TO.t(), x_TI)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradient.add_product(captured, dy_TO.t(), x_TI)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
