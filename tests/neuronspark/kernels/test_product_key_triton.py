"""The product-key memory's kernels against its reference: every pass, the whole operator, and the same bits twice."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_compare import relative_error
from torch import Tensor

from neuronspark.kernels import launch, product_key_reference, product_key_triton
from neuronspark.kernels.backend import KERNELS_VARIABLE
from neuronspark.kernels.product_key import product_key_address, product_key_read

SHAPES = [  # tokens, heads, keys, top_k, width
    (1, 1, 1, 1, 1),
    (5, 2, 6, 3, 70),
    (3, 2, 33, 5, 40),
    (1, 1, 40, 32, 600),
    pytest.param((1000, 4, 512, 32, 2560), marks=pytest.mark.gpu),
    pytest.param((4099, 1, 500, 20, 2000), marks=pytest.mark.gpu),
]


def slots_and_weights(
    tokens: int, reads: int, slots: int, device: torch.device, hot: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Random [T, n] slots, of which a share is slot 3 (if there is one), and weights of both signs."""
    chosen = torch.randint(0, slots, (tokens, reads), device=device, dtype=torch.int32)
    chosen = torch.where(torch.rand(tokens, reads, device=device) < hot, min(3, slots - 1), chosen)
    return chosen, torch.randn(tokens, reads, device=device)


# --- selection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [0, 3])
def test_select(shape: tuple[int, ...], levels: int, device: torch.device, seed: int) -> None:
    """The very same slots, also where most scores are tied (`levels` whole numbers)."""
    tokens, heads, keys, top_k, _ = shape
    scores = torch.randn(2 * heads, tokens, keys, device=device)
    if levels:
        scores = torch.randint(0, levels, scores.shape, device=device).float() * torch.where(scores < 0, -0.0, 1.0)
    slots, weights = product_key_triton.select(scores, top_k)
    expected_slots, expected_weights = product_key_reference.select(scores, top_k)
    assert torch.equal(slots, expected_slots), f"{(slots != expected_slots).sum()} slots differ"
    assert relative_error(weights, expected_weights) < 1e-5


def test_select_among_scores_without_a_value(device: torch.device, seed: int) -> None:
    """NaN shows in its head's weights; -inf is only chosen when nothing else is left; slots are valid in any case."""
    scores = torch.randn(4, 6, 10, device=device)
    scores[1, 2, 5] = math.nan
    scores[2, 3] = math.nan
    scores[0, 4, 1:] = -math.inf
    scores[0, 5], scores[1, 5] = -math.inf, -math.inf
    slots, weights = product_key_triton.select(scores, 4)
    assert ((slots >= 0) & (slots < 100)).all()
    assert weights[2, 0].isnan().all()
    assert weights[3, 1].isnan().all()
    assert weights[5, 0].isnan().all()
    assert slots[4, 0].tolist() == product_key_reference.select(scores, 4)[0][4, 0].tolist()
    assert not weights[[0, 0, 1, 1, 2, 3, 4], [0, 1, 0, 1, 1, 0, 0]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_score_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> None:
    tokens, heads, keys, top_k, _ = shape
    slots, weights = product_key_reference.select(torch.randn(2 * heads, tokens, keys, device=device), top_k)
    pull = torch.randn_like(weights)
    found = product_key_triton.score_gradients(slots, weights, pull, keys, dtype)
    expected = product_key_reference.score_gradients(slots, weights.double(), pull.double(), keys, torch.float64)
    assert found.dtype == dtype
    if top_k == 1:  # a softmax over one slot has no gradient
        assert found.abs().max() < 1e-6
    else:
        assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 4e-3)


