"""The whole model: its equations, and every promise of the contract with the trainer."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ns_reference as reference
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from neuronspark import ModelConfig, NeuronSpark
from neuronspark.dendritic import inverse_softplus, starting_leaks

REPOSITORY = Path(__file__).resolve().parents[2]


def small_config(layers: str = "DDH", **changes: object) -> ModelConfig:
    values = {
        "vocab_size": 64,
        "width": 32,
        "layers": layers,
        "rope_max_seq_len": 200,
        "ffn_width": 48,
        "dendritic_head_width": 8,
        "state_width": 8,
        "state_groups": 2,
        "pool_head_width": 16,
        "trace_width": 8,
        "match_width": 8,
    }
    return ModelConfig.from_dict({**values, **changes})


def build(config: ModelConfig, device: str = "cpu", **options: Any) -> NeuronSpark:
    return NeuronSpark(config, device, **{"seed": 0, **options})


def rows_of(config: ModelConfig, rows: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, tokens + 1), generator=generator)


def scale_of(value: float = 1.0) -> Tensor:
    return torch.tensor(value)


def with_main_grads(model: NeuronSpark) -> dict[str, Tensor]:
    """Flat storage as a trainer lays it out: every parameter and its main_grad a view of one buffer."""
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    data, gradients, offset, views = torch.empty(total), torch.zeros(total), 0, {}
    for name, p in parameters.items():
        part = slice(offset, offset + p.numel())
        data[part].copy_(p.detach().flatten())
        p.data = data[part].view_as(p)
        p.main_grad = views[name] = gradients[part].view_as(p)  # type: ignore[attr-defined]
        offset += p.numel()
    return views


# --- equations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "tokens"), [("D", 70), ("H", 70), ("DDH", 9), ("HD", 1)])
def test_losses_and_gradients_are_the_equations(layers: str, tokens: int) -> None:
    config = small_config(layers)
    model = build(config, compute_dtype=torch.float64)
    with torch.no_grad():  # away from the symmetric start, so that every parameter matters
        for index, p in enumerate(model.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index), dtype=p.dtype)
    tokens_BL1 = rows_of(config, 2, tokens)
    tokens_BL1[0, 0] = -100
    tokens_BL1[1, -1] = -100
    names = [name for name, _ in model.named_parameters()]
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference.token_losses(tokens_BL1, leaves, config)
    expected_gradients = torch.autograd.grad(3 * expected.sum(), list(leaves.values()), materialize_grads=True)

    assert torch.allclose(model.token_losses(tokens_BL1), expected, rtol=1e-9, atol=1e-9)
    loss, terms = model.loss(tokens_BL1, scale_of(3.0))
    assert torch.allclose(loss, 3 * expected.sum())
    assert torch.allclose(terms["ce_sum"], expected.sum())
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    for name, ours, theirs in zip(names, gradients, expected_gradients, strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)
        assert error < 1e-8, name
        if tokens > 1:
            assert theirs.abs().max() > 0, f"{name} has no influence: the comparison would be empty"


def test_z_loss() -> None:
    config = small_config("D", z_loss_weight=0.01)
    model, tokens = build(config), rows_of(config, 2, 10)
    loss, terms = model.loss(tokens, scale_of(0.5))
    assert set(terms) == {"ce_sum", "z_sum"}
    assert terms["z_sum"] > 0
    assert torch.allclose(loss, 0.5 * (terms["ce_sum"] + terms["z_sum"]))
    assert torch.allclose(model.token_losses(tokens).sum(), terms["ce_sum"])


@pytest.mark.parametrize("at", [0, 5, 63, 64, 65, 99])
def test_a_token_changes_no_loss_before_it(at: int) -> None:
    config = small_config("DHDH")
    model = build(config, compute_dtype=torch.float64)
    tokens = rows_of(config, 1, 100)
    changed = tokens.clone()
    changed[0, at] = (changed[0, at] + 1) % config.vocab_size
    before, after = model.token_losses(tokens)[0], model.token_losses(changed)[0]
    # Position t - 1 has token t as its target; everything earlier has not seen it.
    assert torch.allclose(before[: max(at - 1, 0)], after[: max(at - 1, 0)], rtol=1e-12, atol=1e-12)
    assert (before[at:] - after[at:]).abs().max() > 1e-6


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    config = small_config()
    model, tokens = build(config, compute_dtype=torch.float64), rows_of(config, 5, 77)
    together = model.token_losses(tokens)
    alone = torch.cat([model.token_losses(tokens[i : i + 1]) for i in range(5)])
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_any_row_length(tokens: int) -> None:
    config = small_config()
    model = build(config)
    loss, _ = model.loss(rows_of(config, 2, tokens), scale_of())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("shape", [(2, 202), (2, 1), (10,)])
def test_rows_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"L from 1 to rope_max_seq_len \(200\)"):
        build(small_config()).loss(torch.zeros(shape, dtype=torch.long), scale_of())


# --- padding -----------------------------------------------------------------------------------------------


def test_padding_rows_add_exactly_nothing() -> None:
    config = small_config(z_loss_weight=0.01)
    model = build(config)
    views = with_main_grads(model)
    loss, _ = model.loss(torch.full((3, 51), -100), scale_of())
    loss.backward()
    assert loss.item() == 0
    assert all((view == 0).all() for view in views.values())


def test_padding_rows_beside_real_ones_change_nothing() -> None:
    config = small_config()
    real = rows_of(config, 2, 40)
    results = []
    for tokens in (real, torch.cat((real, torch.full((2, 41), -100)))):
        model = build(config, compute_dtype=torch.float64)
        loss, _ = model.loss(tokens, scale_of())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for alone, padded in zip(*results, strict=True):
        assert torch.allclose(alone, padded, rtol=1e-10, atol=1e-12)


# --- gradients ---------------------------------------------------------------------------------------------


def test_main_grad_receives_what_grad_would() -> None:
    config = small_config()
    tokens = rows_of(config, 3, 70)
    plain, flat = build(config), build(config)
    views = with_main_grads(flat)
    plain.loss(tokens, scale_of(0.01))[0].backward()
    flat.loss(tokens, scale_of(0.01))[0].backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert flat.get_parameter(name).grad is None, name
        scale = p.grad.abs().max()
        assert scale > 0, name
        assert (p.grad - views[name]).abs().max() <= 1e-5 * scale, name


def test_main_grad_accumulates_over_micro_batches() -> None:
    config = small_config()
    model, tokens = build(config), rows_of(config, 4, 30)
    views = with_main_grads(model)
    model.loss(tokens, scale_of(0.01))[0].backward()
    whole = {name: view.clone() for name, view in views.items()}
    for view in views.values():
        view.zero_()
    for part in tokens.split(1):
        model.loss(part, scale_of(0.01))[0].backward()
    for name, view in views.items():
        assert torch.allclose(view, whole[name], rtol=1e-3, atol=1e-5 * whole[name].abs().max().item()), name


@pytest.mark.parametrize("mode", ["dendritic", "all"])
def test_recomputation_gives_the_same_bits(mode: str) -> None:
    config = small_config("DHD")
    tokens = rows_of(config, 2, 70)
    results = []
    for each in ("none", mode):
        model = build(config)
        model.recompute(each)
        views = with_main_grads(model)
        loss, _ = model.loss(tokens, scale_of(0.01))
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        results.append([loss.detach(), *views.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["none", "dendritic", "all"])
def test_recomputation_keeps_less(mode: str) -> None:
    """Bytes kept for the backward, counted by autograd's own hooks."""
    config = small_config("DDHH")
    model, tokens = build(config), rows_of(config, 2, 128)
    model.recompute(mode)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model.loss(tokens, scale_of())
    kept_bytes = sum(kept.values())
    limits = {"none": (2_000_000, math.inf), "dendritic": (800_000, 2_000_000), "all": (0, 800_000)}
    low, high = limits[mode]
    assert low < kept_bytes < high
    del loss


