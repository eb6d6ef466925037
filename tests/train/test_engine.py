"""One update by the eager engine: micro-batches, padding, skips, and what an update after them is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows, same_bits

from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, OptimizerCounts, micro_batches, train_update
from nstrain.train.flat import TENSOR_KINDS


def engine_of(seed: int = 1, micro_rows: int = 3) -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=seed), optimizer_settings(), with_ema=True)
    engine.set_length(LengthSettings(micro_rows=micro_rows, recompute="dendritic"))
    return engine


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in engine.flat.kinds for n, a in engine.flat.export(k).items()}


def test_loss_is_the_mean_over_the_updates_real_tokens() -> None:
    engine = engine_of()
    rows = random_rows(8)  # micro-batches of 3, 3 and 2: the last one is padded
    losses, z = TinyModel(seed=1)._losses(torch.from_numpy(rows))
    readings = train_update(engine, rows, 3, 1e-3, 0.1)
    assert readings.terms["ce"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert readings.terms["z"] == pytest.approx(1e-4 * z.mean().item(), rel=1e-6)
    assert readings.loss == pytest.approx(readings.terms["ce"] + readings.terms["z"], rel=1e-6)


def test_gradient_is_that_of_the_mean_loss() -> None:
    engine, plain = engine_of(), TinyModel(seed=1)
    rows = random_rows(8)
    for batch in micro_batches(rows, 3):
        engine.accumulate(batch, 1 / 64)
    losses, z = plain._losses(torch.from_numpy(rows))
    (losses.mean() + 1e-4 * z.mean()).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
    for (name, p), (_, q) in zip(engine.model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, q.grad, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert engine.finish(1e-3, 0.1).grad_norm == pytest.approx(norm, rel=1e-5)


def test_every_micro_batch_has_the_same_shape() -> None:
    engine = engine_of()
    seen = []
    loss = engine.model.loss
    engine.model.loss = lambda tokens, scale: (seen.append(tokens.clone()), loss(tokens, scale))[1]  # type: ignore
    train_update(engine, random_rows(7), 3, 1e-3, 0.1)
    assert [tuple(t.shape) for t in seen] == [(3, 9)] * 3
    assert (seen[2][1:] == -100).all()
    assert (seen[2][0] >= 0).all()


def test_micro_batches_hold_every_row_in_order() -> None:
    rows = random_rows(7)
    assert np.array_equal(np.concatenate(list(micro_batches(rows, 3))), rows)
    assert [len(batch) for batch in micro_batches(rows, 3)] == [3, 3, 1]


def test_readings_cover_groups_and_parts() -> None:
    readings = train_update(engine_of(), random_rows(5), 3, 1e-3, 0.1)
    assert set(readings.group_norms) == {"matrix", "embedding", "memory", "neuron", "norm"}
    assert set(readings.part_norms) == {"embedding", "layer00", "layer01", "norm"}
    for norms in (readings.group_norms, readings.part_norms):
        assert math.sqrt(math.fsum(n * n for n in norms.values())) == pytest.approx(readings.grad_norm, rel=1e-12)


def test_the_gradient_is_cleared_and_readings_start_anew() -> None:
    engine = engine_of()
    first = train_update(engine, random_rows(5), 3, 0.0, 0.0)
    assert all((group.main_grad == 0).all() for group in engine.flat.groups)
    assert train_update(engine, random_rows(5), 3, 0.0, 0.0) == first


def test_two_runs_are_equal_bit_for_bit() -> None:
    a, b = engine_of(), engine_of()
    for seed in range(12):
        rows = random_rows(5 + seed % 4, seed=seed)
        assert train_update(a, rows, 3, 1e-2, 0.1) == train_update(b, rows, 3, 1e-2, 0.1)
    assert state_bytes(a) == state_bytes(b)


def test_readings_of_rows_are_the_models_and_touch_nothing() -> None:
    engine = engine_of()
    train_update(engine, random_rows(8), 3, 1e-2, 0.1)
    engine.accumulate(random_rows(3), 1 / 24)
    before = state_bytes(engine), [group.main_grad.clone() for group in engine.flat.groups]
    rows = random_rows(7, row_tokens=12, seed=5)
    losses = engine.token_losses(rows)
    assert losses.dtype == np.float32
    assert np.array_equal(losses, engine.model.token_losses(torch.from_numpy(rows)).numpy())
    seen = []
    engine.model.probe = lambda tokens, eos_id, train_length, *, attention: (  # type: ignore[method-assign]
        seen.append((tokens.shape, eos_id, train_length, attention)),
        {"layer00": {"gain": torch.ones(len(tokens), 1, dtype=torch.float64)}},
    )[1]
    engine.model.probe_members = lambda: {"layer00": {"gain": 1}}  # type: ignore[method-assign]
    found = engine.probe(rows, 3, 8, attention=False)
    assert seen == [((7, 13), 3, 8, False)]
    assert found["layer00"]["gain"].tolist() == [[1.0]] * 7
    assert state_bytes(engine) == before[0]
    assert all(same_bits(g.main_grad, kept) for g, kept in zip(engine.flat.groups, before[1], strict=True))


def test_derived_weights_are_refreshed_and_recompute_is_passed_on() -> None:
    engine = engine_of()
    assert engine.model.mode == "dendritic"
    before = engine.model.refreshed
    assert before == 1
    train_update(engine, random_rows(3), 3, 1e-2, 0.1)
    assert engine.model.refreshed == before + 1
    engine.restored(OptimizerCounts(step=4))
    assert engine.model.refreshed == before + 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("micro_batch", [0, 1, 2])
@pytest.mark.parametrize("name", ["w1", "embedding", "memory0", "gain0", "norm"])
def test_a_skipped_update_leaves_every_byte_and_the_next_is_normal(bad: float, micro_batch: int, name: str) -> None:
    spoiled, clean = engine_of(), engine_of()
    for engine in (spoiled, clean):
        train_update(engine, random_rows(8, seed=1), 3, 1e-2, 0.1, 0.5)
    before = state_bytes(spoiled)
    first = spoiled.model.losses_taken

    def spoil(number: int) -> None:
        if number == first + micro_batch:
            spoiled.model.get_parameter(name).main_grad.view(-1)[-1] = bad

    spoiled.model.before_loss = spoil
    readings = train_update(spoiled, random_rows(8, seed=2), 3, 1e-2, 0.1, 0.5)
    assert readings.skipped
    assert not math.isfinite(readings.grad_norm)
    assert state_bytes(spoiled) == before
    assert ("ema", name) in before
    assert not any(bool(group.main_grad.any()) for group in spoiled.flat.groups)
    assert spoiled.counts == OptimizerCounts(step=1, consecutive_skips=1, total_skips=1)
    after, expected = (train_update(e, random_rows(8, seed=3), 3, 1e-2, 0.1, 0.5) for e in (spoiled, clean))
    assert after == expected
    assert state_bytes(spoiled) == state_bytes(clean)
    assert spoiled.counts == OptimizerCounts(step=2, consecutive_skips=0, total_skips=1)


def test_a_loss_that_is_nan_is_skipped_and_read_as_nan() -> None:
    engine = engine_of()
    before = state_bytes(engine)
    loss = engine.model.loss
    engine.model.loss = lambda tokens, scale: (loss(tokens, scale)[0] * math.nan, {})  # type: ignore
    readings = train_update(engine, random_rows(3), 3, 1e-2, 0.1)
    assert readings.skipped
    assert math.isnan(readings.loss)
    engine.model.loss = loss  # type: ignore[method-assign]
    assert state_bytes(engine) == before
    assert not train_update(engine, random_rows(3), 3, 1e-2, 0.1).skipped


def test_skips_in_a_row_are_counted() -> None:
    engine = engine_of()
    engine.model.before_loss = lambda n: engine.model.norm.main_grad.fill_(math.nan) if n % 4 != 3 else None
    for seed in range(6):
        train_update(engine, random_rows(2, seed=seed), 3, 1e-2, 0.1)
    assert engine.counts == OptimizerCounts(step=1, consecutive_skips=2, total_skips=5)


def test_an_engine_restored_from_host_copies_goes_on_with_the_same_bits() -> None:
    through, saved, resumed = engine_of(), engine_of(), engine_of(seed=9)
    for seed in range(3):
        train_update(through, random_rows(4, seed=seed), 3, 1e-2, 0.1)
        train_update(saved, random_rows(4, seed=seed), 3, 1e-2, 0.1)
    for kind in TENSOR_KINDS:
        resumed.flat.load(kind, saved.flat.export(kind), "here")
    resumed.restored(saved.counts)
    for seed in range(3, 6):
        rows = random_rows(4, seed=seed)
        assert train_update(through, rows, 3, 1e-2, 0.1) == train_update(resumed, rows, 3, 1e-2, 0.1)
    for a, b in zip(through.flat.groups, resumed.flat.groups, strict=True):
        assert same_bits(a.master, b.master)
