"""A line with a moving average, long held-out rows and probes, killed with -9 at random moments: the same bits.

Some moments are in the midst of a validation, which puts the average into the weights' place for a while.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from readings_line import LONG_TOKENS, ROW_TOKENS, make_readings_line, train
from real_line import (
    journal_summary,
    last_update,
    launch,
    log_of,
    make_data_line,
    prepare,
    rows_of,
    run,
    tensors_of,
    wait_until,
)

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat

LAST_UPDATE = 26
LONGEST_DELAY_S = 0.1
CHECKPOINTS = {"every_updates": 3, "every_minutes": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 2)
    prepare(line.work, 2)
    return line


@pytest.fixture(scope="module")
def through(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """The line that nobody disturbs."""
    paths = make_readings_line(tmp_path_factory.mktemp("through") / "run", data, checkpoints=CHECKPOINTS)
    assert train(paths, LAST_UPDATE) == ExitCode.DONE
    assert {kind for kind, _ in tensors_of(paths, LAST_UPDATE)} == {"weights", "exp_avg", "exp_avg_sq", "ema"}
    last = rows_of(paths)[-1]
    assert {f"{kind}val_{length}/mix" for kind in ("", "ema/") for length in (ROW_TOKENS, LONG_TOKENS)} <= last.keys()
    return paths


@pytest.mark.slow  # lines with averages and lines with long rows are killed in every run, each by itself
@pytest.mark.parametrize(("kills", "seed"), [(2, 1), (2, 2), (3, 3), (3, 4)])
def test_killed_at_random_moments(kills: int, seed: int, data: DataLine, through: LinePaths, tmp_path: Path) -> None:
    draw = random.Random(seed)
    line = make_readings_line(tmp_path / "run", data, checkpoints=CHECKPOINTS)
    stretch = (LAST_UPDATE - 4) // kills  # four updates before the end the line still trains when it is killed
    moments = []
    for number in range(kills):
        update, validating = draw.randint(number * stretch + 2, (number + 1) * stretch), draw.random() < 0.5
        delay_s = draw.uniform(0, LONGEST_DELAY_S)
        moments.append((update, validating, delay_s))
        kill_at(line, update, validating, delay_s)
    assert run(line) == ExitCode.DONE
    assert log_of(line).count("going on from u") == kills, moments
    assert journal_summary(line) == journal_summary(through), moments
    assert journal_summary(line)[1] == 0, "a replayed update differed"
    assert rows_of(line) == rows_of(through), moments
    assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE), moments


def kill_at(line: LinePaths, update: int, validating: bool, delay_s: float) -> None:
    """Launch the trainer and kill it a moment after it has recorded an update, or after a validation then begins."""
    trainer = launch(line)
    wait_until(lambda: (last_update(line) or 0) >= update, what=f"update {update}")
    if validating:
        wait_until(lambda: (beat := read_heartbeat(line)) is not None and beat.stage == "validating", what="validation")
    time.sleep(delay_s)
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
