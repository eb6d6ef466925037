"""How far back the pool read looks, against a full L x L float64 softmax and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from probe_models import EOS, build, rows_of
from torch import Tensor

from neuronspark import probe_attention as module
from neuronspark.hippocampal import WHOLE_ROWS
from neuronspark.kernels.pool_read import pool_read
from neuronspark.probe_attention import by_distance, distance_bins, probe_attention, weights_in_blocks
from neuronspark.probe_rows import ProbedRows

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def random_inputs(rows: int, heads: int, tokens: int, clock: float = 0.02, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    step = clock * 2 * torch.rand(rows, heads, tokens, generator=generator, dtype=torch.float64)
    log_write = -torch.rand(rows, heads, tokens, generator=generator, dtype=torch.float64)
    return normal(rows, heads, tokens, 6), normal(rows, heads, tokens, 6), step, log_write


def all_weights(inputs: Inputs) -> Tensor:
    """[B, h, L, L] in float64, from the equation."""
    query, key, step, log_write = (x.double() for x in inputs)
    clock = step.cumsum(2)
    logits = query @ key.transpose(2, 3) - (clock[..., :, None] - clock[..., None, :]) + log_write[..., None, :]
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf).softmax(3)


def rows_for(inputs: Inputs, train_length: int) -> ProbedRows:
    rows, _, tokens = inputs[2].shape
    return ProbedRows.of(torch.full((rows, tokens), 9), EOS, train_length)


def expected_readings(weights: Tensor, train_length: int) -> dict[str, Tensor]:
    """Straight from the definitions, over the last train_length queries."""
    tokens = weights.shape[-1]
    first = max(0, tokens - train_length)
    weights = weights[:, :, first:]
    distance = torch.arange(first, tokens)[:, None] - torch.arange(tokens)
    bin_of = torch.tensor([[max(0, int(d)).bit_length() for d in row] for row in distance])
    readings = {
        f"attn_dist_bin{k}": (weights * ((bin_of == k) & (distance >= 0))).sum(3).mean(2)
        for k in range(int(tokens - 1).bit_length() + 1)
    }
    readings["attn_beyond_train"] = (weights * (distance >= train_length)).sum(3).mean(2)
    readings["attn_mean_log2"] = (weights * (1 + distance.clamp(min=0)).double().log2()).sum(3).mean(2)
    readings["attn_entropy"] = -(weights * weights.clamp(min=1e-300).log()).sum(3).mean(2)
    return readings


@pytest.fixture(params=[None, 64 * 130])
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads at once, and a few at a time."""
    if request.param:
        monkeypatch.setattr(module, "WEIGHTS", request.param)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize(("tokens", "train_length"), [(130, 130), (130, 500), (200, 64), (65, 1), (129, 37), (2, 2)])
def test_every_reading_against_the_whole_matrix(tokens: int, train_length: int) -> None:
    inputs = random_inputs(2, 3, tokens, seed=tokens)
    found = probe_attention(*inputs, rows_for(inputs, train_length))
    expected = expected_readings(all_weights(inputs), train_length)
    assert found.keys() == {f"hippocampal/{name}" for name in expected}
    for name, value in expected.items():
        assert torch.allclose(found[f"hippocampal/{name}"], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clock", [1e-4, 0.02, 5.0])
def test_weights_sum_to_one_and_reproduce_the_read(clock: float, dtype: torch.dtype) -> None:
    query, key, step, log_write = random_inputs(2, 3, 150, clock)
    wide = torch.promote_types(dtype, torch.float32)
    inputs = (query.to(dtype), key.to(dtype), step.to(wide), log_write.to(wide))
    value = torch.randn(2, 3, 150, 7, generator=torch.Generator().manual_seed(5)).to(dtype)
    read = pool_read(inputs[0], inputs[1], value, inputs[2], inputs[3])
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype]
    seen = torch.zeros(2, 3, 150, dtype=torch.int)
    for block in weights_in_blocks(*inputs, first_query=0):
        end = block.weights_zqe.shape[2]
        at = (block.row, block.heads, slice(block.first, end))
        assert torch.allclose(block.weights_zqe.double().sum(2), torch.tensor(1.0).double(), atol=1e-6)
        again = block.weights_zqe.double() @ value[block.row, block.heads, :end].double()
        error = torch.linalg.vector_norm(again - read[at].double()) / torch.linalg.vector_norm(read[at].double())
        assert error < tolerance, f"{error:.2e} at {at}"
        seen[at] += 1
    assert (seen == 1).all(), "every query once"


def test_weights_after_a_clock_that_has_run_far() -> None:
    """With a flush of 1e4 at every 64th token the weights in fp32 are those of fp64, and give its read."""
    query, key, step, log_write = random_inputs(1, 2, 1024)
    step[..., 63::64] = 1e4
    exact, value = (query, key, step.float().double(), log_write), random_inputs(1, 2, 1024, seed=5)[0]
    read, weights = pool_read(exact[0], exact[1], value, exact[2], exact[3]), all_weights(exact)
    for block in weights_in_blocks(*(x.float() for x in exact), first_query=0):
        end = block.weights_zqe.shape[2]
        at = (block.row, block.heads, slice(block.first, end))
        assert torch.allclose(block.weights_zqe.double(), weights[at][..., :end], rtol=0, atol=1e-5)
        again = block.weights_zqe.double() @ value[block.row, block.heads, :end]
        assert torch.linalg.vector_norm(again - read[at]) < 1e-4 * torch.linalg.vector_norm(read[at])


