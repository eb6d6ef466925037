"""Troubles of saving, on a supervised line with the real trainer: what log, exit code and `status` make of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_lines import plan
from small_disk import fill, small_disk
from small_lines import make_small_line
from supervise_helpers import SupervisorProcess, wait_until

from nstrain.base.errors import ExitCode
from nstrain.line.checkpoint import newest_good
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor
from nstrain.ops.status import status
from nstrain.settings.run import CheckpointSettings, load_run, save_run


def reached(paths: LinePaths, update: int) -> Callable[[], bool]:
    """Whether the trainer has finished an update."""
    return lambda: (beat := read_heartbeat(paths)) is not None and beat.stage == "training" and beat.update >= update


@pytest.fixture
def supervise() -> Iterator[Callable[..., SupervisorProcess]]:
    """Run a line with the real preparer and trainer (or "faulty"); what still runs at the end is killed."""
    started: list[SupervisorProcess] = []

    def begin(paths: LinePaths, trainer: str = "real") -> SupervisorProcess:
        started.append(SupervisorProcess(paths, trainer, "real", "works"))
        return started[-1]

    yield begin
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.process.kill()  # its children save and end by themselves
            supervisor.process.wait()


def test_an_error_of_the_background_writer(tmp_path: Path, supervise: Callable[..., SupervisorProcess]) -> None:
    """At the checkpoint of the only cycle's end; the next trainer clears away what lies there half-written."""
    paths = make_small_line(tmp_path, cycles=1)
    plan(paths, {"after": 1, "do": "failing writer"})
    supervisor = supervise(paths, "faulty")
    wait_until(reached(paths, 1))
    (paths.checkpoints / "u00000008.partial").write_text("half-written")
    code, output = supervisor.wait()
    assert code == ExitCode.DONE, output
    log = paths.run_log.read_text()
    assert "NotADirectoryError" in log
    assert "u00000008.partial: removed, left by an interrupted write" in log
    state = read_supervisor(paths)
    assert state is not None
    assert (state.launches, state.failures_total, state.failures) == (2, 1, 0)
    assert "NotADirectoryError" in (state.last_failure or "")
    assert (status(paths.root).state, status(paths.root).differences) == ("done", 0)


@pytest.mark.slow  # test_fault_table.py fills it too
def test_a_disk_that_fills_up(tmp_path: Path, supervise: Callable[..., SupervisorProcess]) -> None:
    """Saved while there is room, not started again, and the same command goes on once there is room."""
    with small_disk(tmp_path / "disk", 512) as disk:
        paths = make_small_line(disk, cycles=1)
        settings = load_run(paths.run_json)
        # Nothing is to be written while the room is taken: the next checkpoint by itself is that of update 8.
        seldom = CheckpointSettings(every_updates=None, every_minutes=30.0)
        save_run(paths.run_json, settings.model_copy(update={"checkpoints": seldom}))
        supervisor = supervise(paths)
        wait_until(reached(paths, 1))
        state = read_supervisor(paths)
        assert state is not None
        assert state.trainer_pid is not None
        os.kill(state.trainer_pid, signal.SIGSTOP)  # it must not be done before the disk is full
        size_bytes = sum(file.stat().st_size for file in paths.checkpoint(0).iterdir())
        filler = fill(disk, leave_bytes=size_bytes + (8 << 20))
        os.kill(state.trainer_pid, signal.SIGCONT)
        code, output = supervisor.wait()
        assert code == ExitCode.NEEDS_OPERATOR, output
        look = status(paths.root)
        assert look.state == "failed"
        assert "the next checkpoint needs" in (look.reason or "")
        assert str(paths.root) in (look.reason or "")
        found = newest_good(paths)
        assert found is not None
        assert found.name == look.checkpoint == f"u{look.update:08d}"
        state = read_supervisor(paths)
        assert state is not None
        assert state.launches == 1
        filler.unlink()
        assert supervise(paths).wait()[0] == ExitCode.DONE
        assert (status(paths.root).state, status(paths.root).differences) == ("done", 0)
