"""One-token decoding against the parallel form, and what a state promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from neuronspark import ModelConfig, NeuronSpark
from neuronspark.decoding import FIRST_CAPACITY_EVENTS, DecodingState, HippocampalState, Pool, _DendriticRow

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "width": 32,
    "layers": "DDH",
    "rope_max_seq_len": 200,
    "ffn_width": 48,
    "dendritic_head_width": 8,
    "state_width": 8,
    "state_groups": 2,
    "pool_head_width": 16,
    "trace_width": 8,
    "match_width": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "D": {"layers": "D"},
    "H": {"layers": "H"},
    "mixed": {"layers": "DHDDH"},
    "one group": {"layers": "DH", "state_groups": 1, "dendritic_head_width": 16, "state_width": 4},
    "group a head": {"layers": "DH", "state_groups": 8, "dendritic_expansion": 1, "dendritic_head_width": 4},
    "memory": {
        "layers": "DHH",
        "memory_layers": [2],
        "memory_keys": 8,
        "memory_top_k": 3,
        "memory_heads": 2,
        "memory_query_width": 16,
        "memory_value_width": 12,
    },
    "other sizes": {"layers": "HD", "pool_head_width": 8, "match_width": 5, "trace_width": 11, "spike_levels": 2},
}


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> NeuronSpark:
    """A model away from the symmetric start, so that every parameter matters."""
    model = NeuronSpark(ModelConfig.from_dict({**SMALL, **changes}), "cpu", seed=seed, compute_dtype=dtype)
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)).to(p.dtype)
    return model


def rows_of(model: NeuronSpark, rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def step_through(model: NeuronSpark, tokens_BL: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
    """Logits [B, L, V] of one step after the other."""
    logits = []
    for token_B in tokens_BL.unbind(1):
        logits_BV, state = model.step(token_B, state)
        logits.append(logits_BV)
    return torch.stack(logits, 1), state


def parallel_log_probs(model: NeuronSpark, tokens_BL: Tensor) -> Tensor:
    """Log-probabilities [B, L, V] after every token, from `token_losses`: each id in turn as every target."""
    losses = []
    for target in range(model.config.vocab_size):
        rows = []
        for t in range(1, tokens_BL.shape[1] + 1):
            extended = torch.cat((tokens_BL[:, :t], tokens_BL.new_full((len(tokens_BL), 1), target)), 1)
            rows.append(model.token_losses(extended)[:, -1])
        losses.append(torch.stack(rows, 1))
    return -torch.stack(losses, -1)


# --- equal to the parallel form ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_the_parallel_form(name: str) -> None:
    """The log-probability of every next token at every position, past chunks of 32 and 64 tokens and a full buffer."""
    model = build(**CONFIGS[name])
    tokens_BL = rows_of(model, 3, 151)
    tokens_BL[1, 4] = -100
    logits_BLV, state = step_through(model, tokens_BL[:, :-1], model.initial_state(3))
    targets_BL = tokens_BL[:, 1:]
    stepped_BL = logits_BLV.log_softmax(-1).gather(2, targets_BL.clamp(min=0)[..., None])[..., 0]
    difference = (stepped_BL + model.token_losses(tokens_BL)) * (targets_BL != -100)
    assert difference.abs().max() < 1e-10
    assert state.tokens == 150
    assert stepped_BL.std() > 0.1, "the positions do not differ: the comparison would be empty"


def test_all_log_probabilities_not_only_the_targets() -> None:
    model = build(vocab_size=12, layers="DH")
    tokens_BL = rows_of(model, 2, 9)
    logits_BLV, _ = step_through(model, tokens_BL, model.initial_state(2))
    assert (logits_BLV.log_softmax(-1) - parallel_log_probs(model, tokens_BL)).abs().max() < 1e-10


@pytest.mark.parametrize("changes", [{"clock": 12.0}, {"clock": 1e3}, {"decay": 8.0}, {"decay": -16.0}])
def test_extreme_clocks_and_decays(changes: dict[str, float]) -> None:
    """Clocks that forget within a token, and potentials that flush at once or keep for 1e7 tokens."""
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("clock_bias"):
                parameter += changes.get("clock", 0)
            if name.endswith("a_log"):
                parameter += changes.get("decay", 0)
    tokens_BL = rows_of(model, 2, 141)
    logits_BLV, _ = step_through(model, tokens_BL[:, :-1], model.initial_state(2))
    stepped_BL = logits_BLV.log_softmax(-1).gather(2, tokens_BL[:, 1:, None])[..., 0]
    assert (stepped_BL + model.token_losses(tokens_BL)).abs().max() < 1e-10


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_prefill_is_that_many_steps(length: int) -> None:
    model = build(layers="DHDH")
    tokens_BL = rows_of(model, 2, length + 20)
    stepped, expected = step_through(model, tokens_BL[:, :length], model.initial_state(2))
    logits_BV, state = model.prefill(tokens_BL[:, :length])
    assert (logits_BV - stepped[:, -1]).abs().max() < 1e-10
    assert (state.rows, state.tokens) == (expected.rows, expected.tokens) == (2, length)
    for ours, theirs in zip(state.layers, expected.layers, strict=True):
        if isinstance(ours, Tensor):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        else:
            assert torch.allclose(ours.trace, theirs.trace, rtol=1e-10, atol=1e-12)
            assert torch.allclose(ours.preceding, theirs.preceding, rtol=1e-10, atol=1e-12)
    after, _ = step_through(model, tokens_BL[:, length:], state)
    after_expected, _ = step_through(model, tokens_BL[:, length:], expected)
    assert (after - after_expected).abs().max() < 1e-10


def test_rows_are_independent() -> None:
    model = build()
    tokens_BL = rows_of(model, 4, 70)
    together, _ = step_through(model, tokens_BL, model.initial_state(4))
    alone = [step_through(model, tokens_BL[i : i + 1], model.initial_state(1))[0] for i in range(4)]
    assert (together - torch.cat(alone)).abs().max() < 1e-12


def test_single_precision_stays_close() -> None:
    """On a long row in fp32, where a wrong cast or a drifting state would show."""
    model = build(torch.float32, rope_max_seq_len=1000)
    tokens_BL = rows_of(model, 1, 801)
    logits_BLV, _ = step_through(model, tokens_BL[:, :-1], model.initial_state(1))
    assert logits_BLV.dtype == torch.float32
    difference = logits_BLV.log_softmax(-1).gather(2, tokens_BL[:, 1:, None])[..., 0] + model.token_losses(tokens_BL)
    # A spike that rounds the other way at a tie moves one position's loss; nearly all must agree to rounding.
    assert difference.abs().median() < 1e-5


def test_bf16_runs_with_wide_states() -> None:
    model = build(torch.bfloat16)
    logits_BLV, state = step_through(model, rows_of(model, 2, 5), model.initial_state(2))
    assert logits_BLV.dtype == torch.float32
    assert logits_BLV.isfinite().all()
    potentials, _, hippocampal = state.layers
    assert isinstance(potentials, Tensor)
    assert isinstance(hippocampal, HippocampalState)
    assert potentials.dtype == hippocampal.trace.dtype == torch.float32
    assert hippocampal.pool.buffers.key.dtype == torch.bfloat16
    assert hippocampal.pool.buffers.clock.dtype == torch.float64


def test_no_gradient_is_recorded() -> None:
    model = build()
    logits_BV, state = model.step(torch.tensor([1]), model.initial_state(1))
    assert not logits_BV.requires_grad
    assert all(not layer.requires_grad for layer in state.layers if isinstance(layer, Tensor))
    assert not model.prefill(torch.tensor([[1, 2]]))[0].requires_grad


# --- states are values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, FIRST_CAPACITY_EVENTS - 1, FIRST_CAPACITY_EVENTS])
def test_a_state_may_be_gone_on_from_twice(length: int) -> None:
    """Two continuations of one state, interleaved, equal those of states of their own."""
    model = build()
    prompt_BL = rows_of(model, 2, length)
    first_BL, second_BL = rows_of(model, 2, 12, seed=1), rows_of(model, 2, 12, seed=2)
    _, shared = step_through(model, prompt_BL, model.initial_state(2))
    branches = [shared, shared]
    seen: list[list[Tensor]] = [[], []]
    for t in range(12):
        for branch, tokens_BL in enumerate((first_BL, second_BL)):
            logits_BV, branches[branch] = model.step(tokens_BL[:, t], branches[branch])
            seen[branch].append(logits_BV)
    for logits, tokens_BL in zip(seen, (first_BL, second_BL), strict=True):
        _, own = step_through(model, prompt_BL, model.initial_state(2))
        assert torch.equal(torch.stack(logits, 1), step_through(model, tokens_BL, own)[0])


def test_the_pool_is_not_copied_for_each_token() -> None:
    pool = Pool.empty(1, 1, 2, 3, torch.zeros(1))
    copied, buffers = 0, pool.buffers
    tokens = 40 * FIRST_CAPACITY_EVENTS
    for t in range(tokens):
        before = pool.events
        pool = pool.append(
            torch.full((1, 1, 1, 2), float(t)), torch.zeros(1, 1, 1, 3), torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
        )
        if pool.buffers is not buffers:
            copied, buffers = copied + before, pool.buffers
    assert 0 < copied < 2 * tokens
    assert torch.equal(pool.buffers.key[0, 0, :tokens, 0], torch.arange(tokens, dtype=torch.float32))
    assert torch.equal(pool.buffers.clock[0, 0, :tokens], torch.arange(1, tokens + 1, dtype=torch.float64))
    assert buffers.key.shape[2] <= 2 * tokens


def test_sums_over_a_prompt_with_a_flush_are_wide() -> None:
    """In fp32 a clock behind a flush, and what a flushing token leaves, would be off by the flush's rounding."""
    steps_11L = torch.cat((torch.tensor([1e6]), torch.full((99,), 1e-3))).view(1, 1, -1)
    events = torch.zeros(1, 1, 100, 1)
    pool = Pool.empty(1, 1, 1, 1, like=events).append(events, events, steps_11L, steps_11L)
    assert torch.equal(pool.buffers.clock[:, :, :100], steps_11L.double().cumsum(2))

    log_decay = torch.tensor([-0.5, -60.0, -0.01]).view(1, 3, 1)
    ones = torch.ones(1, 3, 1)
    row = _DendriticRow(torch.zeros(1, 1, 1, 1))
    row(ones[..., None], log_decay, ones, ones[..., None], ones[..., None], torch.zeros(1))
    assert row.state.item() == pytest.approx(1 + math.exp(log_decay[0, 2, 0].item()), rel=3e-7)


