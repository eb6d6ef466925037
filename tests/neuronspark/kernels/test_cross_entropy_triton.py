"""The head's kernels against float64 and, in bf16, against the error that the bf16 reference has itself."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels import cross_entropy_triton, launch
from neuronspark.kernels.backend import KERNELS_VARIABLE
from neuronspark.kernels.cross_entropy import IGNORED, linear_cross_entropy, token_cross_entropy
from neuronspark.kernels.launch import ANY, Launch

SHAPES = [(1, 3, 1), (17, 7, 5), (33, 1003, 12), (50, 8192, 8), (19, 8200, 16), (16, 20001, 3)]
"""(tokens, vocabulary, width): below, at, just over and far over a sweep's block; odd rows; chunks of 16 tokens."""
BF16_SHAPES = [(17, 7, 5), (33, 1003, 12), (4, 8200, 16)]
GPU_SHAPES = [(4099, 130_560, 256), (3328, 50_257, 128)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch._in_use, cross_entropy_triton.CHUNK, {ANY: Launch({"TOKENS": 16}, 1)})


class Case(NamedTuple):
    h: Tensor
    table: Tensor
    targets: Tensor
    scale: Tensor
    z_weight: float


class Results(NamedTuple):
    loss: Tensor
    ce_sum: Tensor
    z_sum: Tensor
    dh: Tensor
    dtable: Tensor


def draw(tokens: int, vocabulary: int, width: int, dtype: torch.dtype, z_weight: float, device: torch.device) -> Case:
    """Logits of some size (their standard deviation is 3), every third target ignored, but never all."""
    h_Td = torch.randn(tokens, width, device=device) * (3 / width**0.5)
    table_Vd = torch.randn(vocabulary, width, device=device)
    targets_T = torch.randint(0, vocabulary, (tokens,), device=device)
    targets_T[1::3] = IGNORED
    return Case(h_Td.to(dtype), table_Vd.to(dtype), targets_T, torch.tensor([0.37 / tokens], device=device), z_weight)


DLOSS = 0.7
"""The gradient that the loss is given: not the 1 of a plain backward."""


def computed(case: Case, main: Tensor | None = None) -> Results:
    """Our operator's values and gradients; with `main`, the table's gradient is what was added to that."""
    h_Td, table_Vd = (tensor.detach().clone().requires_grad_() for tensor in (case.h, case.table))
    if main is not None:
        table_Vd.main_grad = main.clone()  # type: ignore[attr-defined]
    loss, ce_sum, z_sum = linear_cross_entropy(h_Td, table_Vd, case.targets, case.scale, case.z_weight)
    loss.sum().mul(DLOSS).backward()
    assert h_Td.grad is not None
    dtable = table_Vd.grad if main is None else table_Vd.main_grad - main  # type: ignore[attr-defined]
    assert dtable is not None
    assert (table_Vd.grad is None) == (main is not None)
    return Results(loss.detach(), ce_sum, z_sum, h_Td.grad, dtable)


def in_float64(case: Case) -> Results:
    """The same by plain torch in float64, from the inputs as they are."""
    h_Td, table_Vd = (tensor.detach().double().requires_grad_() for tensor in (case.h, case.table))
    logits_TV = h_Td @ table_Vd.t()
    real_T = case.targets != IGNORED
    ce = functional.cross_entropy(logits_TV[real_T], case.targets[real_T], reduction="sum")
    z_sum = case.z_weight * logits_TV[real_T].logsumexp(1).square().sum()
    loss = case.scale.double() * (ce + z_sum)
    loss.sum().mul(DLOSS).backward()
    assert h_Td.grad is not None
    assert table_Vd.grad is not None
    return Results(loss.detach(), ce.detach(), z_sum.detach(), h_Td.grad, table_Vd.grad)


def errors(found: Results, expected: Results) -> dict[str, float]:
    return {name: relative_error(getattr(found, name), getattr(expected, name)) for name in Results._fields}


