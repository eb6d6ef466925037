"""A trunk of the real model, its branch and its rollback, on the device a user has: killed, they end with equal bits.

Rows get longer inside the branch, the average of the weights goes on in it, and on a GPU every part runs as graphs.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from real_line import (
    journal_summary,
    last_update,
    launch,
    make_data_line,
    prepare,
    rows_of,
    run,
    tensors_of,
    wait_until,
)
from test_trainer_neuronspark import make_line

from nstrain.base.errors import ExitCode
from nstrain.line.paths import LinePaths
from nstrain.ops.branch import make_branch
from nstrain.ops.branch_plan import StageOptions, parse_plan
from nstrain.ops.rollback import roll_back

PLAN = "decay:2000,long:2000"


def branched(trunk: LinePaths, root: Path) -> LinePaths:
    root.mkdir()
    where = (root / "run", trunk.root, 1, parse_plan(PLAN), PLAN, root / "data")
    made = make_branch(*where, options=StageOptions(long_row_tokens=64))
    assert made.data.cycle_count is not None
    prepare(made.data.work, made.data.cycle_count)
    return LinePaths(root / "run")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.card_alone]),
    ],
)
def test_killed_or_rolled_back_they_end_with_the_same_bits(device: str, tmp_path: Path) -> None:
    data = make_data_line(tmp_path / "text", 2)
    prepare(data.work, 2)
    trunk = make_line(tmp_path / "trunk", data, device)
    assert run(trunk) == ExitCode.DONE
    end = last_update(trunk)
    assert end is not None

    whole, killed = (branched(trunk, tmp_path / name) for name in ("whole", "killed"))
    assert run(whole) == ExitCode.DONE
    last = last_update(whole)
    assert last is not None
    assert {row.get("row_tokens") for row in rows_of(whole)[-3:]} == {64}, "it ends with long rows"
    draw = random.Random(23)
    for updates in (3, 8):
        began = last_update(killed) or 0
        trainer = launch(killed)
        wait_until(lambda goal=began + updates: (last_update(killed) or 0) >= goal, what="updates")  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.1))
        trainer.send_signal(signal.SIGKILL)
        assert trainer.wait() == -signal.SIGKILL
    assert run(killed) == ExitCode.DONE
    assert journal_summary(killed) == journal_summary(whole)
    assert journal_summary(killed)[1] == 0
    assert tensors_of(killed, last) == tensors_of(whole, last)
    assert {kind for kind, _ in tensors_of(whole, last)} == {"weights", "exp_avg", "exp_avg_sq", "ema"}

    bits, losses = tensors_of(trunk, end), [row["train/loss"] for row in rows_of(trunk)[1:]]
    middle = trunk.checkpoint_updates()[-2]
    assert 0 < middle < end
    roll_back(trunk.root, middle)
    prepare(data.work, 2)
    assert run(trunk) == ExitCode.DONE
    assert tensors_of(trunk, end) == bits
    assert [row["train/loss"] for row in rows_of(trunk)[1:]] == losses
