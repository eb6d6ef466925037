"""The weights' moving average: its formula, its beginning, skips, and validating with it without a trace."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows, same_bits

from nstrain.settings.run import EmaSettings, LengthSettings
from nstrain.train import ema as ema_module
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.plan import Update
from nstrain.train.schedule import ema_step

ROWS = random_rows(8, seed=99)


def engine_of(with_ema: bool = True, seed: int = 1, dtype: torch.dtype = torch.float32) -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=seed, dtype=dtype), optimizer_settings(), with_ema=with_ema)
    engine.set_length(LengthSettings(micro_rows=3))
    return engine


def train(engine: EagerEngine, seed: int, ema: float | None, spoilt: bool = False) -> None:
    rows = random_rows(6, seed=seed)
    for first in (0, 3):
        engine.accumulate(rows[first : first + 3], 1 / 48)
    if spoilt:
        engine.flat.groups[2].main_grad[5] = math.nan
    assert engine.finish(1e-2, 0.1, ema).skipped == spoilt


def state(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in engine.flat.kinds for n, a in engine.flat.export(k).items()}


def update_at(tokens_before: int, rows: int = 4) -> Update:
    return Update(1, 1, 0, rows, 8, 32, tokens_before, False)


def test_the_move_is_a_function_of_the_position() -> None:
    settings = EmaSettings(horizon_tokens=128, from_tokens=64)
    assert ema_step(None, update_at(64)) is None
    assert [ema_step(settings, update_at(at)) for at in (0, 31, 32, 64)] == [None, None, 0.25, 0.25]
    assert ema_step(settings, update_at(64, rows=1)) == 8 / 128, "a cycle's smaller update moves it less"
    assert ema_step(EmaSettings(horizon_tokens=20, from_tokens=0), update_at(0)) == 1.0


def test_equals_the_formula_in_fp64_over_updates_with_skips() -> None:
    engine = engine_of()
    expected: dict[str, torch.Tensor] = {}
    for update in range(1, 41):
        move = None if update < 8 else 0.02 + 0.01 * (update % 3)
        skipped = update in (8, 9, 20)
        train(engine, update, move, skipped)
        assert engine.flat.ema_begun == (update >= 10), "skips where it should begin put it off"
        if move is None or skipped:
            continue
        for group in engine.flat.groups:
            w = group.master.double()
            e = expected.get(group.name, w)
            expected[group.name] = e + move * (w - e)
    for group in engine.flat.groups:
        assert group.ema is not None
        torch.testing.assert_close(group.ema.double(), expected[group.name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(group.ema, group.master)


def test_its_first_move_is_a_copy_and_before_it_no_checkpoint_holds_it() -> None:
    engine = engine_of()
    train(engine, 1, None)
    assert engine.flat.kinds == ("weights", "exp_avg", "exp_avg_sq")
    train(engine, 2, 0.1)
    assert engine.flat.kinds == ("weights", "exp_avg", "exp_avg_sq", "ema")
    assert all(same_bits(g.buffer("ema"), g.master) for g in engine.flat.groups)
    train(engine, 3, 0.3)
    assert not any(same_bits(g.buffer("ema"), g.master) for g in engine.flat.groups)
    train(engine, 4, 1.0)  # of an update as long as the horizon
    assert all(same_bits(g.buffer("ema"), g.master) for g in engine.flat.groups), "to the bit: a copy, as on a GPU"


def test_training_has_the_same_bits_with_and_without_it() -> None:
    with_ema, without = engine_of(), engine_of(with_ema=False)
    for update in range(1, 6):
        train(with_ema, update, 0.1)
        train(without, update, None)
    ours, theirs = state(with_ema), state(without)
    assert all(ours[key] == theirs[key] for key in theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skip_leaves_every_byte_of_it(bad: float) -> None:
    engine = engine_of()
    for update in (1, 2):
        train(engine, update, 0.3)
    before = state(engine)
    engine.accumulate(random_rows(3, seed=5), 1 / 24)
    engine.flat.groups[0].main_grad[-1] = bad
    assert engine.finish(1e-2, 0.1, 0.3).skipped
    assert state(engine) == before


def test_does_not_depend_on_how_much_is_moved_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for chunk in (1024, 3072, ema_module.CHUNK):
        monkeypatch.setattr(ema_module, "CHUNK", chunk)
        engine = engine_of()
        for update in range(1, 5):
            train(engine, update, 0.1)
        seen.add(tuple(sorted(state(engine).items())))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1024, ema_module.CHUNK])
def test_inside_readings_are_of_the_average_and_afterwards_every_bit_is_as_before(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ema_module, "CHUNK", chunk)
    engine, plain = engine_of(dtype=dtype), engine_of(dtype=dtype)
    for update in range(1, 4):
        for e in (engine, plain):
            train(e, update, 0.2)
    before, losses = state(engine), engine.token_losses(ROWS)
    copies = [group.compute.clone() for group in engine.flat.groups]
    other = TinyModel(seed=4, dtype=dtype)
    with torch.no_grad():
        for name, array in engine.flat.export("ema").items():
            other.get_parameter(name).copy_(torch.from_numpy(array))
    refreshed = engine.model.refreshed
    with engine.ema_weights():
        assert np.array_equal(engine.token_losses(ROWS), other.token_losses(torch.from_numpy(ROWS)).numpy())
        assert engine.model.refreshed == refreshed + 1
    assert engine.model.refreshed == refreshed + 2
    assert not np.array_equal(losses, other.token_losses(torch.from_numpy(ROWS)).numpy())
    assert state(engine) == before
    assert np.array_equal(engine.token_losses(ROWS), losses)
    for group, copy in zip(engine.flat.groups, copies, strict=True):
        assert torch.equal(group.compute, copy)
    for e in (engine, plain):
        train(e, 9, 0.2)
    assert state(engine) == state(plain)


def test_weights_come_back_when_a_reading_fails() -> None:
    engine = engine_of()
    train(engine, 1, 0.2)
    train(engine, 2, 0.2)
    before = state(engine)
    with pytest.raises(ZeroDivisionError), engine.ema_weights():
        raise ZeroDivisionError
    assert state(engine) == before


def test_an_average_restored_from_host_copies_goes_on_with_the_same_bits() -> None:
    through, resumed = engine_of(), engine_of(seed=9)
    for update in range(1, 4):
        train(through, update, 0.2)
    for kind in through.flat.kinds:
        resumed.flat.load(kind, through.flat.export(kind), "here")
    resumed.restored(through.counts)
    for engine, update in itertools.product((through, resumed), (4, 5)):
        train(engine, update, 0.2)
    assert state(resumed) == state(through)


def test_readings_wait_for_nobody_but_whoever_still_copies_the_buffers() -> None:
    engine = engine_of()
    calls = []
    engine.before_apply = lambda: calls.append(state(engine))
    before = state(engine)
    train_update(engine, random_rows(3), 3, 1e-2, 0.1, 0.5)
    assert calls == [before], "before the first byte is written"
    after = state(engine)
    with engine.ema_weights():
        assert calls == [before, after]
