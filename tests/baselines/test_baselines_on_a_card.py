"""What only a GPU can show of the baselines: graphs equal to eager, no waiting, and an attention of fixed bits."""

from __future__ import annotations

import pytest
import torch
from baselines import ModelConfig, NeuronSpark
from baselines.operators import causal_attention
from torch import Tensor
from train_helpers import optimizer_settings, random_rows

from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import TENSOR_KINDS
from nstrain.train.graphs import GraphEngine

pytestmark = pytest.mark.gpu

LAYERS = {"llama": "AA", "mamba2": "SS"}


def model(layers: str, dtype: torch.dtype = torch.bfloat16) -> NeuronSpark:
    config = ModelConfig(256, 256, layers, 2048, ffn_width=384, head_width=64)
    return NeuronSpark(config, torch.device("cuda"), seed=3, compute_dtype=dtype)


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in TENSOR_KINDS for n, a in engine.flat.export(k).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_graphs_equal_eager_and_recomputation_bit_for_bit(name: str) -> None:
    eager = EagerEngine(model(LAYERS[name]), optimizer_settings())
    graphs = GraphEngine(model(LAYERS[name]), optimizer_settings(), 4 << 30)
    again = EagerEngine(model(LAYERS[name]), optimizer_settings())
    for seed, (rows, tokens) in enumerate([(5, 64), (4, 256), (3, 33), (4, 64)]):
        batch = random_rows(rows, tokens, vocab_size=256, seed=seed)
        for engine, recompute in ((eager, "none"), (graphs, "none"), (again, "all")):
            engine.set_length(LengthSettings.model_validate({"micro_rows": 2, "recompute": recompute}))
        readings = [train_update(engine, batch, 2, 1e-3, 0.1) for engine in (eager, graphs, again)]
        assert readings[0] == readings[1] == readings[2], f"update {seed}"
    assert state_bytes(eager) == state_bytes(graphs) == state_bytes(again)
    graphs.close_arena()


@pytest.mark.parametrize("name", LAYERS)
def test_a_micro_batch_does_not_wait_for_the_device(name: str) -> None:
    engine = EagerEngine(model(LAYERS[name]), optimizer_settings())
    engine.set_length(LengthSettings(micro_rows=2))
    rows = random_rows(2, 64, vocab_size=256)
    engine.accumulate(rows, 1 / 128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.accumulate(rows, 1 / 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LAYERS)
def test_the_card_computes_what_the_cpu_does(name: str) -> None:
    """Losses in bf16 and in fp32 beside float64 on the CPU, and the whole gradient's direction and length."""
    exact = model(LAYERS[name], torch.float64).cpu()
    tokens = torch.from_numpy(random_rows(3, 200, vocab_size=256))
    exact.loss(tokens, torch.tensor(1 / 600))[0].backward()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        found = model(LAYERS[name], dtype)
        found.loss(tokens.cuda(), torch.tensor(1 / 600, device="cuda"))[0].backward()
        difference = found.token_losses(tokens.cuda()).double().cpu() - exact.token_losses(tokens)
        assert difference.abs().max() < near
        gradient = torch.cat([p.grad.flatten().double().cpu() for p in found.parameters()])
        assert (gradient - wanted).norm() < near * wanted.norm()


def attention_results(inputs: list[Tensor], dout_BLhd: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out_BLhd = causal_attention(*leaves)
    return [out_BLhd.detach(), *torch.autograd.grad(out_BLhd, leaves, dout_BLhd.to(out_BLhd.dtype))]


@pytest.mark.parametrize("mode", ["default", "error"])
def test_attention_has_the_same_bits_whatever_mode_torch_is_in(mode: str) -> None:
    """Long enough that many programs add to one query's gradient; in torch's default mode their order varies."""
    inputs = [torch.randn(2, 4096, 8, 128, device="cuda").bfloat16() for _ in range(3)]
    dout_BLhd = torch.randn(2, 4096, 8, 128, device="cuda")
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        first = attention_results(inputs, dout_BLhd)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, attention_results(inputs, dout_BLhd), strict=True))
        assert torch.get_deterministic_debug_mode() == {"default": 0, "error": 2}[mode]
    finally:
        torch.set_deterministic_debug_mode(before)
    short = [x[:, :300] for x in inputs]
    expected = attention_results([x.double() for x in short], dout_BLhd[:, :300])
    for mine, other in zip(attention_results(short, dout_BLhd[:, :300]), expected, strict=True):
        assert (mine - other).norm() < 0.01 * other.norm()