# --- reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_read_and_weight_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> None:
    tokens, heads, keys, top_k, width = shape
    slots, weights = slots_and_weights(tokens, heads * top_k, keys**2, device)
    table = torch.randn(keys**2, width, device=device).to(dtype)
    dread = torch.randn(tokens, width, device=device).to(dtype)
    read = product_key_triton.read(table, slots, weights)
    expected = product_key_reference.read(table.double(), slots, weights.double())
    assert read.dtype == dtype
    # In bf16 only the sum is rounded, to 8 bits.
    assert relative_error(read, expected) < (1e-5 if dtype == torch.float32 else 4e-3)
    dweights = product_key_triton.weight_gradients(table, slots, dread)
    expected = product_key_reference.weight_gradients(table.double(), slots, dread.double())
    assert dweights.dtype == torch.float32
    assert relative_error(dweights, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hot", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("tokens", "reads", "slots", "width"),
    [
        (1, 1, 1, 1),
        (64, 2, 40, 20),  # as many pairs as a chunk
        (43, 3, 5, 20),  # one more
        (90, 3, 5000, 9),  # runs of one
        pytest.param(16384, 32, 262144, 2560, marks=pytest.mark.gpu),
        pytest.param(3001, 7, 100, 600, marks=pytest.mark.gpu),
    ],
)
def test_table_gradient(
    tokens: int, reads: int, slots: int, width: int, hot: float, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Runs inside a chunk, over one border and over many; the target is added to, rows that are not read stay."""
    chosen, weights = slots_and_weights(tokens, reads, slots, device, hot)
    dread = torch.randn(tokens, width, device=device).to(dtype)
    before = torch.randn(slots, width, device=device)
    found = before.clone()
    product_key_triton.add_table_gradient(found, chosen, weights, dread)
    if slots * width > 1 << 28:  # the float64 table alone, in place
        expected = before.double()
        product_key_reference.add_table_gradient(expected, chosen, weights.double(), dread)
        assert float((found - expected).norm() / (expected - before).norm()) < 1e-5
    else:
        expected = torch.zeros(slots, width, dtype=torch.float64)
        product_key_reference.add_table_gradient(expected, chosen.cpu(), weights.double().cpu(), dread.cpu())
        assert relative_error(found, before.double().cpu() + expected) < 1e-6
    untouched = torch.ones(slots, dtype=torch.bool, device=device).index_fill_(0, chosen.flatten().long(), False)
    assert torch.equal(found[untouched], before[untouched])


def test_a_run_is_summed_in_the_tokens_order(device: torch.device, seed: int) -> None:
    """The bits do not depend on what else is read, only a slot's own pairs and where they lie in their chunks."""
    tokens = 130
    slots = torch.zeros(tokens, 2, dtype=torch.int32, device=device)
    weights, dread = torch.randn(tokens, 2, device=device), torch.randn(tokens, 8, device=device)
    results = []
    for other in (1, 7):
        slots[:, 1] = other
        target = torch.zeros(8, 8, device=device)
        product_key_triton.add_table_gradient(target, slots, weights, dread)
        results.append(target[[0, other]])
    assert torch.equal(*results)
    chunk = product_key_triton.pinned(product_key_triton.TABLE_GRADIENT, device).blocks["CHUNK"]
    pairs = (weights[:, :1] * dread).cpu()
    total = torch.zeros(8)
    for part in pairs.split(chunk):
        subtotal = torch.zeros(8)
        for row in part:
            subtotal += row
        total += subtotal
    # A multiply-add may keep the bits that a product drops, so the order is checked to a rounding of each term.
    assert torch.allclose(results[0][0].cpu(), total, rtol=1e-5, atol=1e-5)


# --- the operator ------------------------------------------------------------------------------------------


def read_all(query: Tensor, keys: Tensor, table: Tensor, top_k: int) -> Tensor:
    slots, weights = product_key_address(query, keys, top_k)
    return product_key_read(table, slots, weights)


def leaves(shape: tuple[int, ...], half_query: int, device: torch.device) -> list[Tensor]:
    """Queries of unit variance, keys with scores of unit variance, and a table, in fp32."""
    tokens, heads, keys, _, width = shape
    query = torch.randn(tokens, heads, 2, half_query, device=device)
    lists = torch.randn(2 * heads * keys, half_query, device=device) / math.sqrt(half_query)
    return [query, lists, torch.randn(keys**2, width, device=device)]


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_operator(
    shape: tuple[int, ...], dtype: torch.dtype, main_grad: bool, device: torch.device, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against the reference in float64, from the same rounded inputs.

    Two sums that differ by less than their rounding may change places, so that another slot is read: tokens to which
    that happened are counted, and left out.
    """
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    top_k = shape[3]
    inputs = [tensor.to(dtype) for tensor in leaves(shape, 16, device)]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    if main_grad:
        for parameter in ours[1:]:
            parameter.main_grad = torch.zeros(parameter.shape, device=device)  # type: ignore[attr-defined]
    theirs = [tensor.double().requires_grad_() for tensor in inputs]
    chosen, expected_chosen = (product_key_address(*tensors[:2], top_k)[0] for tensors in (ours, theirs))
    same_T1 = (chosen == expected_chosen).flatten(1).all(1, keepdim=True)
    # A head reads 32 places of its own: what may change is counted by head.
    assert (~same_T1).sum() <= 1 + shape[0] * shape[1] // 500
    found, expected = read_all(*ours, top_k) * same_T1, read_all(*theirs, top_k) * same_T1
    pull = torch.randn(found.shape, device=device).to(dtype)
    found.backward(pull)
    expected.backward(pull.double())
    gradients = [ours[0].grad, *(p.main_grad if main_grad else p.grad for p in ours[1:])]  # type: ignore[attr-defined]
    limit = 2e-5 if dtype == torch.float32 else 8e-3
    errors = {"read": relative_error(found.detach(), expected.detach())}
    for name, gradient, leaf in zip(("query", "keys", "table"), gradients, theirs, strict=True):
        assert gradient is not None
        assert leaf.grad is not None
        if top_k == 1 and name != "table":
            assert gradient.abs().max() < 1e-6
        else:
            errors[name] = relative_error(gradient, leaf.grad)
    assert all(error < limit for error in errors.values()), errors


@pytest.mark.parametrize("shape", [SHAPES[1], *SHAPES[-2:]])
def test_same_bits_twice(
    shape: tuple[int, ...], device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    inputs = [tensor.bfloat16().requires_grad_() for tensor in leaves(shape, 16, device)]
    results = []
    for _ in range(2):
        out = read_all(*inputs, shape[3])
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for name, first, second in zip(("read", "query", "keys", "table"), *results, strict=True):
        assert torch.equal(first, second), name


@pytest.mark.gpu
def test_it_can_be_captured(device: torch.device, seed: int) -> None:
    """In a CUDA graph, replayed on other inputs, it gives what eager calls give."""
    query, keys, table = (t.bfloat16().requires_grad_() for t in leaves((512, 2, 64, 8, 256), 32, device))
    for parameter in (keys, table):
        parameter.main_grad = torch.zeros(parameter.shape, device=device)  # type: ignore[attr-defined]
    pull = torch.randn(512, 256, device=device).bfloat16()

    def run() -> tuple[Tensor, Tensor]:
        out = read_all(query, keys, table, 8)
        return out, torch.autograd.grad(out, query, pull)[0]

    def mains() -> list[Tensor]:
        return [parameter.main_grad for parameter in (keys, table)]  # type: ignore[attr-defined]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for round_ in range(2):
        with torch.no_grad():
            query.copy_(torch.randn(query.shape, device=device))
        results = []
        for replayed in (True, False):
            for main in mains():
                main.zero_()
            out = captured
            if replayed:
                graph.replay()
            else:
                out = run()
            results.append([tensor.clone() for tensor in (*out, *mains())])
        for name, first, second in zip(("read", "query", "keys", "table"), *results, strict=True):
            assert torch.equal(first, second), f"{name}, round {round_}"


@pytest.mark.gpu
def test_a_table_of_more_than_2_to_the_31_elements(device: torch.device, seed: int) -> None:
    slots, width = 1100 * 1000, 2048
    table = torch.zeros(slots, width, device=device, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, slots - 1], [slots - 1, slots - 2]], device=device, dtype=torch.int32)
    rows = torch.randn(3, width, device=device).bfloat16()
    table[[0, slots - 2, slots - 1]] = rows
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    expected = torch.stack((rows[0].float() + 2 * rows[2].float(), 3 * rows[2].float() + 4 * rows[1].float()))
    assert relative_error(product_key_triton.read(table, chosen, weights), expected) < 4e-3
    dweights = product_key_triton.weight_gradients(table, chosen, rows[:2].contiguous())
    assert relative_error(dweights[0, 1], rows[0].float() @ rows[2].float()) < 1e-4
    target = torch.zeros(slots, width, device=device)
    product_key_triton.add_table_gradient(target, chosen, weights, rows[:2].contiguous())
    assert relative_error(target[slots - 1], 2 * rows[0].float() + 3 * rows[1].float()) < 1e-6
    assert relative_error(target[slots - 2], 4 * rows[1].float()) < 1e-6
    assert target[1 : slots - 2].abs().max() == 0


def test_pinned_configurations_are_candidates() -> None:
    for name, candidates in product_key_triton.CANDIDATES.items():
        assert launch.pinned(name, torch.device("cpu")) in candidates, name
    assert {case.name for case in product_key_triton.compile_cases()} == set(product_key_triton.CANDIDATES)


def test_every_kernel_has_a_compile_case_for_both_dtypes() -> None:
    kernels = {name for name in vars(product_key_triton) if hasattr(getattr(product_key_triton, name), "arg_names")}
    dense: dict[str, set[str]] = {name: set() for name in kernels}
    for case in product_key_triton.compile_cases():
        dense[case.kernel.__name__] |= {case.types.get(name, "") for name in ("table", "dread", "dscores")} - {""}
    assert set(dense) == kernels
    assert {name for name, dtypes in dense.items() if dtypes == {"*bf16", "*fp32"}} == kernels - {
        "_select",
        "_add_carried",
    }
