"""A supervised line with the real trainer and preparer: killed, stopped and run again, it comes to the same record."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from small_lines import CYCLE_TOKENS, CYCLES, UPDATE_TOKENS
from supervise_helpers import SupervisorProcess, gone, wait_until

from nstrain.base.errors import ExitCode
from nstrain.base.process import identify
from nstrain.data.consumers import read_consumers
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.line.checkpoint import read_latest
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor, request_stop
from nstrain.ops.check import check_line
from nstrain.ops.status import status
from nstrain.ops.stop import stop_line
from nstrain.record.journal import Journal
from nstrain.settings.run import load_run


def reached(paths: LinePaths, update: int) -> Callable[[], bool]:
    """Whether the trainer has finished an update."""
    return lambda: (beat := read_heartbeat(paths)) is not None and beat.update >= update


@pytest.mark.slow  # tests/lines/test_whole_lines.py kills a line three times in every run
def test_killed_and_run_again(paths: LinePaths, start: Callable[..., SupervisorProcess]) -> None:
    """Supervisor killed at update 3 or later, trainer at 10 or later, then run to the end; in between it stops, as it
    was asked before the kill."""
    first = start("real", "real")
    trainer = first.wait_for_trainer()
    wait_until(reached(paths, 3))
    assert not stop_line(paths.root, 0.0, at_cycle_end=1).ended
    identity = identify(trainer)
    first.process.kill()
    first.process.wait()
    wait_until(lambda: gone(identity))
    look = status(paths.root)
    assert look.state == "failed"
    assert look.checkpoint == f"u{look.update:08d}", "the orphan ended without saving where it stood"
    assert f"goes on from update {look.update}" in (look.reason or "")

    second = start("real", "real")
    code, output = second.wait()
    assert code == ExitCode.STOPPED, output
    assert status(paths.root).update == CYCLE_TOKENS // UPDATE_TOKENS
    assert not paths.stop.exists()

    request_stop(paths, at_cycle_end=1)  # as if its supervisor had died just there, and `latest` with it
    paths.latest.unlink()
    code, output = start("real", "real").wait()
    assert code == ExitCode.STOPPED, output
    assert (state := read_supervisor(paths)) is not None
    assert state.launches == 1
    assert not paths.stop.exists()
    assert read_latest(paths) == CYCLE_TOKENS // UPDATE_TOKENS, "named again, though nothing was saved"

    third = start("real", "real")
    trainer = third.wait_for_trainer()
    wait_until(reached(paths, 10))
    os.kill(trainer, signal.SIGKILL)
    code, output = third.wait()
    assert code == ExitCode.DONE, output
    assert "killed by SIGKILL" in output, "it was started again"
    look = status(paths.root)
    updates = CYCLES * CYCLE_TOKENS // UPDATE_TOKENS
    assert (look.state, look.update, look.tokens) == ("done", updates, CYCLES * CYCLE_TOKENS)
    assert (look.differences, look.checkpoint) == (0, f"u{updates:08d}")
    assert look.cycles_ready == ()
    with Journal.open_for_reading(paths.journal) as journal:
        assert [row["update"] for row in journal.rows()] == list(range(updates + 1))
    line = DataLine.open(Path(load_run(paths.run_json).data.work))
    assert cycles_on_disk(line) == []
    assert [(entry.cycle, entry.row) for entry in read_consumers(line.work)] == [(CYCLES + 1, 0)]
    assert all(found.ok for found in check_line(paths.root))

    code, output = start("real", "real").wait()
    assert code == ExitCode.DONE, "a line that is done is done again"
    assert status(paths.root).update == updates
