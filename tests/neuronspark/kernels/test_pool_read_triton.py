"""The pool read's kernels against float64 and, in bf16, against the error that the bf16 reference has itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels import launch
from neuronspark.kernels import pool_read_triton as pool_read_triton_module
from neuronspark.kernels.backend import KERNELS_VARIABLE
from neuronspark.kernels.pool_read import pool_read
from neuronspark.kernels.pool_read_triton import CANDIDATES, address_parts, pool_read_triton

NAMES = ("read", "dquery", "dkey", "dvalue", "dstep", "dlog_write")
FP32_LIMIT = 2e-5
"""Logits of about 10 with an error of an fp32 rounding or two: weights, and what is summed with them, at 1e-6 each."""
LONG_CLOCK_LIMIT = 0.01
SHORT_CLOCK_LIMIT = 0.03
"""The clock's gradient sums what nearly cancels over a row; the design allows 1 % of it."""

SHAPES = [(1, 2, 70, 96, 64), (2, 1, 65, 80, 64), (1, 1, 129, 64, 32), (1, 1, 33, 160, 128)]
"""(rows, heads, tokens, address, value): addresses of two parts and of one; rows over and below a block's end."""
ODD_SHAPES = [(1, 2, 20, 6, 4), (1, 1, 40, 27, 13), (1, 1, 17, 112, 40)]
"""Widths that no tile and no 16-byte load fits."""
GPU_SHAPES = [
    (2, 5, 1000, 96, 64),
    (1, 3, 4096, 96, 64),
    (1, 3, 2049, 160, 128),
    (3, 2, 777, 80, 64),
    (1, 2, 1500, 64, 32),
    (1, 2, 640, 112, 40),
]


