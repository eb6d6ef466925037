"""Each operator against its step-by-step float64 recurrence: values and every gradient, at the edges of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ns_reference as reference
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from neuronspark.kernels import cross_entropy
from neuronspark.kernels.arbitration import blend, cosine
from neuronspark.kernels.cross_entropy import linear_cross_entropy, token_cross_entropy
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.embedding import lookup
from neuronspark.kernels.exponential import exp_or_zero_
from neuronspark.kernels.gated_norm import gated_norm
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.pool_read import SUM_BLOCK, clock_of, pool_read, sums_by_blocks
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.rotary import rotary_norm, rotary_table
from neuronspark.kernels.trace_scan import trace_scan

EPS = 1e-6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 1e-9
) -> None:
    """Equal values, and equal gradients of a random projection of the output with respect to every input."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = function(*leaves)
        weights = draw(*output.shape, seed=99)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad((output * weights).sum(), wanted)
        results.append((output.detach(), *gradients))
    for index, (mine, other) in enumerate(zip(*results, strict=True)):
        name = "output" if index == 0 else f"gradient {index - 1}"
        assert mine.shape == other.shape, name
        scale = other.abs().max().clamp(min=1e-3)
        assert ((mine - other).abs().max() / scale).item() < tolerance, name


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 150])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (3, 3)])
def test_dendritic_scan(tokens: int, heads: int, groups: int) -> None:
    rows, compartments, states = 2, 3, 5
    decay = -functional.softplus(draw(rows, tokens, heads, seed=1) * 3)
    inputs = [
        draw(rows, tokens, heads, compartments, seed=2),
        decay,
        draw(rows, tokens, heads, seed=3),
        draw(rows, tokens, groups, states, seed=4),
        draw(rows, tokens, groups, states, seed=5),
        draw(heads, seed=6),
    ]
    assert_same(dendritic_scan, reference.dendritic, inputs)


def test_dendritic_scan_resolves_slow_decays_beside_a_flush() -> None:
    """A step of 1e5 wipes the state; the slow decays after it, in the same chunk, keep their precision in fp32."""
    tokens = 100
    decay = torch.full((1, tokens, 1), -0.01)
    decay[:, 30] = -1e5
    v, b = draw(1, tokens, 1, 2).float(), torch.ones(1, tokens, 1, 1)
    arguments = (v, decay, torch.ones(1, tokens, 1), b, b, torch.zeros(1))
    expected = reference.dendritic(*(x.double() for x in arguments))
    error = (dendritic_scan(*arguments).double() - expected).abs().max() / expected.abs().max()
    assert error < 3e-5
    decay.requires_grad_()
    (gradient,) = torch.autograd.grad(dendritic_scan(v, decay, *arguments[2:]).sum(), decay)
    assert gradient.isfinite().all()
    assert gradient[0, 30, 0] == 0


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 101])
def test_trace_scan(tokens: int) -> None:
    decay = -functional.softplus(draw(2, tokens, 3, seed=1) * 3)
    assert_same(trace_scan, reference.trace, [draw(2, tokens, 3), decay])


def test_trace_scan_keeps_a_retention_of_one_minus_1e_minus_9() -> None:
    """In fp32 that decay is exactly 1; what it takes in is not 0, and over 4,096 tokens the level is right to 1e-3."""
    tokens, rate = 4096, 1e-9
    trace = trace_scan(torch.ones(1, tokens, 1), torch.full((1, tokens, 1), -rate))
    assert abs(trace[0, -1, 0].item() / (tokens * rate) - 1) < 1e-3


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 130])
def test_pool_read(tokens: int) -> None:
    rows, heads, address, width = 2, 2, 6, 4
    shape = (rows, heads, tokens)
    inputs = [
        draw(*shape, address, seed=1),
        draw(*shape, address, seed=2),
        draw(*shape, width, seed=3),
        functional.softplus(draw(*shape, seed=4)),
        functional.logsigmoid(draw(*shape, seed=5)),
    ]
    assert_same(pool_read, reference.pool, inputs)


