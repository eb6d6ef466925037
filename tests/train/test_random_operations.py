"""Random sequences of what an operator does and what befalls a line: it ends as one that was only told the same.

The line that it is compared with is never killed, never goes back and loses nothing. It is given each run.json that had
a part in the other's updates, at the update from which on it had.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from killed_process import killed_at
from real_line import change_run, journal_summary, make_data_line, make_run, prepare, rows_of, run_here, tensors_of

from nstrain.base.errors import ExitCode
from nstrain.data.consumers import read_consumers, write_consumer
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import Preparer, PreparerStatus, preparer_lock
from nstrain.line.checkpoint import discard_partial_writes, newest_good, read_latest, read_state
from nstrain.line.listing import list_checkpoints
from nstrain.line.paths import LinePaths
from nstrain.ops.checkpoints import thin
from nstrain.ops.rollback import roll_back
from nstrain.ops.verify import verify_line
from nstrain.settings.run import RunSettings, save_run

CYCLES = 3
LAST_UPDATE = 39
"""Each cycle has 12 updates and a smaller one."""
OPERATIONS = 12
KILL_POINTS = {"checkpoint": 60, "journal": 25, "train": 20}
"""Kill points that are tried in an area."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A data line of which nothing is prepared."""
    return make_data_line(tmp_path_factory.mktemp("fresh"), CYCLES)


