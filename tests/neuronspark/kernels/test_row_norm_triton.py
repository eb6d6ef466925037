"""The kernels of RMSNorm, alone and joined to a gate and a neuron, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from neuron_compare import (
    BF16_ROUNDING,
    MARGIN,
    TIE,
    ambiguous,
    assert_near,
    assert_same_bits,
    few_programs,
    with_gradients,
)
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.gated_norm import gated_norm
from neuronspark.kernels.gated_release import gated_release
from neuronspark.kernels.norm_release import norm_release
from neuronspark.kernels.rmsnorm import rms_norm

EPS = 1e-6
LEVELS = (-4, 4)
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [(1, 640), (7, 5), (5, 130), (4, 1300), (2, 4100)]
GROUPED = [(1, 1), (1, 2, 1, 8), (40, 2, 1, 64), (5, 2, 3, 5), (3, 7, 130)]
HEADS = [(3, 2, 64), (13, 5, 8), (5, 20, 12), (4, 3, 130)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    monkeypatch.setenv("NEURONSPARK_KERNELS", "triton")
    with few_programs(device):
        yield


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def gains(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return (torch.rand(shape) + 0.5).to(device)


def thresholds(channels: int, device: torch.device) -> Tensor:
    return (torch.rand(channels) - 1).to(device)


def fused_norm(x: Tensor, gain: Tensor, log_theta: Tensor) -> Tensor:
    return norm_release(x, gain, EPS, log_theta, LEVELS, MARGIN)


def fused_gate(y: Tensor, z: Tensor, gain: Tensor, log_theta: Tensor) -> Tensor:
    return gated_release(y, z, gain, EPS, log_theta, LEVELS, MARGIN)


# --- the norm alone ----------------------------------------------------------------------------------------


def check_norm(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    inputs = [draw(shape, dtype, device) * 3, gains(shape[1:], device)]
    weights = draw(shape, dtype, device)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain, EPS)

    found = with_gradients(norm, inputs, weights)
    assert_same_bits(found, with_gradients(norm, inputs, weights))
    expected = with_gradients(norm, [tensor.double() for tensor in inputs], weights)
    assert found[0].dtype == dtype
    if shape[-1] == 1:  # its gradient is all but 0: what remains of 1 - x^2 / (x^2 + eps) is rounding
        assert (found[1].double() - expected[1]).abs().max() < 1e-2
        del found[1], expected[1]
        assert_near(["out", "d gain"], found, expected, seed)
    else:
        assert_near(["out", "d x", "d gain"], found, expected, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ROWS, *GROUPED])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    check_norm(shape, dtype, seed, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 2560), (16384, 2048), (4099, 7040), (65536, 2, 1, 64), (16384, 32)])
def test_rms_norm_of_large_inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    launch.use({})
    check_norm(shape, dtype, seed, device)


def test_rows_of_zeros_and_of_tiny_numbers(device: torch.device) -> None:
    """The mean square is 0 or far below eps: the result is x gain / sqrt(eps), and nothing divides by 0."""
    x = torch.zeros(3, 40)
    x[1] = 1e-6
    x[2] = 1e-20
    inputs = [x.to(device), gains((40,), device)]
    found = with_gradients(lambda x, gain: rms_norm(x, gain, EPS), inputs, torch.ones(3, 40, device=device))
    expected = with_gradients(
        lambda x, gain: rms_norm(x, gain, EPS), [t.double() for t in inputs], torch.ones(3, 40, device=device)
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), other, rtol=1e-5, atol=0)


def test_a_number_that_is_none_makes_its_row_none_and_no_other(device: torch.device) -> None:
    x = draw((4, 40), torch.float32, device)
    x[2, 7] = float("nan")
    for out in (
        rms_norm(x, gains((40,), device), EPS),
        fused_norm(x, gains((40,), device), thresholds(40, device)),
    ):
        assert out[2].isnan().all()
        assert not out[[0, 1, 3]].isnan().any()


# --- norm and neuron ---------------------------------------------------------------------------------------


def check_fused(
    fused: Callable[..., Tensor],
    norm: Callable[..., Tensor],
    names: list[str],
    inputs: list[Tensor],
    seed: int,
    device: torch.device,
) -> None:
    """`inputs` end with gain and log threshold; `norm` is the fused operator without its neuron."""
    exact = [tensor.double() for tensor in inputs]
    theta = exact[-1].exp()
    ratio = norm(*exact[:-1]).flatten(1) / theta
    expected_quanta = ratio.round().clamp(*LEVELS)

    out = fused(*inputs)
    quanta = (out.double() / theta).round()
    flipped = quanta != expected_quanta
    distance = (ratio - ratio.floor() - 0.5).abs()[flipped]
    where = f"NEURONSPARK_TEST_SEED={seed}"
    assert (distance < TIE).all(), f"quanta differ {distance.max():.1e} from a tie, {where}"
    assert flipped.sum() <= 2 + 1e-5 * flipped.numel(), f"{flipped.sum()} of {flipped.numel()} flipped, {where}"
    one_rounding = 2**-8 if out.dtype == torch.bfloat16 else 1e-6
    off = (out.double() - quanta * theta).abs()
    assert (off <= one_rounding * (quanta * theta).abs()).all(), f"not theta * n rounded, {where}"

    weights = draw(tuple(out.shape), out.dtype, device).masked_fill(ambiguous(ratio, LEVELS), 0)
    found = with_gradients(fused, inputs, weights)
    assert_same_bits(found, with_gradients(fused, inputs, weights))
    expected = with_gradients(fused, exact, weights)
    assert_near(names, found[1:], expected[1:], seed, fp32=2e-5)


def check_norm_release(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    inputs = [draw(shape, dtype, device), gains(shape[1:], device), thresholds(shape[1], device)]
    names = ["d x", "d gain", "d log theta"]
    check_fused(fused_norm, lambda x, gain: rms_norm(x, gain, EPS), names, inputs, seed, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_norm_release(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    check_norm_release(shape, dtype, seed, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 2560), (4099, 2048), (1000, 5120)])
def test_norm_release_of_large_inputs(
    shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    launch.use({})
    check_norm_release(shape, dtype, seed, device)


def check_gated_release(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    y, z = draw(shape, dtype, device), draw(shape, dtype, device)
    _, heads, compartments = shape
    inputs = [y, z, gains(shape[1:], device), thresholds(heads * compartments, device)]
    names = ["d y", "d z", "d gain", "d log theta"]
    check_fused(fused_gate, lambda y, z, gain: gated_norm(y, z, gain, EPS), names, inputs, seed, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", HEADS)
def test_gated_release(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    check_gated_release(shape, dtype, seed, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 80, 64), (4099, 64, 64), (70, 3, 256)])
def test_gated_release_of_large_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    launch.use({})
    check_gated_release(shape, dtype, seed, device)


def test_gates_far_open_and_far_shut(device: torch.device) -> None:
    """silu(z) is z, or 0, and nothing overflows in it or in its gradient."""
    z = torch.tensor([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4, 1.0], device=device).expand(3, 1, 8).contiguous()
    inputs = [draw((3, 1, 8), torch.float32, device), z, gains((1, 8), device), thresholds(8, device)]
    weights = torch.ones(3, 8, device=device)
    found = with_gradients(fused_gate, inputs, weights)
    assert all(result.isfinite().all() for result in found)


def test_saved_memory(seed: int, device: torch.device) -> None:
    """The backward keeps the inputs and one number a group: nothing else as large as the input."""
    y, z = (draw((6, 4, 16), torch.bfloat16, device).requires_grad_() for _ in range(2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        fused_gate(y, z, gains((4, 16), device), thresholds(64, device))
    own = {y.data_ptr(), z.data_ptr()}
    others = [t for t in kept if t.data_ptr() not in own]
    assert sorted(t.numel() for t in others) == [24, 64, 64]


# --- memory ------------------------------------------------------------------------------------------------


def test_columns_of_a_wider_tensor_and_an_expanded_gradient(seed: int, device: torch.device) -> None:
    """What one product of several weights gives, and what a sum sends back."""
    both = draw((11, 2 * 24), torch.float32, device)
    gain, log_theta = gains((3, 8), device), thresholds(24, device)
    parts = [part.reshape(11, 3, 8) for part in both.chunk(2, 1)]
    expected = with_gradients(fused_gate, [*parts, gain, log_theta], torch.ones(11, 24, device=device))
    leaf = both.clone().requires_grad_()
    y, z = (part.unflatten(1, (3, 8)) for part in leaf.chunk(2, 1))
    out = fused_gate(y, z, gain, log_theta)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(out, expected[0])
    assert torch.equal(gradient, torch.cat((expected[1].flatten(1), expected[2].flatten(1)), 1))


def test_16_bit_error_is_one_rounding(seed: int, device: torch.device) -> None:
    """The norm of 16-bit numbers is the fp32 result rounded once."""
    x, gain = draw((20, 64), torch.bfloat16, device), gains((64,), device)
    found = rms_norm(x, gain, EPS)
    expected = rms_norm(x.double(), gain.double(), EPS)
    assert ((found.double() - expected).abs() <= expected.abs() * BF16_ROUNDING).all()