def check_fp32(case: Case, seed: int) -> None:
    expected = in_float64(case)
    main = torch.zeros_like(case.table)
    for where, found in (("grad", computed(case)), ("main_grad", computed(case, main))):
        for name, error in errors(found, expected).items():
            assert error < 1e-5, f"{name} ({where}), {tuple(case.table.shape)}, seed {seed}: {error:.2e}"


def check_bf16(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.5 times as far from float64 as the bf16 reference, and 1e-3 for luck (one rounding is 4e-3)."""
    expected = in_float64(case)
    main = torch.zeros(case.table.shape, device=case.table.device)
    ours = errors(computed(case, main), expected)
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    theirs = errors(computed(case, main), expected)
    for name, error in ours.items():
        told = f"{name}, {tuple(case.table.shape)}, seed {seed}: {error:.2e}, the reference {theirs[name]:.2e}"
        assert error < 1.5 * theirs[name] + 1e-3, told


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("z_weight", [0.0, 0.05])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_against_float64(shape: tuple[int, int, int], z_weight: float, seed: int, device: torch.device) -> None:
    check_fp32(draw(*shape, torch.float32, z_weight, device), seed)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("z_weight", [0.0, 0.05])
@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_against_float64(
    shape: tuple[int, int, int], z_weight: float, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bf16(draw(*shape, torch.bfloat16, z_weight, device), seed, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_large_shapes_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = draw(*shape, dtype, 1e-4, device)
    if dtype == torch.float32:
        check_fp32(case, seed)
    else:
        check_bf16(case, seed, monkeypatch)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4]])
def test_token_losses(shape: tuple[int, int, int], seed: int, device: torch.device) -> None:
    case = draw(*shape, torch.float32, 0.0, device)
    found = token_cross_entropy(case.h, case.table, case.targets)
    logits_TV = case.h.double() @ case.table.double().t()
    expected = functional.cross_entropy(logits_TV, case.targets, reduction="none", ignore_index=IGNORED)
    assert relative_error(found, expected) < 1e-5, f"seed {seed}"
    assert not found[case.targets == IGNORED].any()


def test_without_targets_everything_is_zero(device: torch.device) -> None:
    """Even where the logits overflow: a padding token's row is not read."""
    case = draw(5, 50, 4, torch.float32, 0.1, device)
    case = case._replace(h=torch.full_like(case.h, 3e38), targets=torch.full_like(case.targets, IGNORED))
    found = computed(case, torch.zeros_like(case.table))
    assert [name for name in Results._fields if getattr(found, name).any()] == []


def test_large_logits_are_exact(device: torch.device) -> None:
    h_Td = torch.tensor([[1e4, 0.0]], device=device, requires_grad=True)
    table_Vd = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device, requires_grad=True)
    targets_T = torch.tensor([1], device=device)
    loss, *_ = linear_cross_entropy(h_Td, table_Vd, targets_T, torch.tensor(1.0, device=device), 0.0)
    loss.backward()
    assert loss.item() == 2e4
    assert h_Td.grad is not None
    assert h_Td.grad.tolist() == [[2.0, 0.0]]


def test_equal_logits_of_any_height(device: torch.device) -> None:
    """A log-sum-exp formed from unshifted exponentials would overflow, one that starts from 0 underflow."""
    for height in (-3e4, 0.0, 3e4):
        h_Td = torch.full((1, 1), height, device=device)
        table_Vd = torch.ones(9000, 1, device=device)
        found = token_cross_entropy(h_Td, table_Vd, torch.tensor([8999], device=device))
        assert abs(found.item() - 9.104979856) < 1e-5


def test_nan_reaches_the_loss(device: torch.device) -> None:
    case = draw(4, 9000, 4, torch.float32, 0.0, device)
    case.table[8500] = float("nan")
    loss, *_ = linear_cross_entropy(case.h, case.table, case.targets, case.scale, 0.0)
    assert loss.isnan().all()


