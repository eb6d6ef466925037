"""A line trained across the point from which its data line leaves a file out: to the bit, however it is disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

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
    wait_until,
)

from nstrain.base.errors import ExitCode
from nstrain.data.exclude import exclude_file
from nstrain.data.line import DataLine
from nstrain.data.manifest import states_before
from nstrain.line.state_files import read_heartbeat
from nstrain.ops.check import check_line

CYCLES = 3
LAST_UPDATE = 39
"""Each cycle has 12 updates and a smaller one."""


def leave_out_the_next_file(work: Path) -> None:
    """The one that the second cycle would open first."""
    line = DataLine.open(work)
    books = states_before(line, 2)["books"]
    exclude_file(line, "books", line.listing("books").file(0, books.strata[0].next_file).path)


def test_a_line_goes_on_across_it_to_the_bit(tmp_path: Path) -> None:
    original = make_data_line(tmp_path / "whole", CYCLES)
    prepare(original.work, 1)
    for name in ("undisturbed", "disturbed"):
        shutil.copytree(original.work, tmp_path / name / "data")
    quiet = make_run(tmp_path / "undisturbed" / "run", DataLine.open(tmp_path / "undisturbed" / "data"))
    leave_out_the_next_file(tmp_path / "undisturbed" / "data")
    prepare(tmp_path / "undisturbed" / "data", CYCLES)
    assert run_here(quiet) == ExitCode.DONE

    work = tmp_path / "disturbed" / "data"
    paths = make_run(tmp_path / "disturbed" / "run", DataLine.open(work))
    trainer = launch(paths)
    try:
        wait_until(lambda: (beat := read_heartbeat(paths)) is not None and beat.stage == "waiting_data")
        leave_out_the_next_file(work)
        prepare(work, 2)
        wait_until(lambda: (last_update(paths) or 0) >= 15, what="an update of a cycle that leaves the file out")
    finally:
        trainer.kill()
        trainer.wait()
    assert run_here(paths, stop_after=20) == ExitCode.STOPPED
    prepare(work, CYCLES)
    assert run_here(paths, stop_after=31) == ExitCode.STOPPED
    assert [finding for finding in check_line(paths.root, quick=True) if not finding.ok] == []
    assert run_here(paths) == ExitCode.DONE

    assert len(rows_of(paths)) == LAST_UPDATE + 1
    assert journal_summary(paths) == journal_summary(quiet)
    assert tensors_of(paths, LAST_UPDATE) == tensors_of(quiet, LAST_UPDATE)
    assert state_of(paths, LAST_UPDATE)["held_out"] == state_of(quiet, 0)["held_out"]

    prepare(original.work, 2)
    with_it = original.manifest_path(2).read_bytes()
    assert with_it != DataLine.open(work).manifest_path(2).read_bytes(), "the file makes a difference"