@pytest.fixture(scope="module")
def whole(fresh: DataLine, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """The same with all its cycles, which stay."""
    work = tmp_path_factory.mktemp("whole") / "data"
    shutil.copytree(fresh.work, work)
    prepare(work, CYCLES)
    write_consumer(work, "keeper", 1, 0, 0, work)
    return DataLine.open(work)


class Disturbed:
    """A line, what is done to it, and which run.json its updates were trained with."""

    def __init__(self, draw: random.Random, paths: LinePaths, data: DataLine) -> None:
        self.draw, self.paths, self.data = draw, paths, data
        self.history: list[tuple[int, dict[str, Any]]] = []
        """(update, run.json): from after that update on it was trained with that."""

    @property
    def run_json(self) -> dict[str, Any]:
        return dict(json.loads(self.paths.run_json.read_text()))

    def stands_at(self) -> int | None:
        """The update that it would go on from."""
        discard_partial_writes(self.paths)
        newest = newest_good(self.paths, warn=lambda message: None)
        return None if newest is None else int(read_state(newest)["update"])

    def kill_point(self) -> str:
        """One that a process is to be killed at, or none."""
        area = self.draw.choice(sorted(KILL_POINTS))
        return f"{area}:{self.draw.randint(1, KILL_POINTS[area])}" if self.draw.random() < 0.4 else ""

    def prepare(self) -> None:
        """What the next updates need; cycles that were consumed go."""
        waits: list[bool] = []

        def seen(status: PreparerStatus) -> None:
            waits.extend([True] if status.stage == "waiting_consumer" else [])

        with preparer_lock(self.data.work).acquire("the preparer"):
            Preparer(self.data.work, 1, None, lambda: bool(waits), seen, workers=0).run()
        needed_from = min(consumer.cycle for consumer in read_consumers(self.data.work))
        on_disk = set(cycles_on_disk(self.data))
        assert (
            set(range(needed_from, min(needed_from + 1, CYCLES) + 1)) <= on_disk <= set(range(needed_from, CYCLES + 1))
        )

    def train(self, updates: int, kill: str) -> None:
        at = self.stands_at()
        if at != read_latest(self.paths):  # the consumer's entry goes back, and cycles that were deleted are made again
            assert not killed_at("", lambda: run_here(self.paths, stop_after=at or 0))
        self.prepare()
        self.history = [piece for piece in self.history if at is not None and piece[0] < at] or self.history[:1]
        if at is None:
            self.history.clear()
        if not self.history or self.history[-1][1] != self.run_json:
            self.history.append((at or 0, self.run_json))
        until = (at or 0) + updates
        if not killed_at(kill, lambda: run_here(self.paths, stop_after=until)):
            assert verify_line(self.paths.root).ok
            assert self.stands_at() == read_latest(self.paths) == min(until, LAST_UPDATE)
            rolling = [item for item in list_checkpoints(self.paths) if item.kept is False and not item.set_aside]
            assert len(rolling) <= self.run_json["checkpoints"]["keep_last"] or until == at

    def go_back(self) -> None:
        at = self.stands_at()
        if at is not None and self.paths.latest.exists() and read_latest(self.paths) == at:
            to = self.draw.choice(self.paths.checkpoint_updates()[:3])
            where = f"{self.draw.choice(['checkpoint', 'journal'])}:{self.draw.randint(1, 5)}"
            if to <= at and not killed_at(where, lambda: roll_back(self.paths.root, to)):
                assert rows_of(self.paths)[-1]["update"] == to

    def edit(self) -> None:
        """Also after a kill: what was recorded beyond the checkpoint is then of other settings."""
        run = self.run_json
        change = self.draw.choice(
            [
                {"optimizer": run["optimizer"] | {"clip_norm": self.draw.choice([0.3, 1.0, 3.0])}},
                {"lengths": run["lengths"] | {"32": {"micro_rows": self.draw.choice([1, 2, 5])}}},
                {"validation": run["validation"] | {"every_updates": self.draw.choice([3, 5, 8])}},
                {"checkpoints": run["checkpoints"] | {"every_updates": self.draw.choice([2, 4, 7])}},
            ]
        )
        change_run(self.paths, allow_changes=[*run["allow_changes"], *(set(change) & {"optimizer"})], **change)

    def thin(self) -> None:
        if self.paths.checkpoints.exists():
            thin(self.paths.root, 2)

    def lose(self) -> None:
        """A checkpoint, `latest`, a cycle's token files or what was opened for the next one."""
        at, what = self.stands_at(), self.draw.choice(["newest", "byte", "latest", "cycles", "open"])
        if what in ("cycles", "open"):
            shutil.rmtree(self.data.work / what)
            (self.data.work / what).mkdir()
        elif what == "latest":
            self.paths.latest.unlink(missing_ok=True)
        elif at is not None and min(self.paths.checkpoint_updates()) < at:
            if what == "newest":
                shutil.rmtree(self.paths.checkpoint(at))
            else:
                file = self.paths.checkpoint(at) / "weights.safetensors"
                file.write_bytes(file.read_bytes()[:-1] + b"!")


def undisturbed(history: list[tuple[int, dict[str, Any]]], root: Path, data: DataLine) -> LinePaths:
    """A line that is told the same and to which nothing happens."""
    paths = make_run(root, data)
    own = {"id": root.name, "data": {"work": str(data.work)}}
    for number, (_, run_json) in enumerate(history):
        save_run(paths.run_json, RunSettings.model_validate_json(json.dumps(run_json | own)))
        until = history[number + 1][0] if number + 1 < len(history) else LAST_UPDATE
        assert run_here(paths, stop_after=until) in (ExitCode.STOPPED, ExitCode.DONE)
    return paths


def without_generation(paths: LinePaths) -> list[dict[str, float]]:
    return [row | {"generation": 1} for row in rows_of(paths)]


def changes_of(paths: LinePaths) -> list[tuple[str, int]]:
    applied = read_state(paths.checkpoint(LAST_UPDATE))["changes"]["applied"]
    return [(change["field"], change["update"]) for change in applied]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_as_an_undisturbed_line(fresh: DataLine, whole: DataLine, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shutil.copytree(fresh.work, tmp_path / "data")
    data = DataLine.open(tmp_path / "data")
    line = Disturbed(draw, make_run(tmp_path / "run", data), data)
    for _ in range(OPERATIONS):
        line.train(draw.choice([0, 1, 3, 8, 12]), line.kill_point())
        draw.choice([line.go_back, line.edit, line.edit, line.thin, line.lose])()
    while line.stands_at() != LAST_UPDATE or read_latest(line.paths) is None:
        line.train(12, "")
    line.prepare()
    assert not line.paths.set_aside.exists()

    quiet = undisturbed(line.history, tmp_path / "quiet", whole)
    assert without_generation(line.paths) == without_generation(quiet)
    assert journal_summary(line.paths)[1] == 0, "no replay differed but where run.json was edited"
    assert tensors_of(line.paths, LAST_UPDATE) == tensors_of(quiet, LAST_UPDATE)
    assert changes_of(line.paths) == changes_of(quiet)
