"""The graphs' engine against the eager one: the same bits, whatever the order of shapes, skips and validations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.gpu.arena import arena_stream
from nstrain.settings.run import LengthSettings
from nstrain.train import engine as engine_module
from nstrain.train.engine import EagerEngine, OptimizerCounts, train_update
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


def graph_engine(name: str = "neuronspark-bf16", micro_rows: int = 2) -> GraphEngine:
    engine = GraphEngine(MODELS[name](), optimizer_settings(), HELD, with_ema=True)  # type: ignore[no-untyped-call]
    engine.set_length(LengthSettings(micro_rows=micro_rows))
    return engine


def engines(name: str, micro_rows: int = 2) -> tuple[EagerEngine, GraphEngine]:
    eager = EagerEngine(MODELS[name](), optimizer_settings(), with_ema=True)  # type: ignore[no-untyped-call]
    eager.set_length(LengthSettings(micro_rows=micro_rows))
    return eager, graph_engine(name, micro_rows)


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    torch.cuda.synchronize()
    return {(k, n): a.tobytes() for k in engine.flat.kinds for n, a in engine.flat.export(k).items()}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_equal_eager_bit_for_bit_over_lengths_and_ramps(name: str) -> None:
    eager, graphs = engines(name)
    plan = [(5, 64, 2), (4, 64, 2), (3, 256, 1), (8, 64, 2), (1, 256, 1), (6, 64, 3), (7, 33, 2), (9, 64, 2)]
    for seed, (rows, tokens, micro_rows) in enumerate(plan):
        batch = random_rows(rows, tokens, vocab_size=256, seed=seed)
        for engine in (eager, graphs):
            engine.set_length(LengthSettings(micro_rows=micro_rows))
        ema = None if seed < 2 else 0.1 * seed
        expected, found = (train_update(e, batch, micro_rows, 1e-3 * (1 + seed), 0.1, ema) for e in (eager, graphs))
        assert found == expected, f"update {seed}"
        assert math.isfinite(found.loss)
        assert np.array_equal(graphs.token_losses(batch[:1]), eager.token_losses(batch[:1]))
    assert ("ema", "norm") in state_bytes(graphs)
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


@pytest.mark.parametrize("micro_batch", ["first", "middle", "last"])
def test_a_skipped_update_leaves_every_byte_and_the_next_is_normal(micro_batch: str) -> None:
    """In every group a NaN or an infinity that came with one micro-batch, and the micro-batches after it add to."""
    spoiled, clean = graph_engine(), graph_engine()
    for engine in (spoiled, clean):
        for ema in (None, 0.5, 0.5):
            train_update(engine, random_rows(6, 64, vocab_size=256), 2, 1e-3, 0.1, ema)
    cases = [(group, bad) for group in spoiled.flat.groups for bad in (math.nan, math.inf)]
    for number, (group, bad) in enumerate(cases):
        before, step = state_bytes(spoiled), spoiled.counts.step
        for place in ("first", "middle", "last"):
            spoiled.accumulate(random_rows(2, 64, vocab_size=256, seed=number), 1 / 384)
            if place == micro_batch:
                with torch.cuda.stream(arena_stream()):
                    group.main_grad[-1:].fill_(bad)
        readings = spoiled.finish(1e-3, 0.1, 0.5)
        assert readings.skipped, (group.name, bad)
        assert not math.isfinite(readings.grad_norm)
        assert not math.isfinite(readings.group_norms[group.name])
        assert state_bytes(spoiled) == before, (group.name, bad)
        assert not any(bool(g.main_grad.any()) for g in spoiled.flat.groups)
        assert spoiled.counts == OptimizerCounts(step, 1, number + 1)
        rows = random_rows(6, 64, vocab_size=256, seed=100 + number)
        found, expected = (train_update(e, rows, 2, 1e-3, 0.1, 0.5) for e in (spoiled, clean))
        assert found == expected, (group.name, bad)
        assert state_bytes(spoiled) == state_bytes(clean), (group.name, bad)


def test_an_update_waits_for_the_device_only_to_read_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sync debug mode raises at a copy or read that waits."""
    engine = graph_engine()
    train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1, 0.5)
    reads = []

    def read(readings: torch.Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            reads.append(readings.tolist())
        finally:
            torch.cuda.set_sync_debug_mode("error")
        return reads[-1]

    monkeypatch.setattr(engine_module, "to_host", read)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(3):
            train_update(engine, random_rows(5, 64, vocab_size=256, seed=seed), 2, 1e-3, 0.1, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reads) == 3


def test_readings_between_updates_disturb_nothing_and_take_no_memory_of_the_device() -> None:
    read, plain = graph_engine(), graph_engine()
    eager, _ = engines("neuronspark-bf16")
    everyone = (read, plain, eager)
    rows, long_row = random_rows(3, 64, vocab_size=256, seed=50), random_rows(1, 1024, vocab_size=256, seed=51)

    def readings(engine: EagerEngine) -> list[object]:
        found: list[object] = [engine.token_losses(rows).tobytes(), engine.token_losses(long_row).tobytes()]
        for tokens, attention in ((rows, False), (long_row, True)):
            probed = engine.probe(tokens, 0, 64, attention)
            found.append({(part, name): v.tobytes() for part, of in probed.items() for name, v in of.items()})
        return [*found, repr(engine.optimizer_summaries(1e-3))]

    assert readings(read) == readings(eager), "before the first capture"
    for seed in range(4):
        batch = random_rows(5, 64, vocab_size=256, seed=seed)
        results = [train_update(engine, batch, 2, 1e-3, 0.1, 0.3) for engine in everyone]
        assert results[0] == results[1] == results[2], f"update {seed}"
        before, reserved = state_bytes(read), torch.cuda.memory_reserved()
        found = readings(read)
        with read.ema_weights():
            of_average = readings(read)
        assert torch.cuda.memory_reserved() == reserved
        assert state_bytes(read) == before
        assert found == readings(read)
        assert found == readings(eager)
        with eager.ema_weights():
            assert of_average == readings(eager)
        assert (of_average[0] == found[0]) == (seed == 0), "after its first move it is a copy"
    assert state_bytes(read) == state_bytes(plain)


def test_a_capture_in_a_new_arena_gives_the_same_bits() -> None:
    through, again = graph_engine(), graph_engine()
    for seed, tokens in enumerate((64, 200, 64, 64, 200)):
        batch = random_rows(5, tokens, vocab_size=256, seed=seed)
        assert train_update(again, batch, 2, 1e-3, 0.1, 0.3) == train_update(through, batch, 2, 1e-3, 0.1, 0.3)
        assert np.array_equal(again.token_losses(batch), through.token_losses(batch))
        if seed in (1, 2):
            assert again.close_arena() > HELD // 2
    assert state_bytes(again) == state_bytes(through)


def test_a_capture_in_the_middle_of_an_update_keeps_what_was_accumulated() -> None:
    eager, graphs = engines("neuronspark-bf16")
    for engine in (eager, graphs):
        train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1)
    for seed, tokens in enumerate((64, 128, 64)):
        for engine in (eager, graphs):
            engine.accumulate(random_rows(2, tokens, vocab_size=256, seed=seed), 1 / 512)
    assert graphs.finish(1e-3, 0.1) == eager.finish(1e-3, 0.1)
    assert state_bytes(graphs) == state_bytes(eager)


def test_an_event_before_an_update_is_applied_is_waited_for_on_the_stream_that_applies_it() -> None:
    """As a checkpoint copies: from a stream of its own, while the next update's micro-batches run."""
    engine, copies = graph_engine(), torch.cuda.Stream()
    train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1)
    before = state_bytes(engine)
    held = {(k, g.name): torch.empty_like(g.buffer(k)) for g in engine.flat.groups for k in engine.flat.kinds}
    with torch.cuda.stream(copies):
        torch.cuda._sleep(200_000_000)
        for (kind, name), copy in held.items():
            copy.copy_(next(g for g in engine.flat.groups if g.name == name).buffer(kind), non_blocking=True)
        event = copies.record_event()
    engine.before_apply = lambda: torch.cuda.current_stream().wait_event(event)
    train_update(engine, random_rows(4, 64, vocab_size=256, seed=1), 2, 1e-3, 0.1)
    torch.cuda.synchronize()
    for group in engine.flat.groups:
        for cut in group.slices:
            for kind in engine.flat.kinds:
                found = cut.of(held[kind, group.name]).cpu().numpy().tobytes()
                assert found == before[kind, cut.name], (kind, cut.name)
