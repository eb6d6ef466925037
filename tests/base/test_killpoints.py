"""The hook that lets tests kill a process at a chosen instant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nstrain
from nstrain.base import killpoints

PROGRAM = """
from nstrain.base.killpoints import kill_point
for i in range(4):
    kill_point("other:step")
    print(i, flush=True)
    kill_point("area:step")
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != killpoints.VARIABLE}
    env["PYTHONPATH"] = str(Path(nstrain.__file__).parents[1])
    if value is not None:
        env[killpoints.VARIABLE] = value
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)


def test_nth_step_of_the_area_kills_the_process_and_other_areas_do_not() -> None:
    done = run("area:3")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]


@pytest.mark.parametrize("value", [None, "", "area:5", "elsewhere:1"])
def test_unarmed_or_unreached_does_nothing(value: str | None) -> None:
    assert run(value).returncode == 0


@pytest.mark.parametrize("value", ["area", "area:", "area:0", "area:-1", ":3", "area:x"])
def test_a_malformed_request_is_an_error_and_not_a_test_without_a_kill(value: str) -> None:
    with pytest.raises(ValueError, match=killpoints.VARIABLE):
        killpoints.arm(value)
