"""Edges of a line - where a batch, a length, a rate, an average or a cycle begins or ends.

Crossed in one go, stopped at every update, and killed around each: the same bits. And a stop that is asked for exactly
at a cycle's end.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from real_line import (
    journal_summary,
    last_update,
    launch,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run_here,
    state_of,
    tensors_of,
)

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import clear_stop, request_stop

CYCLES = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), CYCLES)
    prepare(line.work, CYCLES)
    return line


def make_edged(root: Path, data: DataLine) -> LinePaths:
    """Two cycles of 2016 tokens with an edge of every kind; no rolling checkpoint beside those of the edges."""
    return make_run(
        root,
        data,
        rows=[{"from_cycle": 1, "row_tokens": 16}, {"from_cycle": 2, "row_tokens": 32}],
        tokens_per_update=[{"from": 0, "to": 1000, "tokens": 160}, {"from": 1000, "to": None, "tokens": 256}],
        ema={"horizon_tokens": 1000, "from_tokens": 1300},
        learning_rate=[
            {"from": 0, "to": 320, "shape": "linear", "start": 0.0, "end": 0.01},
            {"from": 320, "shape": "constant", "start": 0.01},
            {"from": 1500, "to": 3000, "shape": "sqrt", "start": 0.01, "end": 0.002},
            {"from": 3500, "shape": "constant", "start": 0.004},
        ],
        checkpoints={"every_updates": 1000, "every_minutes": None, "keep_last": 1},
    )


@pytest.fixture(scope="module")
def through(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    paths = make_edged(tmp_path_factory.mktemp("through") / "run", data)
    assert run_here(paths) == ExitCode.DONE
    return paths


def assert_equal(a: LinePaths, b: LinePaths) -> None:
    end = last_update(b)
    assert end is not None
    assert journal_summary(a) == journal_summary(b)
    assert journal_summary(a)[1] == 0
    assert tensors_of(a, end) == tensors_of(b, end)
    assert {kind for kind, _ in tensors_of(a, end)} == {"weights", "exp_avg", "exp_avg_sq", "ema"}


def test_the_edges_lie_where_run_json_says(through: LinePaths) -> None:
    rows = rows_of(through)[1:]
    for before, row in zip([{"tokens": 0.0}, *rows[:-1]], rows, strict=True):
        batch = 160 if before["tokens"] < 1000 else 256
        assert row["row_tokens"] == (16 if row["tokens"] <= 2016 else 32)
        assert row["tokens"] - before["tokens"] == (row["rows"] * row["row_tokens"] if row["smaller"] else batch)
        assert row["train/weight_decay"] == pytest.approx(0.1 * (row["tokens"] - before["tokens"]) / 160)
    assert [int(row["tokens"]) for row in rows if row["smaller"]] == [2016, 4032]
    assert rows[-1]["tokens"] == 4032
    rates = {int(row["tokens"]): row["train/learning_rate"] for row in rows}
    assert (rates[160], rates[320], rates[480]) == (0.005, 0.01, 0.01)
    assert rates[4032] == 0.004
    averaged = [int(row["tokens"]) for row in rows if any(name.startswith("ema/") for name in row)]
    assert averaged
    assert min(averaged) >= 1300


def test_stopped_at_every_update(through: LinePaths, data: DataLine, tmp_path: Path) -> None:
    paths = make_edged(tmp_path / "run", data)
    end = last_update(through)
    assert end is not None
    for update in range(1, end):
        assert run_here(paths, stop_after=update) == ExitCode.STOPPED
        assert last_update(paths) == update
    assert run_here(paths) == ExitCode.DONE
    assert_equal(paths, through)


@pytest.mark.slow  # stopped at every edge above, killed at any step in test_trainer_process.py
def test_killed_around_the_edges(through: LinePaths, data: DataLine, tmp_path: Path) -> None:
    """kill -9 before or after an update's row was recorded; each time the line is back at the edge before."""
    paths = make_edged(tmp_path / "run", data)
    draw = random.Random(random.SystemRandom().random())
    points = [draw.randint(8, 16), draw.randint(17, 24), draw.randint(4, 12)]
    for point in points:
        assert launch(paths, NSTRAIN_KILL_POINT=f"train:{point}").wait(timeout=60) == -signal.SIGKILL, points
    assert run_here(paths) == ExitCode.DONE, points
    assert_equal(paths, through)


def test_it_stops_exactly_at_a_cycles_end(through: LinePaths, data: DataLine, tmp_path: Path) -> None:
    paths = make_edged(tmp_path / "run", data)
    assert run_here(paths, stop_after=3) == ExitCode.STOPPED
    request_stop(paths, at_cycle_end=1)
    assert run_here(paths) == ExitCode.STOPPED
    rows = rows_of(paths)
    assert rows[-1]["tokens"] == 2016
    newest = paths.checkpoint_updates()[-1]
    assert state_of(paths, newest)["update"] == rows[-1]["update"]
    assert state_of(paths, newest)["reason"] == "length_change", "the cycle's own checkpoint, which is kept"
    assert run_here(paths) == ExitCode.STOPPED, "as long as the request stands"
    assert len(rows_of(paths)) == len(rows)
    clear_stop(paths)
    request_stop(paths, at_cycle_end=2)
    assert run_here(paths) == ExitCode.DONE
    clear_stop(paths)
    assert_equal(paths, through)
