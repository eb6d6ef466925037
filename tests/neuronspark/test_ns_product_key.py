"""The product-key memory: its operator against brute force, and the layer and the model that have one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from typing import Any

import ns_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuronspark import ConfigError, ModelConfig, NeuronSpark, load_preset, preset_names
from neuronspark.kernels import product_key_reference as passes
from neuronspark.kernels.product_key import product_key_address, product_key_read
from neuronspark.memory import add_memory

VALUES = {
    "vocab_size": 64,
    "width": 32,
    "layers": "DH",
    "rope_max_seq_len": 200,
    "ffn_width": 48,
    "dendritic_head_width": 8,
    "state_width": 8,
    "pool_head_width": 16,
    "trace_width": 8,
    "match_width": 8,
    "memory_layers": [1],
    "memory_keys": 6,
    "memory_top_k": 4,
    "memory_heads": 2,
    "memory_query_width": 8,
    "memory_value_width": 12,
}
NAMES = ("w_memory_query", "w_memory_keys", "memory_table", "w_memory_gate", "memory_gate_bias", "w_memory_out")


def memory_config(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**VALUES, **changes})


def build(config: ModelConfig, device: str = "cpu", **options: Any) -> NeuronSpark:
    return NeuronSpark(config, device, **{"seed": 0, **options})


def shifted(model: NeuronSpark) -> NeuronSpark:
    """The model away from its symmetric start, with a memory as loud as its other parts."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(index)
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for name, p in model.named_parameters():
            if name.endswith(("memory_table", "w_memory_keys")):
                p.mul_(3)
    return model


def rows_of(config: ModelConfig, rows: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, tokens + 1), generator=generator)


def random_inputs(tokens: int, heads: int, keys: int, half_query: int, width: int, seed: int = 0) -> list[Tensor]:
    """Queries [T, h, 2, Q], keys [2 h K, Q] and a table [K^2, V] in float64, leaves with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, 2, half_query), (2 * heads * keys, half_query), (keys**2, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def read_all(query: Tensor, keys: Tensor, table: Tensor, top_k: int) -> Tensor:
    slots, weights = product_key_address(query, keys, top_k)
    return product_key_read(table, slots, weights)


def brute_force(query: Tensor, keys: Tensor, table: Tensor, top_k: int) -> Tensor:
    """Every slot scored, one token and head at a time, in plain autograd."""
    tokens, heads, _, half_query = query.shape
    lists = keys.view(heads, 2, -1, half_query)
    count, reads = lists.shape[2], []
    for token in range(tokens):
        read = table.new_zeros(table.shape[1])
        for head in range(heads):
            first, second = (lists[head, half] @ query[token, head, half] for half in range(2))
            logits = [first[slot // count] + second[slot % count] for slot in range(count**2)]
            best = sorted(range(count**2), key=lambda slot: (-logits[slot].item(), slot))[:top_k]
            weights = torch.stack([logits[slot] for slot in best]).softmax(0)
            read = read + sum(weight * table[slot] for weight, slot in zip(weights, best, strict=True))
        reads.append(read)
    return torch.stack(reads)


# --- the operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "top_k"), [(1, 1, 1, 1), (7, 1, 5, 3), (5, 3, 4, 4), (4, 2, 8, 1), (3, 1, 9, 8)]
)
def test_reads_and_gradients_are_those_of_all_slots(tokens: int, heads: int, keys: int, top_k: int) -> None:
    inputs = random_inputs(tokens, heads, keys, 6, 10)
    found, expected = read_all(*inputs, top_k), brute_force(*inputs, top_k)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(out, inputs, pull) for out in (found, expected))
    for name, a, b in zip(("query", "keys", "table"), ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), name
        assert top_k == 1 or b.abs().max() > 1e-3, f"{name} has no influence: the comparison would be empty"


def test_gradients_by_finite_differences() -> None:
    inputs = random_inputs(3, 2, 5, 4, 3)
    assert torch.autograd.gradcheck(lambda *leaves: read_all(*leaves, 3), inputs, eps=1e-7, atol=1e-6)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ties_take_the_lowest_slot(data: st.DataObject) -> None:
    """Scores of few whole numbers, so that most are tied; sums of them are exact."""
    keys, heads = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 2))
    top_k = data.draw(st.integers(1, keys))
    score = st.sampled_from([-1.0, -0.0, 0.0, 2.0])
    scores = torch.tensor(data.draw(st.lists(score, min_size=2 * heads * keys, max_size=2 * heads * keys)))
    scores_sTK = scores.view(2 * heads, 1, keys)
    slots, weights = passes.select(scores_sTK, top_k)
    for head in range(heads):
        first, second = scores_sTK[2 * head, 0].tolist(), scores_sTK[2 * head + 1, 0].tolist()
        logit = {i * keys + j: first[i] + second[j] for i, j in itertools.product(range(keys), repeat=2)}
        best = sorted(logit, key=lambda slot: (-logit[slot], slot))[:top_k]
        assert slots[0, head].tolist() == best
        expected = torch.tensor([logit[slot] for slot in best]).softmax(0)
        assert torch.allclose(weights[0, head], expected)


def test_a_nan_score_is_not_hidden() -> None:
    scores = torch.randn(4, 3, 8)
    scores[1, 2, 5] = math.nan
    slots, weights = passes.select(scores, 3)
    assert weights.isnan().flatten(1).any(1).tolist() == [False, False, True]
    assert weights[2, 0].isnan().all()
    assert not weights[2, 1].isnan().any()
    assert ((slots >= 0) & (slots < 64)).all()


def test_the_tables_gradient_goes_to_main_grad_and_only_to_rows_that_are_read() -> None:
    inputs = [tensor.detach().float().requires_grad_() for tensor in random_inputs(9, 2, 6, 4, 5)]
    query, keys, table = inputs
    out = read_all(*inputs, 2)
    pull = torch.randn_like(out)
    _, dkeys, dtable = torch.autograd.grad(out, inputs, pull)
    slots, _ = product_key_address(query, keys, 2)
    was_read = torch.zeros(36, dtype=torch.bool).index_fill_(0, slots.flatten().long(), True)
    assert 0 < was_read.sum() < 36
    assert torch.equal(dtable.ne(0).any(1), was_read)

    table.main_grad = torch.where(was_read[:, None], 1.0, math.nan).expand(36, 5).clone()  # type: ignore[attr-defined]
    keys.main_grad = torch.ones_like(keys)  # type: ignore[attr-defined]
    read_all(*inputs, 2).backward(pull)
    assert table.grad is None
    assert keys.grad is None
    assert torch.allclose(table.main_grad[was_read], 1 + dtable[was_read], rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]
    assert table.main_grad[~was_read].isnan().all()  # type: ignore[attr-defined]
    assert torch.allclose(keys.main_grad, 1 + dkeys, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]


def test_weights_of_any_sum_can_be_read() -> None:
    """A layer's gate scales the weights; the read is linear in them."""
    query, keys, table = random_inputs(5, 2, 4, 4, 6)
    slots, weights = product_key_address(query, keys, 3)
    gate = torch.tensor([0.0, -1.0, 0.5, 2.0, 1.0], dtype=torch.float64).requires_grad_()
    gated = product_key_read(table, slots, weights * gate[:, None, None])
    plain = product_key_read(table, slots, weights)
    assert torch.allclose(gated, gate[:, None] * plain)
    (dgate,) = torch.autograd.grad(gated.sum(), gate)
    assert torch.allclose(dgate, plain.sum(1))