def test_dendritic_state_is_constant() -> None:
    model = build(layers="DD")
    _, early = step_through(model, rows_of(model, 2, 1), model.initial_state(2))
    _, late = step_through(model, rows_of(model, 2, 50), early)
    shapes = [[layer.shape for layer in state.layers if isinstance(layer, Tensor)] for state in (early, late)]
    assert shapes[0] == shapes[1] == [(2, 8, 8, 8)] * 2


# --- refusals ------------------------------------------------------------------------------------------------


def test_full_rows_are_refused() -> None:
    model = build(rope_max_seq_len=5)
    _, state = step_through(model, rows_of(model, 1, 5), model.initial_state(1))
    with pytest.raises(ValueError, match=r"rows are full \(rope_max_seq_len is 5\)"):
        model.step(torch.tensor([0]), state)
    with pytest.raises(ValueError, match=r"L from 1 to rope_max_seq_len \(5\)"):
        model.prefill(torch.zeros(1, 6, dtype=torch.long))


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_another_number_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    model = build()
    with pytest.raises(ValueError, match="one token of each of 2 rows"):
        model.step(torch.zeros(shape, dtype=torch.long), model.initial_state(2))


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0"):
        build().initial_state(0)


def test_states_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().initial_state(1).tokens = 3  # type: ignore[misc]