def test_unknown_recompute_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'some': expected one of none, dendritic, all"):
        build(small_config()).recompute("some")


def test_token_losses_keeps_no_graph() -> None:
    config = small_config()
    losses = build(config).token_losses(rows_of(config, 2, 10))
    assert losses.shape == (2, 10)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad


# --- names -------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_one_group_and_one_part() -> None:
    model = build(small_config("DH"))
    names = sorted(name for name, _ in model.named_parameters())
    for partition in (model.groups(), model.parts()):
        assert sorted(name for members in partition.values() for name in members) == names
    assert list(model.groups()) == ["matrix", "embedding", "neuron", "norm"]
    assert list(model.parts()) == ["layer00", "layer01", "embedding", "norm"]
    assert model.groups()["embedding"] == ["embedding"] == model.parts()["embedding"]
    for name in model.groups()["matrix"]:
        assert model.get_parameter(name).dim() == 2
    for name in model.groups()["neuron"] + model.groups()["norm"]:
        assert not name.rpartition(".")[2].startswith("w_")


def test_a_stray_parameter_is_found_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronspark import dendritic

    original = dendritic.DendriticLayer.__init__

    def with_a_stray(self: torch.nn.Module, config: ModelConfig) -> None:
        original(self, config)
        self.stray = torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(dendritic.DendriticLayer, "__init__", with_a_stray)
    with pytest.raises(RuntimeError, match=r"layer00\.stray"):
        build(small_config("D"))


