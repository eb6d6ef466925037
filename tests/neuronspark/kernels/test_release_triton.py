"""The quantal neuron's kernels, alone and times a factor, against float64 and against the reference's very bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from neuron_compare import MARGIN, ambiguous, assert_near, assert_same_bits, few_programs, with_gradients
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.partial_sums_triton import sum_partials
from neuronspark.kernels.quantal import release
from neuronspark.kernels.release_product import release_product, release_times

EXCITATORY, SIGNED, WIDE = (0, 4), (-4, 4), (-16, 16)
SHAPES = [(1, 1), (1, 513), (7, 5), (33, 130)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    monkeypatch.setenv("NEURONSPARK_KERNELS", "triton")
    with few_programs(device):
        yield


def reference_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What the PyTorch reference gives for the same input."""
    with monkeypatch.context() as patched:
        patched.setenv("NEURONSPARK_KERNELS", "reference")
        return function(*inputs)


def thresholds(channels: int, device: torch.device) -> Tensor:
    return (torch.rand(channels) - 1).to(device)


def draw(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def alone(levels: tuple[int, int]) -> Callable[..., Tensor]:
    return lambda u, log_theta: release(u, log_theta, *levels, MARGIN)


def product(u: Tensor, log_theta: Tensor, b: Tensor, log_theta_b: Tensor) -> Tensor:
    return release_product(u, log_theta, EXCITATORY, b, log_theta_b, SIGNED, MARGIN)


def times(u: Tensor, log_theta: Tensor, b: Tensor) -> Tensor:
    return release_times(u, log_theta, EXCITATORY, b, MARGIN)


# --- rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [EXCITATORY, SIGNED, WIDE])
@pytest.mark.parametrize("log_theta", [0.0, math.log(0.5), math.log(0.6), -3.0, 1.7])
def test_every_tie_and_its_neighbours_round_as_the_reference(
    levels: tuple[int, int], log_theta: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All multiples of theta / 2 up to 20 theta, and the eight numbers on each side of each."""
    log_theta_C = torch.full((17,), log_theta, device=device)
    theta = log_theta_C.exp()
    exact = torch.arange(-40, 41, device=device)[:, None] * 0.5 * theta
    u = (exact.view(torch.int32) + torch.arange(-8, 9, device=device, dtype=torch.int32)).view(torch.float32)
    u = u.nan_to_num(0.0)  # what lies "below" 0 by its bits is no number
    found = alone(levels)(u, log_theta_C)
    assert torch.equal(found, reference_of(monkeypatch, alone(levels), u, log_theta_C))
    expected = (u / theta).double().round().clamp(*levels).float() * theta
    assert torch.equal(found, expected), "half to even"


def test_ties_go_to_even(device: torch.device) -> None:
    u = torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5, 4.5, 7.0], device=device)[:, None]
    out = release(u, torch.zeros(1, device=device), *SIGNED, MARGIN)
    assert out.flatten().tolist() == [0, 2, 2, 4, 0, -2, -2, -4, 4, 4]


def test_what_is_no_number_stays_none_and_infinity_saturates(device: torch.device) -> None:
    u = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38], device=device)[:, None]
    out = release(u, torch.full((1,), -3.0, device=device), *SIGNED, MARGIN).flatten()
    theta = torch.full((1,), -3.0, device=device).exp().item()
    assert out[0].isnan()
    assert out[1:].tolist() == [4 * theta, -4 * theta, 4 * theta, -4 * theta]


def test_the_window_is_open(device: torch.device) -> None:
    """At its edges exactly the gradient is 0; just inside it passes."""
    u = torch.tensor([-5.0, -4.999, -1.0, -0.999, 4.999, 5.0], device=device)[:, None]
    log_theta = torch.zeros(1, device=device)
    for levels, passes in ((SIGNED, [0, 1, 1, 1, 1, 0]), (EXCITATORY, [0, 0, 0, 1, 1, 0])):
        gradient = with_gradients(alone(levels), [u, log_theta], torch.ones_like(u))[1]
        assert gradient.flatten().tolist() == passes, levels


# --- values: the reference's bits --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [EXCITATORY, SIGNED])
def test_release_has_the_bits_of_the_reference(
    levels: tuple[int, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = draw(shape, dtype, device), thresholds(shape[1], device)
    found = alone(levels)(*inputs)
    assert found.dtype == dtype
    assert torch.equal(found, reference_of(monkeypatch, alone(levels), *inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_have_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, b = draw(shape, dtype, device), draw(shape, dtype, device)
    log_theta, log_theta_b = thresholds(shape[1], device), thresholds(shape[1], device)
    for function, inputs in ((product, (u, log_theta, b, log_theta_b)), (times, (u, log_theta, b))):
        assert torch.equal(function(*inputs), reference_of(monkeypatch, function, *inputs)), function.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_inputs_have_the_bits_of_the_reference(
    dtype: torch.dtype, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 million quotients of as many pairs, each rounded as a division rounds it."""
    launch.use({})
    u, b = draw((16384, 7040), dtype, device), draw((16384, 7040), dtype, device)
    log_theta, log_theta_b = thresholds(7040, device), thresholds(7040, device)
    inputs = (u, log_theta, b, log_theta_b)
    assert torch.equal(product(*inputs), reference_of(monkeypatch, product, *inputs))


# --- gradients against float64 -----------------------------------------------------------------------------


def check_gradients(
    function: Callable[..., Tensor],
    names: list[str],
    inputs: list[Tensor],
    neurons: list[tuple[int, tuple[int, int]]],
    seed: int,
) -> None:
    """`neurons` are (index of a neuron's input, its levels); its log threshold follows it."""
    weights = torch.randn(inputs[0].shape, device=inputs[0].device).to(inputs[0].dtype)
    for index, levels in neurons:
        ratio = inputs[index].double() / inputs[index + 1].double().exp()
        weights = weights.masked_fill(ambiguous(ratio, levels), 0)
    found = with_gradients(function, inputs, weights)
    assert_same_bits(found, with_gradients(function, inputs, weights))
    expected = with_gradients(function, [tensor.double() for tensor in inputs], weights.double())
    assert_near([f"d {name}" for name in names], found[1:], expected[1:], seed)


def check_all(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device, scale: float = 2.0) -> None:
    u, b = draw(shape, dtype, device, scale), draw(shape, dtype, device, scale)
    log_theta, log_theta_b = thresholds(shape[1], device), thresholds(shape[1], device)
    for levels in (EXCITATORY, SIGNED):
        check_gradients(alone(levels), ["u", "log theta"], [u, log_theta], [(0, levels)], seed)
    names = ["u", "log theta", "b", "log theta of b"]
    check_gradients(product, names, [u, log_theta, b, log_theta_b], [(0, EXCITATORY), (2, SIGNED)], seed)
    check_gradients(times, names[:3], [u, log_theta, b], [(0, EXCITATORY)], seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    check_all(shape, dtype, seed, device)


@pytest.mark.parametrize("scale", [1e-3, 1e3], ids=["nothing fires", "all saturate"])
def test_gradients_where_nothing_fires_and_where_all_do(scale: float, seed: int, device: torch.device) -> None:
    check_all((17, 70), torch.float32, seed, device, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4099, 2560), (16384, 7040), (65536, 100), (3, 65536)])
def test_gradients_of_large_inputs(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    launch.use({})
    check_all(shape, dtype, seed, device)


# --- memory ------------------------------------------------------------------------------------------------


def test_columns_of_a_wider_tensor_and_an_expanded_gradient(seed: int, device: torch.device) -> None:
    """What one product of several weights gives, and what a sum sends back."""
    both = draw((11, 2 * 24), torch.float32, device)
    log_theta, log_theta_b = thresholds(24, device), thresholds(24, device)
    apart = [part.contiguous() for part in both.chunk(2, 1)]
    ones = torch.ones(11, 24, device=device)
    expected = with_gradients(product, [apart[0], log_theta, apart[1], log_theta_b], ones)
    leaf = both.clone().requires_grad_()
    u, b = leaf.chunk(2, 1)
    out = product(u, log_theta, b, log_theta_b)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(out, expected[0])
    assert torch.equal(gradient, torch.cat((expected[1], expected[3]), 1))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (1, 128, 16), (2, 300, 40)])
def test_sum_of_partials(shape: tuple[int, int, int], seed: int, device: torch.device) -> None:
    launch.use({})
    partials = torch.randn(shape).to(device)
    sums = sum_partials(partials)
    assert_near(["sums"], [sums], [partials.double().sum(1)], seed)
    assert torch.equal(sums, sum_partials(partials))


def test_few_programs_give_the_sums_of_many(seed: int, device: torch.device) -> None:
    """The gradient of the thresholds does not depend on how the tokens are shared out, but for rounding."""
    inputs = [draw((40, 6), torch.float32, device), thresholds(6, device)]
    weights = torch.randn(40, 6).to(device)
    run = partial(with_gradients, alone(SIGNED), inputs, weights)
    with few_programs(device, 1):
        one = run()
    with few_programs(device, 64):
        many = run()
    assert torch.equal(one[1], many[1])
    assert torch.allclose(one[2], many[2], rtol=1e-4, atol=1e-5)