class Case(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    clock_step: Tensor
    log_write: Tensor
    dread: Tensor


class Results(NamedTuple):
    read: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dstep: Tensor
    dlog_write: Tensor


def draw(
    shape: tuple[int, int, int, int, int], rate: float, dtype: torch.dtype, device: torch.device, spread: float = 4.0
) -> Case:
    """Logits of standard deviation `spread`; clock steps of about `rate`; q, k, v and dread in dtype."""
    rows, heads, tokens, address, value = shape
    scale = (spread / address**0.5) ** 0.5

    def normal(*widths: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, heads, tokens, *widths, device=device) * scale

    return Case(
        normal(address, scale=scale).to(dtype),
        normal(address, scale=scale).to(dtype),
        normal(value).to(dtype),
        rate * functional.softplus(normal()),
        functional.logsigmoid(3 + normal()),
        normal(value).to(dtype),
    )


def run(function: Callable[..., Tensor], case: Case, dtype: torch.dtype | None = None) -> Results:
    """The read and every gradient; all inputs first converted to dtype if one is given."""
    case = Case(*(tensor if dtype is None else tensor.to(dtype) for tensor in case))
    leaves = [tensor.detach().requires_grad_() for tensor in case[:5]]
    read = function(*leaves)
    return Results(read.detach(), *torch.autograd.grad(read, leaves, case.dread))


def reference(case: Case, dtype: torch.dtype | None = None) -> Results:
    """The PyTorch operator, whatever the environment chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, "reference")
        return run(pool_read, case, dtype)


def compare(case: Case, seed: int) -> None:
    """Every result within the limit of its type of float64; the message names what is not."""
    found, expected = run(pool_read_triton, case), reference(case, torch.float64)
    limits = [FP32_LIMIT] * 6
    if case.query.dtype == torch.bfloat16:
        own = reference(case)
        limits = [1.5 * relative_error(*pair) + 1e-6 for pair in zip(own, expected, strict=True)]
        # A clock's gradient is what is left of sums that nearly cancel; over a few tokens that varies with the draw.
        limits[4] = max(limits[4], SHORT_CLOCK_LIMIT)
    wrong = [
        f"{name}: error {error:.2e}, limit {limit:.2e}"
        for name, mine, true, limit in zip(NAMES, found, expected, limits, strict=True)
        if not (error := relative_error(mine, true)) <= limit
    ]
    shape = (*case.query.shape, case.value.shape[-1])
    assert not wrong, f"shape {shape}, {case.query.dtype}, seed {seed}: {'; '.join(wrong)}"
    assert [mine.dtype for mine in found] == [like.dtype for like in (case.value, *case[:5])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16(shape: tuple[int, int, int, int, int], device: torch.device, seed: int) -> None:
    compare(draw(shape, 0.05, torch.bfloat16, device), seed)


@pytest.mark.parametrize(("tokens", "rate"), [(67, 1e-4), (40, 1.0)])
def test_fp32(tokens: int, rate: float, device: torch.device, seed: int) -> None:
    compare(draw((1, 1, tokens, 96, 64), rate, torch.float32, device), seed)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_widths_that_no_tile_fits(shape: tuple[int, int, int, int, int], device: torch.device, seed: int) -> None:
    compare(draw(shape, 0.3, torch.float32, device), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [1e-4, 0.02, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_larger_shapes(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, rate: float, device: torch.device, seed: int
) -> None:
    compare(draw(shape, rate, dtype, device), seed)


@pytest.mark.parametrize("width", [16, 17, 31, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 3])
def test_an_address_has_two_parts_at_most(width: int) -> None:
    first, rest = address_parts(width)
    assert first + rest == width
    assert rest < first or rest == 0
    assert first <= 16 or first & (first - 1) == 0


def test_a_single_token_reads_itself(device: torch.device, seed: int) -> None:
    case = draw((2, 2, 1, 96, 64), 1.0, torch.bfloat16, device)
    found = run(pool_read_triton, case)
    assert torch.equal(found.read, case.value)
    assert torch.equal(found.dvalue, case.dread)
    for name in ("dquery", "dkey", "dstep", "dlog_write"):
        largest = getattr(found, name).abs().max()
        assert largest < 1e-4, f"{name} is {largest}, expected 0, seed {seed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_clock_of_1e5_a_token(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Every token reads itself, in every block of the row, and nothing overflows."""
    case = draw((1, 1, 131 if dtype == torch.bfloat16 else 40, 32, 16), 1.0, dtype, device)
    case = case._replace(clock_step=torch.full_like(case.clock_step, 1e5), log_write=torch.zeros_like(case.log_write))
    found = run(pool_read_triton, case)
    most = 0.0 if dtype == torch.bfloat16 else 1e-6  # fp32 is three products of TF32 on a card
    assert relative_error(found.read, case.value) <= most
    assert relative_error(found.dvalue, case.dread) <= most
    for name in ("dquery", "dkey", "dstep", "dlog_write"):
        largest = getattr(found, name).abs().max()
        assert largest < 1e-3, f"{name} is {largest}, expected 0, seed {seed}"


def test_a_clock_that_has_run_to_1e5(device: torch.device, seed: int) -> None:
    """Steps far below fp32's resolution at 1e5 still count: fp32 sums of the clock would be wrong by 4e-3 a logit."""
    case = draw((1, 1, 76, 32, 16), 1e-3, torch.float32, device)
    case.clock_step[..., 0] = 1e5
    case.clock_step[..., 64] = 3e4
    compare(case, seed)


def clock_error(tokens: int, rate: float, dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of the clock's gradient over a row."""
    case = draw((1, 2, tokens, 32, 16), rate, dtype, device)
    return relative_error(run(pool_read_triton, case).dstep, reference(case, torch.float64).dstep)


@pytest.mark.parametrize("rate", [1e-4, 0.02, 1.0])
def test_the_clocks_gradient_over_a_row(rate: float, device: torch.device, seed: int) -> None:
    error = clock_error(300, rate, torch.bfloat16, device)
    assert error < LONG_CLOCK_LIMIT, f"rate {rate}, seed {seed}: {error:.3e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rate", [1e-4, 0.02, 1.0])
def test_the_clocks_gradient_over_32k(rate: float, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    error = clock_error(32768, rate, dtype, device)
    assert error < LONG_CLOCK_LIMIT, f"rate {rate}, {dtype}, seed {seed}: {error:.3e}"


@pytest.mark.gpu
def test_a_row_of_65536_tokens(device: torch.device, seed: int) -> None:
    compare(draw((1, 1, 65536, 96, 64), 1e-3, torch.bfloat16, device), seed)


def test_same_bits_twice_and_whatever_the_strides(device: torch.device, seed: int) -> None:
    """Heads beside tokens, controls of all heads side by side, a gradient that is one number expanded."""
    case = draw((2, 2, 70, 32, 32), 0.1, torch.bfloat16, device)
    first, second = run(pool_read_triton, case), run(pool_read_triton, case)
    turned = Case(*(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in case))
    assert not turned.query.is_contiguous()
    assert not turned.clock_step.is_contiguous()
    for name, mine, again, other in zip(NAMES, first, second, run(pool_read_triton, turned), strict=True):
        assert torch.equal(mine, again), f"{name} differs between two runs, seed {seed}"
        assert torch.equal(mine, other), f"{name} differs with the strides, seed {seed}"

    one = torch.ones((), dtype=torch.bfloat16, device=device).expand_as(case.dread)
    expanded, whole = (run(pool_read_triton, case._replace(dread=dread)) for dread in (one, one.contiguous()))
    assert all(torch.equal(mine, other) for mine, other in zip(expanded, whole, strict=True))


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int) -> None:
    case = draw((1, 1, 9, 32, 16), 0.1, torch.bfloat16, device)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    assert all(torch.equal(*pair) for pair in zip(run(pool_read, case), run(pool_read_triton, case), strict=True))
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    assert all(torch.equal(*pair) for pair in zip(run(pool_read, case), reference(case), strict=True))


def test_more_rows_than_a_grid_has_are_several_launches(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int
) -> None:
    """In a grid's second direction: 1,639 rows of 40 heads are too many."""
    case = draw((3, 2, 5, 16, 16), 0.02, torch.float32, device)
    at_once = run(pool_read_triton, case)
    monkeypatch.setattr(pool_read_triton_module, "GRID_LIMIT", 5)
    sizes = []
    start = pool_read_triton_module._start
    monkeypatch.setattr(
        pool_read_triton_module, "_start", lambda *of: sizes.append(of[3].shape[0] * of[3].shape[1]) or start(*of)
    )
    for name, mine, other in zip(NAMES, run(pool_read_triton, case), at_once, strict=True):
        assert torch.equal(mine, other), f"{name}, seed {seed}"
    assert sorted(sizes) == [2, 2, 2, 4, 4, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("width_class", [64, 128])
@pytest.mark.parametrize("choice", [1, 2, 3, 4, 5])
def test_every_candidate_is_right(
    choice: int, width_class: int, monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int
) -> None:
    for kernel in ("forward", "query_gradient", "key_gradient"):
        name = f"pool_read_{kernel}/{width_class}"
        monkeypatch.setitem(launch._in_use, name, {launch.ANY: CANDIDATES[name][choice % len(CANDIDATES[name])]})
    compare(draw((2, 3, 700, width_class + 32, width_class), 0.02, torch.bfloat16, device), seed)


@pytest.mark.gpu
def test_a_captured_graph_gives_the_same_bits(device: torch.device, seed: int) -> None:
    case = draw((2, 4, 500, 96, 64), 0.02, torch.bfloat16, device)
    eager = run(pool_read_triton, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(pool_read_triton, case)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    for name, mine, other in zip(NAMES, captured, eager, strict=True):
        assert torch.equal(mine, other), f"{name}, seed {seed}"