# --- start -------------------------------------------------------------------------------------------------


def test_start_depends_on_seed_and_name_alone() -> None:
    short, long = build(small_config("D")), build(small_config("DH", vocab_size=128))
    for name, p in short.named_parameters():
        if name not in ("embedding", "layer00.w_out"):  # their scale or shape follows the changed fields
            assert torch.equal(p, long.get_parameter(name)), name
    other = build(small_config("D"), seed=1)
    assert not torch.equal(short.get_parameter("layer00.w_v"), other.get_parameter("layer00.w_v"))


def test_starting_leaks() -> None:
    leak, dt = starting_leaks(16)
    efold = 1 / (leak * dt)
    assert efold[[0, 13, 14, 15]].tolist() == pytest.approx([2, 1000, 40_000, 256_000])
    assert leak[14:].tolist() == [1, 1]
    assert torch.allclose(functional.softplus(inverse_softplus(dt)), dt, rtol=1e-9)
    # The contract: dt_raw = ln(tau) + 3.5 flushes a slow-leak head to 0.03 in one token.
    flush = torch.exp(-leak * functional.softplus(efold.log() + 3.5 + inverse_softplus(dt)))[14:]
    assert flush.tolist() == pytest.approx([0.03, 0.03], abs=0.002)
    for heads in (1, 2, 3, 8):
        assert all(values.shape == (heads,) and (values > 0).all() for values in starting_leaks(heads))
        slow = sum(1 / (a * t) >= 39_999 for a, t in zip(*map(Tensor.tolist, starting_leaks(heads)), strict=True))
        assert slow == max(heads > 1, heads // 8), "one in eight, and of two one"


def test_the_built_model_has_the_starting_values_of_the_design() -> None:
    """The numbers stand here once more, so that none of them moves unseen."""
    config = ModelConfig(vocab_size=128, width=512, layers="DH", rope_max_seq_len=64, ffn_width=64, trace_width=128)
    start = {name: p.detach().double() for name, p in build(config).named_parameters()}
    dt, leak = functional.softplus(start["layer00.dt_bias"]), start["layer00.a_log"].exp()
    efold_tokens = 1 / (leak * dt)
    assert efold_tokens[[0, 13, 14, 15]].tolist() == pytest.approx([2, 1000, 40_000, 256_000], rel=1e-3)
    assert leak[14:].tolist() == pytest.approx([1, 1]), "a step of a few units could not flush a slow-leak head"
    assert torch.allclose(start["layer00.input_gain"], (2 / dt).sqrt().clamp(max=16), rtol=1e-3)
    assert start["layer00.w_dt"].std().item() * math.sqrt(config.width) == pytest.approx(0.1, rel=0.05)
    for name, first, last in (
        ("clock_bias", -9, -4),
        ("write_bias", 3, 3),
        ("query_gain", 1, 1),
        ("match_gain", 0.5, 4),
        ("decay_bias", -4, 1.5),
        ("copy_bias", 2, 2),
        ("novelty_weight", 0.5, 0.5),
        ("read_gain_bias", 0.54, 0.54),
    ):
        found = start[f"layer01.{name}"]
        expected = torch.linspace(first, last, len(found), dtype=torch.float64)
        assert torch.allclose(found, expected, rtol=0, atol=1e-6), name
    thresholds = [name for name in start if name.endswith("log_threshold")]
    assert len(thresholds) == 5
    for name in thresholds:
        assert torch.allclose(start[name].exp(), torch.tensor(0.6).double()), name
    other = build(dataclasses.replace(config, threshold_init=1.2))
    for name in thresholds:
        assert torch.allclose(other.get_parameter(name).exp(), torch.tensor(1.2)), name


def test_neurons_fire_within_their_range_on_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronspark import neuron
    from neuronspark.kernels import gated_release, norm_release, release_product

    rates: list[tuple[bool, float]] = []
    original = neuron.release

    def counted(u: Tensor, log_theta: Tensor, lowest: int, highest: int, margin: float) -> Tensor:
        out = original(u, log_theta, lowest, highest, margin)
        rates.append((lowest < 0, (out != 0).double().mean().item()))
        return out

    for module in (neuron, gated_release, norm_release, release_product):
        monkeypatch.setattr(module, "release", counted)
    config = small_config("DDDHDDDH", width=128, state_groups=1)
    build(config).token_losses(rows_of(config, 4, 128))
    assert len(rates) == 6 + 2 * 4
    for is_signed, rate in rates:
        assert 0.1 < rate < (0.95 if is_signed else 0.8)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    config = small_config("DDDH", width=128)
    loss = build(config).token_losses(rows_of(config, 4, 100)).mean()
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.15)