def pool_errors(tokens: int, rate: float, dtype: torch.dtype, flushed: slice | None = None) -> tuple[float, float]:
    """Relative errors of the read and of the clock gradient against fp64, over the row.

    Clock and tag are fp32 whatever the dtype; the clock takes a step of 1e4 at the flushed tokens.
    """
    shape = (1, 2, tokens)
    dense = [draw(*shape, 16, seed=seed).to(dtype) for seed in (1, 2, 3)]
    step = (rate * functional.softplus(draw(*shape, seed=4))).float()
    if flushed is not None:
        step[..., flushed] = 1e4
    biases = [step, functional.logsigmoid(draw(*shape)).float()]
    weights = draw(*shape, 16, seed=9).to(dtype)
    reads, gradients = [], []
    for inputs in ([*dense, *biases], [x.double() for x in [*dense, *biases]]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        read = pool_read(*leaves)
        reads.append(read.detach().double())
        gradients.append(torch.autograd.grad((read * weights).sum(), leaves[3])[0].double())
    read_error, gradient_error = (((a - b).norm() / b.norm()).item() for a, b in (reads, gradients))
    return read_error, gradient_error


@pytest.mark.parametrize("rate", [1e-4, 0.02, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_clock_gradient_over_a_long_row(rate: float, dtype: torch.dtype) -> None:
    """In bf16 a row sums to its rounded read's error; without it the faster clocks are 0.02 and 0.19 off."""
    assert pool_errors(2048, rate, dtype)[1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-4, 0.02, 1.0])
def test_pool_clock_gradient_over_32k(rate: float) -> None:
    assert pool_errors(32768, rate, torch.float32)[1] < 0.01


@pytest.mark.parametrize(("flushed", "tolerance"), [(slice(63, None, 64), 1e-4), (slice(31, None, 64), 1e-3)])
def test_pool_read_after_a_clock_that_has_run_far(flushed: slice, tolerance: float) -> None:
    """Flushes that bring the clock to 3e5 blur nothing that comes after them, neither reads nor the clock's gradient.

    In the block of 64 in whose middle a flush falls, biases are as large as the flush: there they are rounded to 2^-11.
    """
    read, gradient = pool_errors(2048, 0.02, torch.float32, flushed)
    assert read < tolerance
    assert gradient < tolerance


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 4103, 32_768])
def test_a_gpu_s_sums_are_cumsum_s_in_little_memory(length: int) -> None:
    x_ZL = torch.rand(3, length, dtype=torch.float64)
    torch.testing.assert_close(sums_by_blocks(x_ZL), x_ZL.cumsum(1), rtol=1e-13, atol=0)
    assert torch.equal(clock_of(x_ZL), x_ZL.cumsum(1)), "on a CPU the bits are those of before"
    with LargestResult() as largest:
        sums_by_blocks(x_ZL)
    assert largest.numbers <= max(3 * (length + SUM_BLOCK), SUM_BLOCK * SUM_BLOCK)


class LargestResult(TorchDispatchMode):
    """Numbers of the largest tensor that an operator gives."""

    numbers = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = operator(*arguments, **(named or {}))
        self.numbers = max(self.numbers, found.numel() if isinstance(found, torch.Tensor) else 0)
        return found


def test_pool_read_survives_a_clock_of_1e5_a_token() -> None:
    """Nothing overflows, and with such a clock each token reads itself."""
    shape = (1, 1, 200)
    leaves = [draw(*shape, 4, seed=i).float().requires_grad_() for i in range(3)]
    step = torch.full(shape, 1e5, requires_grad=True)
    read = pool_read(*leaves, step, torch.zeros(shape))
    assert torch.allclose(read, leaves[2])
    assert all(g.isfinite().all() for g in torch.autograd.grad(read.sum(), [*leaves, step]))