def test_only_a_backward_changes_main_grad_and_each_adds_the_same(device: torch.device) -> None:
    case = draw(20, 40, 6, torch.bfloat16, 0.0, device)
    h_Td, table_Vd = case.h.requires_grad_(), case.table.requires_grad_()
    main = torch.zeros(40, 6, device=device)
    table_Vd.main_grad = main  # type: ignore[attr-defined]
    loss, *_ = linear_cross_entropy(h_Td, table_Vd, case.targets, case.scale, 0.0)
    assert not main.any()
    loss.sum().backward(retain_graph=True)
    assert h_Td.grad is not None
    first, first_dh = main.clone(), h_Td.grad.clone()
    assert first.any()
    main.zero_()
    h_Td.grad = None
    loss.sum().backward()
    assert torch.equal(main, first)
    assert torch.equal(h_Td.grad, first_dh)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_again(dtype: torch.dtype, seed: int, device: torch.device) -> None:
    case = draw(50, 1003, 12, dtype, 0.01, device)
    first, second = (computed(case, torch.zeros(1003, 12, device=device)) for _ in range(2))
    for name in Results._fields:
        assert torch.equal(getattr(first, name), getattr(second, name)), f"{name}, seed {seed}"


@pytest.mark.gpu
def test_tokens_times_vocabulary_is_never_held(device: torch.device) -> None:
    """Above the inputs and main_grad: one chunk's logits, dE in fp32, dh twice and a little."""
    tokens, vocabulary, width = 16384, 130_560, 512
    case = draw(tokens, vocabulary, width, torch.bfloat16, 0.0, device)
    main = torch.zeros(vocabulary, width, device=device)
    h_Td, table_Vd = case.h.requires_grad_(), case.table.requires_grad_()
    table_Vd.main_grad = main  # type: ignore[attr-defined]
    # Once on a few tokens: the products' workspaces are there for good.
    few = linear_cross_entropy(h_Td[:64], table_Vd, case.targets[:64], case.scale, 0.0)[0]
    few.sum().backward()
    h_Td.grad = few = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, *_ = linear_cross_entropy(h_Td, table_Vd, case.targets, case.scale, 0.0)
    loss.sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    chunk = launch.pinned(cross_entropy_triton.CHUNK, h_Td.device).blocks["TOKENS"]
    allowed = chunk * vocabulary * 2 + vocabulary * width * 4 + 3 * tokens * width * 2 + (256 << 20)
    assert used < allowed, f"{used >> 20} MiB, expected at most {allowed >> 20} MiB"


@pytest.mark.gpu
def test_graph_gives_the_bits_of_eager(seed: int, device: torch.device) -> None:
    """The scale and the targets are read at the replay: both are changed between capture and replay."""
    case = draw(5000, 20_000, 256, torch.bfloat16, 1e-3, device)
    h_Td, table_Vd = case.h.requires_grad_(), case.table.requires_grad_()
    main = torch.zeros(table_Vd.shape, device=device)
    table_Vd.main_grad = main  # type: ignore[attr-defined]
    h_Td.grad = torch.zeros_like(h_Td)
    static = torch.empty(3, device=device)

    def run() -> None:
        loss, ce_sum, z_sum = linear_cross_entropy(h_Td, table_Vd, case.targets, case.scale, case.z_weight)
        loss.sum().backward()
        static.copy_(torch.stack([loss.detach().sum(), ce_sum, z_sum]))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        case.scale.mul_(1.37)
        case.targets.copy_(case.targets.roll(1))
        results = []
        for again in (run, graph.replay):
            main.zero_()
            h_Td.grad.zero_()
            again()
            torch.cuda.synchronize()
            results.append((static.clone(), h_Td.grad.clone(), main.clone()))
    for name, eager, replayed in zip(("losses", "dh", "dtable"), *results, strict=True):
        assert torch.equal(eager, replayed), f"{name}, seed {seed}"