def test_half_precision_matrices_with_fp32_scalars() -> None:
    """The dtypes of a GPU, on the CPU: losses stay near those in fp32, and gradients arrive in fp32 main_grads."""
    config = small_config("DH")
    exact, half = build(config), build(config, compute_dtype=torch.bfloat16)
    tokens = rows_of(config, 2, 70)
    for group, names in half.groups().items():
        wanted = torch.bfloat16 if group in ("matrix", "embedding") else torch.float32
        assert {half.get_parameter(name).dtype for name in names} == {wanted}
    for p in half.parameters():
        p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
    loss, _ = half.loss(tokens, scale_of(1 / 140))
    loss.backward()
    expected, _ = exact.loss(tokens, scale_of(1 / 140))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=0.02)
    for name, p in half.named_parameters():
        gradient = exact.get_parameter(name).grad
        assert gradient is not None
        assert p.grad is None
        if p.dim() == 2:  # small tensors' gradients are differences of large sums and may be mostly rounding
            similarity = torch.cosine_similarity(p.main_grad.flatten(), gradient.flatten(), 0)
            assert similarity > 0.75, name  # a rounded input flips the quanta near a tie


# --- learning and determinism ------------------------------------------------------------------------------


def test_a_tiny_batch_is_learnt_by_heart() -> None:
    config = small_config("DH", width=64)
    model, tokens = build(config), rows_of(config, 2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = model.loss(tokens, scale_of(1 / 64))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def printed_by(program: str, **environment: str) -> list[str]:
    """The words a program prints, run in a process of its own, where it may use as many threads as it likes."""
    merged = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_WAIT_POLICY": "passive", **environment}
    run = subprocess.run([sys.executable, "-c", program], env=merged, capture_output=True, text=True, check=True)
    return run.stdout.split()


LOOKUP_PROGRAM = """
import hashlib, torch
from neuronspark.kernels.embedding import lookup
torch.set_num_threads(2)
tokens = torch.randint(0, 50, (8192,), generator=torch.Generator().manual_seed(0))
gradient = torch.randn(8192, 64, generator=torch.Generator().manual_seed(1))
for _ in range(12):
    table = torch.zeros(50, 64, requires_grad=True)
    lookup(table, tokens).backward(gradient)
    print(hashlib.sha256(table.grad.numpy().tobytes()).hexdigest())
"""


def test_embedding_gradient_is_the_same_in_twelve_runs() -> None:
    """Many tokens on few rows, the case in which a scattered accumulation gave twelve results on two threads."""
    digests = printed_by(LOOKUP_PROGRAM)
    assert len(digests) == 12
    assert len(set(digests)) == 1


DIGEST_PROGRAM = """
import hashlib, torch
from neuronspark import ModelConfig, NeuronSpark
torch.set_num_threads(2)
torch.use_deterministic_algorithms(True)
config = ModelConfig(vocab_size=512, width=128, layers="DH", rope_max_seq_len=256, ffn_width=256)
model = NeuronSpark(config, seed=3)
tokens = torch.randint(0, 512, (4, 201), generator=torch.Generator().manual_seed(0))
for p in model.parameters():
    p.main_grad = torch.zeros(p.shape)
for _ in range(2):
    digest = hashlib.sha256()
    for p in model.parameters():
        p.main_grad.zero_()
    loss, _ = model.loss(tokens, torch.tensor(1 / 800))
    loss.backward()
    for part in [loss.detach(), model.token_losses(tokens), *(p.main_grad for p in model.parameters())]:
        digest.update(part.numpy().tobytes())
    print(digest.hexdigest())
"""


def test_same_bits_in_a_process_and_across_processes() -> None:
    digests = [digest for seed in ("1", "2") for digest in printed_by(DIGEST_PROGRAM, PYTHONHASHSEED=seed)]
    assert len(digests) == 4
    assert len(set(digests)) == 1