@pytest.mark.parametrize("shape", [(1, 4), (7, 5), (6, 2, 3)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    assert_same(
        lambda x, gain: rms_norm(x, gain, EPS),
        lambda x, gain: reference.rms(x, EPS) * gain,
        [draw(*shape), draw(*shape[1:], seed=1)],
    )


def test_gated_norm() -> None:
    assert_same(
        lambda y, z, gain: gated_norm(y, z, gain, EPS),
        lambda y, z, gain: reference.rms(y * z * torch.sigmoid(z), EPS) * gain,
        [draw(7, 3, 4), draw(7, 3, 4, seed=1), draw(3, 4, seed=2)],
    )


@pytest.mark.parametrize("tokens", [1, 9])
def test_rotary_norm(tokens: int) -> None:
    table = rotary_table(20, 6, 1e6, torch.device("cpu"), torch.float64)
    assert_same(
        lambda x: rotary_norm(x, table, EPS),
        lambda x: reference.rope(reference.rms(x, EPS), 1e6).transpose(1, 2),
        [draw(2, tokens, 3, 6)],
    )


def test_rotary_angles_are_right_at_the_end_of_a_long_row() -> None:
    cos, sin = rotary_table(32768, 64, 1e6, torch.device("cpu"), torch.float32)[:, -1]
    assert cos[0].item() == pytest.approx(torch.tensor(32767.0, dtype=torch.float64).cos().item(), abs=1e-7)
    assert sin[1].item() == pytest.approx(
        (torch.tensor(32767.0, dtype=torch.float64) * 1e6 ** (-2 / 64)).sin().item(), abs=1e-7
    )


def test_cosine_and_blend() -> None:
    shape = (2, 3, 5, 4)
    r, v = draw(*shape), draw(*shape, seed=1)
    assert_same(cosine, lambda r, v: functional.cosine_similarity(r, v, dim=-1, eps=1e-6), [r, v])
    assert_same(
        blend,
        lambda r, v, fr, fv: (fr[..., None] * r + fv[..., None] * v).transpose(1, 2),
        [r, v, draw(*shape[:3], seed=2), draw(*shape[:3], seed=3)],
    )


@pytest.mark.parametrize(("r_size", "v_size"), [(1e-7, 1.0), (1.0, 1e-7), (1e-7, 1e-7)])
def test_a_norm_below_eps_is_a_constant_of_the_cosine(r_size: float, v_size: float) -> None:
    def expected(r: Tensor, v: Tensor) -> Tensor:
        return (r * v).sum(-1) / (r.norm(dim=-1).clamp(min=1e-6) * v.norm(dim=-1).clamp(min=1e-6))

    assert_same(cosine, expected, [draw(1, 2, 5, 4) * r_size, draw(1, 2, 5, 4, seed=1) * v_size])


def test_cosine_of_a_zero_vector() -> None:
    r = torch.zeros(1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    v = draw(1, 1, 1, 4).requires_grad_()
    value = cosine(r, v)
    gradients = torch.autograd.grad(value.sum(), [r, v])
    assert value.item() == 0
    assert all(g.isfinite().all() for g in gradients)


def test_projections() -> None:
    x, a, b, base = draw(5, 3), draw(2, 3, seed=1), draw(4, 3, seed=2), draw(5, 4, seed=3)
    assert_same(
        lambda x, a, b: torch.cat(project(x, a, b), 1), lambda x, a, b: torch.cat((x @ a.T, x @ b.T), 1), [x, a, b]
    )
    assert_same(project_onto, lambda base, x, w: base + x @ w.T, [base, x, b])


def test_projection_whose_output_is_not_used() -> None:
    x, a, b = (draw(3, 3, seed=i).requires_grad_() for i in range(3))
    used, _ = project(x, a, b)
    gradients = torch.autograd.grad(used.sum(), [x, a, b])
    assert torch.equal(gradients[2], torch.zeros(3, 3, dtype=torch.float64))
    assert torch.allclose(gradients[0], a.sum(0).expand(3, 3))


def test_lookup_with_repeated_tokens() -> None:
    tokens = torch.tensor([3, 0, 3, 3, 1, 0])
    assert_same(lambda table: lookup(table, tokens), lambda table: table[tokens], [draw(5, 4)])


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 16, 17, 50])
def test_linear_cross_entropy(tokens: int, z_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_LOGITS, "cpu", 1)  # chunks of 16 tokens
    vocabulary = 7
    targets = torch.arange(tokens) * 5 % vocabulary
    targets[::3] = -100
    scale = torch.tensor(0.37, dtype=torch.float64)

    def theirs(h: Tensor, table: Tensor) -> Tensor:
        logits = h @ table.T
        losses = functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        return scale * (losses + z_weight * logits.logsumexp(-1) ** 2)[targets != -100].sum()

    def ours(h: Tensor, table: Tensor) -> Tensor:
        loss, ce_sum, z_sum = linear_cross_entropy(h, table, targets, scale, z_weight)
        assert torch.allclose(loss, scale * (ce_sum + z_sum))
        return loss

    h, table = draw(tokens, 4), draw(vocabulary, 4, seed=1)
    assert_same(ours, theirs, [h, table])
    expected = functional.cross_entropy(h @ table.T, targets, reduction="none", ignore_index=-100)
    assert torch.allclose(token_cross_entropy(h, table, targets), expected)


def test_cross_entropy_of_large_logits_is_finite() -> None:
    h = torch.tensor([[1e4, 0.0]], requires_grad=True)
    table = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    loss, *_ = linear_cross_entropy(h, table, torch.tensor([1]), torch.tensor(1.0), 0.0)
    loss.backward()
    assert loss.item() == 2e4
    assert h.grad is not None
    assert h.grad.tolist() == [[2.0, 0.0]]


def test_exponential_is_exactly_zero_below_its_range() -> None:
    logs = torch.tensor([0.0, -1.0, -59.0, -60.0, -61.0, -1e5, -torch.inf])
    values = exp_or_zero_(logs.clone())
    assert torch.allclose(values[:3], logs[:3].exp(), rtol=1e-6, atol=0)
    assert values[3:].tolist() == [0, 0, 0, 0]
