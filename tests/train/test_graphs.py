"""The graphs' engine against the eager one: the same bits, whatever the order of shapes, skips and validations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import TENSOR_KINDS
from nstrain.train.graphs import GraphEngine

pytestmark = pytest.mark.gpu

HELD = 3 << 30
"""Two engines share the card in most tests."""


def neuronspark(recompute: str = "none", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    from neuronspark import NeuronSpark
    from neuronspark.config import ModelConfig

    config = ModelConfig(vocab_size=256, width=128, layers="DDH", rope_max_seq_len=2048, ffn_width=256)
    return NeuronSpark(config, torch.device("cuda"), seed=3, compute_dtype=dtype)


MODELS = {
    "tiny": lambda: TinyModel(seed=1, vocab_size=256).cuda(),
    "neuronspark-bf16": neuronspark,
    "neuronspark-fp32": lambda: neuronspark(dtype=torch.float32),
}


def engines(name: str, micro_rows: int = 2) -> tuple[EagerEngine, GraphEngine]:
    pair = EagerEngine(MODELS[name](), optimizer_settings()), GraphEngine(MODELS[name](), optimizer_settings(), HELD)  # type: ignore
    for engine in pair:
        engine.set_length(LengthSettings(micro_rows=micro_rows))
    return pair  # type: ignore[return-value]


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in TENSOR_KINDS for n, a in engine.flat.export(k).items()}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_equal_eager_bit_for_bit_over_lengths_and_ramps(name: str) -> None:
    eager, graphs = engines(name)
    plan = [(5, 64, 2), (4, 64, 2), (3, 256, 1), (8, 64, 2), (1, 256, 1), (6, 64, 3), (7, 33, 2), (9, 64, 2)]
    for seed, (rows, tokens, micro_rows) in enumerate(plan):
        batch = random_rows(rows, tokens, vocab_size=256, seed=seed)
        for engine in (eager, graphs):
            engine.set_length(LengthSettings(micro_rows=micro_rows))
        expected, found = (train_update(e, batch, micro_rows, 1e-3 * (1 + seed), 0.1) for e in (eager, graphs))
        assert found == expected, f"update {seed}"
        assert math.isfinite(found.loss)
        assert np.array_equal(graphs.row_losses(batch[:1]), eager.row_losses(batch[:1]))
    assert state_bytes(graphs) == state_bytes(eager)


@pytest.mark.parametrize("recompute", ["dendritic", "all"])
def test_recomputation_changes_no_bit(recompute: str) -> None:
    plain, recomputed = (GraphEngine(neuronspark(), optimizer_settings(), HELD) for _ in range(2))  # type: ignore[arg-type]
    plain.set_length(LengthSettings(micro_rows=2))
    recomputed.set_length(LengthSettings(micro_rows=2, recompute=recompute))  # type: ignore[arg-type]
    for seed in range(2):
        batch = random_rows(4, 128, vocab_size=256, seed=seed)
        assert train_update(plain, batch, 2, 1e-3, 0.1) == train_update(recomputed, batch, 2, 1e-3, 0.1)
    assert state_bytes(plain) == state_bytes(recomputed)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_leaves_every_byte_and_the_next_is_normal(bad: float) -> None:
    spoiled, clean = (GraphEngine(neuronspark(), optimizer_settings(), HELD) for _ in range(2))  # type: ignore[arg-type]
    for engine in (spoiled, clean):
        engine.set_length(LengthSettings(micro_rows=2))
        train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1)
    before = state_bytes(spoiled)
    spoiled.accumulate(random_rows(2, 64, vocab_size=256, seed=1), 1 / 128)
    spoiled.flat.groups[-1].main_grad[1:2].fill_(bad)
    readings = spoiled.finish(1e-3, 0.1)
    assert readings.skipped
    assert not math.isfinite(readings.grad_norm)
    assert state_bytes(spoiled) == before
    rows = random_rows(4, 64, vocab_size=256, seed=2)
    assert train_update(spoiled, rows, 2, 1e-3, 0.1) == train_update(clean, rows, 2, 1e-3, 0.1)
    assert state_bytes(spoiled) == state_bytes(clean)


def test_an_update_does_not_wait_for_the_device() -> None:
    """torch's sync debug mode raises at a copy or read that waits; only the readings at the end may."""
    _, engine = engines("neuronspark-bf16")
    train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(3):
            engine.accumulate(random_rows(2, 64, vocab_size=256, seed=seed), 1 / 384)
        torch.cuda.set_sync_debug_mode("default")
        engine.finish(1e-3, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
