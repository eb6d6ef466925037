"""The trainer with the model it is for: contract, bits, and a line killed at random moments on two threads."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_line import (
    journal_summary,
    last_update,
    launch,
    log_of,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run,
    tensors_of,
    wait_until,
)
from train_helpers import optimizer_settings, random_rows

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.settings.run import LengthSettings, ModelSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import TENSOR_KINDS
from nstrain.train.model import build, parameter_places, preset_config

CONFIG: dict[str, Any] = {
    "vocab_size": 384,
    "width": 64,
    "layers": "DH",
    "rope_max_seq_len": 64,
    "ffn_width": 96,
    "dendritic_head_width": 32,
    "state_width": 16,
    "pool_head_width": 32,
    "trace_width": 16,
    "match_width": 8,
}
SETTINGS = ModelSettings(preset="tiny-32k", config=CONFIG)


def engine_of(recompute: Any = "none") -> EagerEngine:
    engine = EagerEngine(build(SETTINGS, 384, "cpu", 3), optimizer_settings())
    engine.set_length(LengthSettings(micro_rows=2, recompute=recompute))
    return engine


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in TENSOR_KINDS for n, a in engine.flat.export(k).items()}


def test_the_model_satisfies_the_contract() -> None:
    places = parameter_places(build(SETTINGS, 384, "cpu", 3))
    assert {p.part for p in places} == {"layer00", "layer01", "embedding", "norm"}
    assert {"matrix", "embedding", "neuron", "norm"} <= {p.group for p in places}


def test_gradients_are_those_of_autograd_and_leave_no_grad() -> None:
    engine, plain = engine_of(), build(SETTINGS, 384, "cpu", 3)
    rows = random_rows(2, 32, 384)
    engine.accumulate(rows, 1 / 64)
    plain.loss(torch.from_numpy(rows), torch.tensor(1 / 64))[0].backward()
    for (name, p), (_, q) in zip(engine.model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is None, name
        torch.testing.assert_close(p.main_grad, q.grad, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_updates_are_equal_bit_for_bit_whatever_is_recomputed() -> None:
    engines = [engine_of(), engine_of(), engine_of("dendritic"), engine_of("all")]
    for seed in range(3):
        rows = random_rows(5, 32, 384, seed)
        readings = [train_update(engine, rows, 2, 1e-2, 0.1) for engine in engines]
        assert all(r == readings[0] for r in readings)
    assert all(state_bytes(engine) == state_bytes(engines[0]) for engine in engines)


def test_a_padding_row_changes_nothing() -> None:
    """Three rows in micro-batches of 2: the same rows with one more of padding alone."""
    a, b = engine_of(), engine_of()
    rows = random_rows(3, 32, 384)
    padding = np.full((1, 33), -100, dtype=np.int64)
    for batch in (rows[:2], rows[2:]):
        a.accumulate(batch, 1 / 96)
    for batch in (rows[:2], np.concatenate([rows[2:], padding])):
        b.accumulate(batch, 1 / 96)
    assert a.finish(1e-2, 0.1) == b.finish(1e-2, 0.1)
    assert state_bytes(a) == state_bytes(b)


def test_presets_have_room_for_the_vocabulary() -> None:
    config = preset_config("tiny-32k", 8032)
    assert config["vocab_size"] == 8064
    with pytest.raises(Refusal, match=r"no preset is called 'tiny'; there are: .*tiny-32k"):
        preset_config("tiny", 8032)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 2)
    prepare(line.work, 2)
    return line


def make_line(root: Path, data: DataLine, device: str) -> LinePaths:
    return make_run(
        root,
        data,
        device=device,
        model={"preset": "tiny-32k", "config": CONFIG},
        threads=2,
        tokens_per_update=4 * 32,
        checkpoints={"every_updates": 6, "every_minutes": None},
        ema={"horizon_tokens": 2000, "from_tokens": 1500},
    )


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.card_alone]),
    ],
)
def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(device: str, data: DataLine, tmp_path: Path) -> None:
    through, line = (make_line(tmp_path / name, data, device) for name in ("through", "run"))
    assert run(through) == ExitCode.DONE
    last = last_update(through)
    assert last == 32
    rows = rows_of(through)
    assert rows[-1]["val_32/mix"] < rows[0]["val_32/mix"] - 0.5, "it learns"
    draw, replays = random.Random(17), 0
    for updates in (8, 10):
        began, log_so_far = last_update(line) or 0, len(log_of(line))
        trainer = launch(line)
        wait_until(lambda goal=began + updates: (last_update(line) or 0) >= goal, what="updates")  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.1))
        trainer.send_signal(signal.SIGKILL)
        assert trainer.wait() == -signal.SIGKILL
        replays += _went_back(line, log_so_far, began)
    began, log_so_far = last_update(line) or 0, len(log_of(line))
    assert run(line) == ExitCode.DONE
    replays += _went_back(line, log_so_far, began)
    assert replays >= 1
    assert journal_summary(line) == journal_summary(through)
    assert journal_summary(line)[1] == 0
    assert tensors_of(line, last) == tensors_of(through, last)


def _went_back(line: LinePaths, log_so_far: int, reached: int) -> bool:
    """Whether the last launch trained updates again that the journal held."""
    resumed = re.search(r"going on from u(\d+)", log_of(line)[log_so_far:])
    return resumed is not None and int(resumed[1]) < reached
