"""A damaged token file under the real supervisor: the line ends for its operator, who types what he is told to."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

import pytest
from small_lines import CYCLES
from supervise_helpers import SupervisorProcess, work_of

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.data.preparer import run_preparer
from nstrain.line.paths import LinePaths
from nstrain.ops.status import status


@pytest.mark.slow  # tests/train/test_damaged_tokens.py has the trainer's part in every run
def test_it_ends_for_the_operator_and_goes_on_after_what_it_says(
    paths: LinePaths, start: Callable[..., SupervisorProcess]
) -> None:
    line = DataLine.open(work_of(paths))
    run_preparer(line.work, until_cycle=1, workers=0)
    directory = line.cycle_directory(1)
    damaged = max(directory.glob("*.bin"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(bytes(damaged.stat().st_size))

    code, output = start("real", "real").wait()
    assert code == ExitCode.NEEDS_OPERATOR, output
    look = status(paths.root)
    assert look.state == "failed"
    assert f"{damaged}: expected sha256" in (look.reason or "")
    assert look.update == 0, "not a row of it"

    command = (look.reason or "").split("`")[1]
    assert shlex.split(command) == ["rm", "-r", str(directory)]
    subprocess.run(command, shell=True, check=True)
    code, output = start("real", "real").wait()
    assert code == ExitCode.DONE, output
    look = status(paths.root)
    assert (look.state, look.cycle, look.differences) == ("done", CYCLES, 0)
