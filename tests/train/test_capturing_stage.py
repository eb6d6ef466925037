"""What the heartbeat says while an update is done: the first one of a row length may take as long as a start.

It goes through the probes, compiles kernels and captures graphs; the others only have to be as quick as an update.
"""

from __future__ import annotations

import itertools
import time
import types
from pathlib import Path
from typing import Any

import pytest
from real_line import make_data_line, make_run, prepare, run_here

from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Heartbeat
from nstrain.settings.run import GuardSettings
from nstrain.train import loop
from nstrain.train.engine import EagerEngine
from nstrain.train.loop import Trainer

GUARDS = {"watchdog_s": 11.0, "start_s": 222.0, "validation_s": 3333.0, "save_s": 44.0}
UPDATES = 13
"""Of a cycle of 64 rows of 32 tokens, five an update; of 16 tokens as well."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 3)
    prepare(line.work, 3)
    return line


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """The heartbeat that stands as each update has gone through its micro-batches."""
    found: list[Heartbeat] = []
    written: list[Heartbeat] = []
    write: Any = loop.write_heartbeat
    finish: Any = EagerEngine.finish

    def note(paths: LinePaths, beat: Heartbeat) -> None:
        written.append(beat)
        write(paths, beat)

    def watched(self: EagerEngine, *arguments: Any) -> Any:
        found.append(written[-1])
        return finish(self, *arguments)

    monkeypatch.setattr(loop, "write_heartbeat", note)
    monkeypatch.setattr(EagerEngine, "finish", watched)
    return found


def test_the_first_update_of_a_launch_and_of_a_length(data: DataLine, tmp_path: Path, seen: list[Heartbeat]) -> None:
    rows = [
        {"from_cycle": 1, "row_tokens": 32},
        {"from_cycle": 2, "row_tokens": 16},
        {"from_cycle": 3, "row_tokens": 32},
    ]
    paths = make_run(tmp_path / "run", data, rows=rows, guards=GUARDS)
    run_here(paths, stop_after=5)
    run_here(paths)
    first = {1, 6, UPDATES + 1}  # the launch, the next one, another length; the first length again is ready
    assert [(beat.update + 1, beat.stage) for beat in seen] == [
        (update, "capturing" if update in first else "training") for update in range(1, 3 * UPDATES + 1)
    ]
    assert {(beat.stage, beat.budget_s) for beat in seen} == {("capturing", 222.0), ("training", 11.0)}


def test_probes_before_a_capture_are_a_part_of_it(
    data: DataLine, tmp_path: Path, seen: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row through each probe is a sign of life of a validation, and of nothing else."""
    monkeypatch.setattr(loop, "VALIDATING_BEAT_S", 0.0)
    warmed: list[bool] = []
    warm: Any = Trainer._warm_probes

    def on_a_gpu(self: Trainer, *arguments: Any) -> None:
        settings = self.settings
        self.settings = settings.model_copy(update={"device": "cuda"})
        warm(self, *arguments)
        self.settings = settings
        warmed.append(True)

    monkeypatch.setattr(Trainer, "_warm_probes", on_a_gpu)
    paths = make_run(tmp_path / "run", data, guards=GUARDS)
    run_here(paths, stop_after=2)
    run_here(paths, stop_after=4)
    assert len(warmed) == 4
    assert [beat.stage for beat in seen] == ["capturing", "training", "capturing", "training"]


def test_the_budgets() -> None:
    guards = GuardSettings(**GUARDS)
    budgets = {"starting": 222.0, "capturing": 222.0, "validating": 3333.0, "stopping": 44.0}
    for stage in ("training", "saving", "waiting_data", "done"):
        budgets[stage] = 11.0
    assert {stage: guards.budget_s(stage) for stage in budgets} == budgets


def test_a_long_validation_is_seen_to_go_on_while_the_clock_is_set_back(
    data: DataLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the watchdog would end it."""
    stages: list[str] = []
    clock = itertools.count(2e9, -60.0)
    monkeypatch.setattr(loop, "VALIDATING_BEAT_S", 0.0)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    monkeypatch.setattr(loop, "write_heartbeat", lambda paths, beat: stages.append(beat.stage))
    run_here(make_run(tmp_path / "run", data, rows=[{"from_cycle": 1, "row_tokens": 32}]), stop_after=0)
    assert stages.count("validating") > 1
