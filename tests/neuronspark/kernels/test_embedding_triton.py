"""The embedding's gradient by sorted runs, against a float64 sum."""

from __future__ import annotations

import hashlib

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor

from neuronspark.kernels.backend import KERNELS_VARIABLE
from neuronspark.kernels.embedding import lookup
from neuronspark.kernels.embedding_triton import WINDOW

VOCABULARY = 300
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")


def shuffled(*runs: int) -> Tensor:
    """Tokens of which the first has as many places as the first number says, and so on, in random order."""
    tokens = torch.repeat_interleave(torch.arange(len(runs)) * 7 % VOCABULARY, torch.tensor(runs))
    return tokens[torch.randperm(len(tokens))]


CASES = {
    "one token": lambda: torch.tensor([VOCABULARY - 1]),
    "all equal, three windows and a bit": lambda: torch.full((3 * WINDOW + 5,), 4),
    "all equal, one window": lambda: torch.zeros(WINDOW, dtype=torch.int64),
    "all equal, more windows than a step combines": lambda: torch.full((18 * WINDOW + 1,), 2),
    "all distinct": lambda: torch.randperm(VOCABULARY)[:150],
    "runs that end at windows' ends": lambda: shuffled(WINDOW, 2 * WINDOW, WINDOW),
    "runs that end one before and one behind": lambda: shuffled(WINDOW - 1, 2, WINDOW - 1, 2 * WINDOW, 1),
    "two long runs meet in a window": lambda: shuffled(WINDOW + 9, 2 * WINDOW + 3, 5),
    "few tokens": lambda: torch.randint(0, 3, (257,)),
    "many tokens": lambda: torch.randint(0, VOCABULARY, (200,)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), ("few tokens", torch.float32)]
)
def test_adds_to_main_grad(name: str, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Rows without a token keep their bits; the gradient comes as a view whose columns are not adjacent."""
    tokens_T, width = CASES[name]().to(device), 37
    table_Vd = torch.randn(VOCABULARY, width, device=device).to(dtype).requires_grad_()
    flat = torch.randn(64 + VOCABULARY * width, device=device)
    table_Vd.main_grad = flat[64:].view(VOCABULARY, width)  # type: ignore[attr-defined]
    before = flat.clone()
    dy_Td = torch.randn(width, len(tokens_T), device=device).to(dtype).t()
    found = lookup(table_Vd, tokens_T)
    assert torch.equal(found, table_Vd[tokens_T])
    found.backward(dy_Td)
    assert table_Vd.grad is None
    expected = before[64:].double().view(VOCABULARY, width).index_add(0, tokens_T, dy_Td.double())
    error = relative_error(flat[64:].view(VOCABULARY, width), expected)
    assert error < 1e-6, f"{name}, {dtype}, seed {seed}: relative error {error:.2e}"
    untouched = torch.ones(VOCABULARY, dtype=torch.bool, device=device).index_fill(0, tokens_T, False)
    assert torch.equal(flat[64:].view(VOCABULARY, width)[untouched], before[64:].view(VOCABULARY, width)[untouched])
    assert torch.equal(flat[:64], before[:64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_gradient_without_main_grad(dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Summed in fp32 and rounded once: within half a unit in the last place of bf16."""
    tokens_T = torch.randint(0, 5, (100,), device=device)
    table_Vd = torch.randn(VOCABULARY, 20, device=device).to(dtype).requires_grad_()
    dy_Td = torch.randn(100, 20, device=device).to(dtype)
    lookup(table_Vd, tokens_T).backward(dy_Td)
    expected = torch.zeros(VOCABULARY, 20, dtype=torch.float64, device=device).index_add(0, tokens_T, dy_Td.double())
    assert table_Vd.grad is not None
    assert table_Vd.grad.dtype == dtype
    error = relative_error(table_Vd.grad, expected)
    assert error < (1e-6 if dtype == torch.float32 else 2**-8), f"seed {seed}: relative error {error:.2e}"
    assert not table_Vd.grad[5:].any()


def digest_of_gradient(tokens_T: Tensor, dy_Td: Tensor) -> str:
    main = torch.ones(VOCABULARY, dy_Td.shape[1], device=dy_Td.device)
    table_Vd = torch.zeros_like(main, dtype=dy_Td.dtype).requires_grad_()
    table_Vd.main_grad = main  # type: ignore[attr-defined]
    lookup(table_Vd, tokens_T).backward(dy_Td)
    return hashlib.sha256(main.cpu().numpy().tobytes()).hexdigest()


def test_same_bits_again(seed: int, device: torch.device) -> None:
    tokens = 16384 if device.type == "cuda" else 100
    tokens_T = torch.randint(0, 4, (tokens,), device=device)
    dy_Td = torch.randn(tokens, 40, device=device)
    assert len({digest_of_gradient(tokens_T, dy_Td) for _ in range(3)}) == 1, f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["equal", "distinct", "random"])
def test_training_shape(case: str, seed: int, device: torch.device) -> None:
    tokens, vocabulary, width = 16384, 130_560, 2560
    tokens_T = {
        "equal": torch.full((tokens,), vocabulary - 1),
        "distinct": torch.randperm(vocabulary)[:tokens],
        "random": (torch.rand(tokens) ** 8 * vocabulary).long(),
    }[case].to(device)
    table_Vd = torch.empty(vocabulary, width, device=device, dtype=torch.bfloat16).requires_grad_()
    table_Vd.main_grad = torch.zeros(vocabulary, width, device=device)  # type: ignore[attr-defined]
    dy_Td = torch.randn(tokens, width, device=device).bfloat16()
    peak = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lookup(table_Vd, tokens_T).backward(dy_Td)
    peak = torch.cuda.max_memory_allocated() - peak
    assert peak < 4 * dy_Td.numel() * 2, f"{peak} bytes: a buffer of the table's size would be {vocabulary * width * 4}"
    main: Tensor = table_Vd.main_grad  # type: ignore[attr-defined]
    rows, row_of_token = tokens_T.unique(return_inverse=True)
    expected = torch.zeros(len(rows), width, device=device, dtype=torch.float64)
    for first in range(0, tokens, 1024):  # a few tokens at a time: they add in any order, but in float64
        part = slice(first, first + 1024)
        expected.index_add_(0, row_of_token[part], dy_Td[part].double())
    error = relative_error(main[rows], expected)
    assert error < 1e-6, f"{case}, seed {seed}: relative error {error:.2e}"
    main[rows] = 0
    assert not main.any(), "rows without a token were written"


@pytest.mark.gpu
def test_graph_gives_the_bits_of_eager_for_other_tokens(seed: int, device: torch.device) -> None:
    """Captured with all tokens distinct and replayed with long runs: the work follows the tokens, not the capture."""
    tokens_T = torch.arange(4096, device=device)
    dy_Td = torch.randn(4096, 512, device=device).bfloat16()
    table_Vd = torch.zeros(4096, 512, device=device, dtype=torch.bfloat16).requires_grad_()
    table_Vd.main_grad = torch.zeros(4096, 512, device=device)  # type: ignore[attr-defined]
    run = lambda: torch.autograd.backward(lookup(table_Vd, tokens_T), dy_Td)  # noqa: E731
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.autograd.set_multithreading_enabled(False):
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        tokens_T.copy_(torch.randint(0, 9, (4096,), device=device))
        main: Tensor = table_Vd.main_grad  # type: ignore[attr-defined]
        main.zero_()
        run()
    eager = main.clone()
    main.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(main, eager), f"seed {seed}"