def test_a_model_s_weights_are_its_read_s() -> None:
    """From the layer's own events, match, clock and tags included."""
    model, tokens = build(layers="DH"), rows_of(2, 141)
    with torch.no_grad():
        h_Td = model.layer00(model.embed(tokens), 140)
        events = model.layer01.events(h_Td, 140, model.rotary, WHOLE_ROWS)
    inputs = (events.query, events.key, events.clock_step, events.log_write)
    read = WHOLE_ROWS.read(events.query, events.key, events.value, events.clock_step, events.log_write)
    assert torch.allclose(all_weights(inputs) @ events.value, read, rtol=1e-10, atol=1e-12)
    found = model.probe(tokens, EOS, 50)["layer01"]
    for name, value in expected_readings(all_weights(inputs), 50).items():
        assert torch.allclose(found[f"hippocampal/{name}"], value, rtol=1e-9, atol=1e-12), name


def test_a_clock_alone_reads_geometrically() -> None:
    """No address, an even clock: weights exp(-delta D) / sum, whose moments are known."""
    tokens, train_length, delta = 400, 100, 0.05
    nothing = torch.zeros(1, 1, tokens, 4, dtype=torch.float64)
    step = torch.full((1, 1, tokens), delta, dtype=torch.float64)
    inputs = (nothing, nothing, step, torch.zeros_like(step))
    found = {
        name.rpartition("/")[2]: v.item()
        for name, v in probe_attention(*inputs, rows_for(inputs, train_length)).items()
    }

    def mass(first: int, end: int) -> float:
        """Of distances first ... end - 1, a mean over the queries at positions 300 ... 399."""
        shares = [
            (math.exp(-delta * first) - math.exp(-delta * min(end, t + 1))) / (1 - math.exp(-delta * (t + 1)))
            for t in range(300, 400)
        ]
        return sum(shares) / len(shares)

    assert found["attn_dist_bin0"] == pytest.approx(mass(0, 1), rel=1e-10)
    assert found["attn_dist_bin4"] == pytest.approx(mass(8, 16), rel=1e-10)
    assert found["attn_beyond_train"] == pytest.approx(mass(100, 400), rel=1e-10)
    rate = math.exp(-delta)
    entropy = -math.log(1 - rate) - rate / (1 - rate) * math.log(rate)  # of an unending geometric law
    assert found["attn_entropy"] == pytest.approx(entropy, rel=1e-3)


def test_even_weights() -> None:
    """No address, clock or tag: 1 / (t + 1) on every event; entropy ln(t + 1)."""
    nothing, still = torch.zeros(1, 2, 8, 4, dtype=torch.float64), torch.zeros(1, 2, 8, dtype=torch.float64)
    inputs = (nothing, nothing, still, still)
    found = probe_attention(*inputs, rows_for(inputs, 2))
    assert torch.allclose(found["hippocampal/attn_dist_bin0"], torch.tensor((1 / 7 + 1 / 8) / 2).double())
    assert torch.allclose(found["hippocampal/attn_dist_bin3"], torch.tensor((3 / 7 + 4 / 8) / 2).double())
    assert torch.allclose(found["hippocampal/attn_beyond_train"], torch.tensor((5 / 7 + 6 / 8) / 2).double())
    assert torch.allclose(found["hippocampal/attn_entropy"], torch.tensor(math.log(56) / 2).double())


def test_extreme_clocks() -> None:
    """A clock of 1e5 a token leaves each query its own event alone; nothing overflows."""
    query, key, step, log_write = (x.float() for x in random_inputs(1, 2, 300))
    inputs = (query, key, torch.full_like(step, 1e5), log_write)
    flushed = probe_attention(*inputs, rows_for(inputs, 300))
    assert torch.equal(flushed["hippocampal/attn_dist_bin0"], torch.ones(1, 2, dtype=torch.float64))
    assert torch.equal(flushed["hippocampal/attn_entropy"], torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(flushed["hippocampal/attn_mean_log2"], torch.zeros(1, 2, dtype=torch.float64))


def test_on_training_rows_nothing_lies_beyond() -> None:
    inputs = random_inputs(1, 2, 100)
    assert (probe_attention(*inputs, rows_for(inputs, 100))["hippocampal/attn_beyond_train"] == 0).all()


def test_bins_sum_to_all_weight() -> None:
    inputs = tuple(x.float() for x in random_inputs(2, 3, 257))
    found = probe_attention(*inputs, rows_for(inputs, 64))
    total = sum(found[f"hippocampal/attn_dist_bin{k}"] for k in range(len(distance_bins(257))))
    assert torch.allclose(total, torch.ones(2, 3, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (2, 2), (4, 9), (64, 64), (64, 200), (7, 71)])
def test_sums_by_distance(queries: int, keys: int) -> None:
    weights = torch.rand(3, queries, keys, dtype=torch.float64)
    weights.tril_(keys - queries)  # events after a query have no weight
    expected = torch.zeros(3, keys, dtype=torch.float64)
    for query in range(queries):
        for key in range(keys - queries + query + 1):
            expected[:, keys - queries + query - key] += weights[:, query, key]
    assert torch.allclose(by_distance(weights), expected, rtol=1e-12)


def test_distance_bins() -> None:
    assert distance_bins(1) == [(0, 1)]
    assert distance_bins(2) == [(0, 1), (1, 2)]
    assert distance_bins(9) == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 9)]
    assert distance_bins(8) == [(0, 1), (1, 2), (2, 4), (4, 8)]