# --- the layer and the model -------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "memory_layers"), [("H", [0]), ("DHH", [1, 2]), ("HDH", [2])])
def test_losses_and_gradients_are_the_equations(layers: str, memory_layers: list[int]) -> None:
    config = memory_config(layers=layers, memory_layers=memory_layers)
    model = shifted(build(config, compute_dtype=torch.float64))
    tokens = rows_of(config, 2, 21)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference.token_losses(tokens, leaves, config)
    theirs = torch.autograd.grad(expected.sum(), list(leaves.values()))
    assert torch.allclose(model.token_losses(tokens), expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad(model.loss(tokens, torch.tensor(1.0))[0], list(model.parameters()))
    for name, a, b in zip(leaves, ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-8 * b.abs().max().clamp(min=1e-3), name
        assert b.abs().max() > 0, f"{name} has no influence: the comparison would be empty"


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_gradient_by_finite_differences(name: str) -> None:
    """With the feed-forward silenced no neuron lies between the memory and the loss, which is then smooth in it."""
    config = memory_config(layers="H", memory_layers=[0])
    model, tokens = shifted(build(config, compute_dtype=torch.float64)), rows_of(config, 2, 12)
    parameter = model.get_parameter(f"layer00.{name}")
    with torch.no_grad():
        model.get_parameter("layer00.w_ffn_down").zero_()
    (gradient,) = torch.autograd.grad(model.loss(tokens, torch.tensor(1.0))[0], parameter)
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    start, step, losses = parameter.detach().clone(), 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.copy_(start + sign * step * direction)
        losses.append(model.token_losses(tokens).sum().item())
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx((gradient * direction).sum().item(), rel=1e-5)
    assert abs(slope) > 1e-3, "the parameter has no influence: the comparison would be empty"


def test_groups_and_parts_are_complete() -> None:
    model = build(memory_config())
    names = sorted(name for name, _ in model.named_parameters())
    for partition in (model.groups(), model.parts()):
        assert sorted(name for members in partition.values() for name in members) == names
    assert list(model.groups()) == ["matrix", "embedding", "memory", "neuron", "norm"]
    assert model.groups()["memory"] == ["layer01.memory_table"]
    assert {f"layer01.{name}" for name in NAMES} <= set(model.parts()["layer01"])
    assert "layer01.memory_gate_bias" in model.groups()["neuron"]


def test_main_grad_receives_what_grad_would() -> None:
    config = memory_config()
    tokens = rows_of(config, 3, 40)
    plain, flat = shifted(build(config)), shifted(build(config))
    for p in flat.parameters():
        p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
    for _ in range(2):
        for model in (plain, flat):
            model.loss(tokens, torch.tensor(0.01))[0].backward()
    for name, p in plain.named_parameters():
        main, scale = flat.get_parameter(name).main_grad, p.grad.abs().max()  # type: ignore[union-attr]
        assert flat.get_parameter(name).grad is None, name
        assert scale > 0, name
        assert (p.grad - main).abs().max() <= 1e-5 * scale, name


def test_rows_are_independent() -> None:
    config = memory_config()
    model, tokens = shifted(build(config, compute_dtype=torch.float64)), rows_of(config, 4, 30)
    together = model.token_losses(tokens)
    assert torch.allclose(together, torch.cat([model.token_losses(row[None]) for row in tokens]), rtol=1e-12)
    changed = tokens.clone()
    changed[1] = (changed[1] + 1) % config.vocab_size
    assert torch.allclose(model.token_losses(changed)[[0, 2, 3]], together[[0, 2, 3]], rtol=1e-12)


def test_no_token_sees_a_later_one() -> None:
    config = memory_config()
    model, tokens = shifted(build(config, compute_dtype=torch.float64)), rows_of(config, 1, 30)
    changed = tokens.clone()
    changed[0, 15] = (changed[0, 15] + 1) % config.vocab_size
    before, after = model.token_losses(tokens)[0], model.token_losses(changed)[0]
    assert torch.allclose(before[:14], after[:14], rtol=1e-12)


def test_padding_rows_add_exactly_nothing() -> None:
    config = memory_config()
    model = build(config)
    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
    model.loss(torch.full((2, 31), -100), torch.tensor(1.0))[0].backward()
    assert all((p.main_grad == 0).all() for p in model.parameters())


def test_decoding_is_the_parallel_form() -> None:
    config = memory_config(layers="HDH", memory_layers=[0, 2])
    model, tokens = shifted(build(config, compute_dtype=torch.float64)), rows_of(config, 2, 12)
    state, losses = model.initial_state(2), []
    for t in range(12):
        logits, state = model.step(tokens[:, t], state)
        losses.append(logits.logsumexp(1) - logits.gather(1, tokens[:, t + 1 : t + 2])[:, 0])
    assert torch.allclose(torch.stack(losses, 1), model.token_losses(tokens), rtol=1e-9, atol=1e-9)


def test_recomputation_gives_the_same_bits() -> None:
    config = memory_config()
    tokens, results = rows_of(config, 2, 50), []
    for mode in ("none", "all"):
        model = build(config)
        model.recompute(mode)
        for p in model.parameters():
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
        model.loss(tokens, torch.tensor(0.01))[0].backward()
        results.append([p.main_grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


THREADS_SCRIPT = """
import hashlib, torch
from neuronspark.kernels.product_key import product_key_address, product_key_read
generator = torch.Generator().manual_seed(0)
query, keys, table = (
    torch.randn(shape, generator=generator).requires_grad_() for shape in ((4096, 2, 2, 8), (24, 8), (36, 32))
)
pull = torch.randn(4096, 32, generator=generator)
for threads in (1, 2, 2, 2):
    torch.set_num_threads(threads)
    slots, weights = product_key_address(query, keys, 4)
    (dtable,) = torch.autograd.grad(product_key_read(table, slots, weights.detach()), table, pull)
    print(hashlib.sha256(dtable.numpy().tobytes()).hexdigest())
"""


def test_same_bits_each_time() -> None:
    """On two threads as on one: many tokens on few slots, where a scattered sum would have many results."""
    found = subprocess.run([sys.executable, "-c", THREADS_SCRIPT], check=True, capture_output=True, text=True)
    digests = found.stdout.split()
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_half_precision() -> None:
    """The dtypes of a GPU on the CPU: gradients arrive in fp32 and point where those in fp32 do."""
    config = memory_config(layers="H", memory_layers=[0], memory_keys=16, memory_query_width=32)
    exact, half = build(config), build(config, compute_dtype=torch.bfloat16)
    tokens = rows_of(config, 2, 60)
    for model in (exact, half):
        for p in model.parameters():
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
        model.loss(tokens, torch.tensor(0.01))[0].backward()
    assert half.get_parameter("layer00.memory_table").dtype == torch.bfloat16
    for name in set(NAMES) - {"memory_gate_bias"}:  # one number, the small difference of large sums
        pair = [model.get_parameter(f"layer00.{name}").main_grad.flatten() for model in (exact, half)]
        assert torch.cosine_similarity(*pair, 0) > 0.9, name


def test_it_starts_small() -> None:
    config = memory_config(width=128, memory_keys=32, memory_top_k=8, memory_heads=1, memory_query_width=32)
    layer: Any = build(config).get_submodule("layer01")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        added = add_memory(layer, torch.zeros_like(x), x, config)
    out_scale = 1 / math.sqrt(2 * len(config.layers))
    assert 0 < added.std() < 0.1 * out_scale  # out_scale is what an output of unit variance adds


def test_it_learns() -> None:
    """Trained alone, it learns by heart which token follows which: facts that nothing else in the model holds."""
    config = memory_config(width=64, layers="H", memory_layers=[0], memory_keys=32, memory_query_width=32)
    model = build(config)
    tokens = torch.randperm(64, generator=torch.Generator().manual_seed(0))[None, :33]
    with torch.no_grad():
        model.norm.fill_(20)  # so that logits can be as large as certainty needs
    for name, p in model.named_parameters():
        p.requires_grad_(name.rpartition(".")[2] in NAMES)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    first = model.token_losses(tokens).mean().item()
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(tokens, torch.tensor(1 / 32))[0].backward()
        optimizer.step()
    assert model.token_losses(tokens).mean().item() < 0.2 * first


# --- the configuration -------------------------------------------------------------------------------------


def test_presets_and_earlier_configurations_have_no_memory() -> None:
    for preset in preset_names():
        config = load_preset(preset)
        assert config.memory_layers == ()
        assert not any("memory" in name for name, _ in build(config, "meta").named_parameters())
    earlier = {name: value for name, value in VALUES.items() if not name.startswith("memory")}
    assert ModelConfig.from_dict(earlier).memory_layers == ()


def test_a_memory_leaves_the_other_parameters_start_as_it_is() -> None:
    without, with_memory = build(memory_config(memory_layers=[])), build(memory_config())
    for name, p in without.named_parameters():
        assert torch.equal(p, with_memory.get_parameter(name)), name


def test_round_trip_through_json() -> None:
    config = memory_config()
    as_json = json.loads(json.dumps(config.to_dict()))
    assert as_json == config.to_dict()
    assert ModelConfig.from_dict(as_json) == config
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"memory_layers": [0]},
            r"memory_layers is \[0\]: expected ascending indices of hippocampal layers.* are \[1\]",
        ),
        ({"memory_layers": [2]}, r"those of layers 'DH' are \[1\]"),
        ({"memory_layers": [-1]}, r"memory_layers is \[-1\]"),
        ({"memory_layers": [1, 1]}, "without repetition"),
        ({"layers": "HH", "memory_layers": [1, 0]}, "ascending"),
        ({"memory_layers": "1"}, "memory_layers is '1': expected a tuple of whole numbers"),
        ({"memory_layers": [True]}, "expected a tuple of whole numbers"),
        ({"memory_layers": 1}, "memory_layers is 1: expected a tuple of whole numbers"),
        ({"memory_top_k": 7}, r"memory_top_k is 7: expected at most memory_keys \(6\)"),
        ({"memory_top_k": 0}, "memory_top_k is 0"),
        ({"memory_query_width": 7}, "memory_query_width is 7: expected a positive multiple of 2"),
        ({"memory_keys": 46_341}, "memory_keys is 46341: expected at most 46340"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        memory_config(**change)


def test_it_is_counted() -> None:
    config = memory_config()
    none = memory_config(memory_layers=[])
    matrices = 2 * 8 * 32 + 2 * 2 * 6 * 4 + 32 + 32 * 12  # queries, keys, gate, out
    assert config.parameter_count() - none.parameter_count() == matrices + 36 * 12 + 1
    assert config.parameter_count() == sum(p.numel() for p in build(config).parameters())
    assert config.parameters_by_group()["memory"] == 36 * 12
    assert config.flops_per_token(8) - none.flops_per_token(8) == 6 * (matrices + 2 * 4 * 12)
    wider = memory_config(memory_value_width=24)
    assert wider.flops_per_token(8) - config.flops_per_token(8) == 6 * (32 * 12 + 2 * 4 * 12)
    more_slots = memory_config(memory_keys=12)
    assert more_slots.flops_per_token(8) - config.flops_per_token(8) == 6 * (2 * 2 * 6 * 4)
