"""A new line on a small data line, and supervisors that do not outlive their test."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from small_lines import make_small_line
from supervise_helpers import SupervisorProcess

from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host.json of the test's own, empty at first, in force for its processes as well."""
    path = tmp_path / "host.json"
    path.write_text("{}")
    monkeypatch.setenv("NSTRAIN_HOST", str(path))
    return path


@pytest.fixture
def paths(tmp_path: Path) -> LinePaths:
    """A new line, on a data line of which nothing is prepared."""
    return make_small_line(tmp_path)


@pytest.fixture
def start(paths: LinePaths) -> Iterator[Callable[..., SupervisorProcess]]:
    """start(trainer mode, preparer mode, mirror mode) -> SupervisorProcess; what is left at the end is killed."""
    started: list[SupervisorProcess] = []

    def begin(trainer: str = "works", preparer: str = "idle", mirror: str = "works") -> SupervisorProcess:
        started.append(SupervisorProcess(paths, trainer, preparer, mirror))
        return started[-1]

    yield begin
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.process.kill()
            supervisor.process.wait()
        if supervisor.process.stdout is not None:
            supervisor.process.stdout.close()
    state = read_supervisor(paths)
    for pid in (state.trainer_pid, state.preparer_pid, state.mirror_pid) if state is not None else ():
        if pid is not None and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
