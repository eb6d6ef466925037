"""Supervisors as processes, and patience with a bound."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreground import QUICK, mirror_command, preparer_command, trainer_command

from nstrain.base.process import ProcessId, alive
from nstrain.line.notices import Event
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import SupervisorState, read_heartbeat, read_supervisor
from nstrain.settings.run import load_run, save_run
from nstrain.supervise.failures import Ending
from nstrain.supervise.supervisor import Supervisor

PATIENCE_S = 120.0


def supervise(
    paths: LinePaths, trainer: str, preparer: str = "idle", mirror: str = "works", **pace: Any
) -> tuple[Ending, list[str]]:
    """Run a line in this process at QUICK's pace, but for what is given; how it ended and what was told."""
    events: list[str] = []
    commands = trainer_command(trainer), preparer_command(preparer)
    pace_of_test = dataclasses.replace(QUICK, **pace)
    supervisor = Supervisor(paths.root, events.append, *commands, pace_of_test, mirror_command=mirror_command(mirror))
    return supervisor.run(), events


class Heard:
    """Keeps what a keeper of a child says."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.events: list[str] = []
        self.fields: dict[str, object] = {}

    def tell(self, text: str) -> None:
        self.told.append(text)

    def update(self, **fields: object) -> None:
        self.fields |= fields

    def notify(self, event: Event, text: str) -> None:
        self.events.append(event)


def work_of(paths: LinePaths) -> Path:
    """The line's data line."""
    return Path(load_run(paths.run_json).data.work)


def starts(directory: Path, name: str) -> list[int]:
    """The pids of every fake child of this name (trainer, preparer) that was started, in order."""
    noted = directory / f"{name}-starts.json"
    return list(json.loads(noted.read_text())) if noted.exists() else []


def set_guards(paths: LinePaths, **guards: float) -> None:
    """Change guards in run.json."""
    settings = load_run(paths.run_json)
    save_run(paths.run_json, settings.model_copy(update={"guards": settings.guards.model_copy(update=guards)}))


def wait_until(what: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait until `what()` is true; fail after a while."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class SupervisorProcess:
    """`foreground.py` as a process."""

    def __init__(self, paths: LinePaths, trainer: str, preparer: str, mirror: str) -> None:
        self.paths = paths
        script = Path(__file__).with_name("foreground.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(paths.root), trainer, preparer, "", mirror],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def state(self) -> SupervisorState:
        """supervisor.json, once it is this process's."""
        found: list[SupervisorState] = []

        def mine() -> bool:
            state = read_supervisor(self.paths)
            if state is not None and state.supervisor.pid == self.process.pid:
                found.append(state)
            return bool(found)

        wait_until(mine)
        return found[0]

    def wait_for_trainer(self) -> int:
        """The trainer's pid, once its heartbeat beats."""
        wait_until(lambda: (state := self.state()).trainer_pid is not None and beats(self.paths, state.trainer_pid))
        pid = self.state().trainer_pid
        assert pid is not None
        return pid

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output


def beats(paths: LinePaths, pid: int) -> bool:
    """Whether the heartbeat is that process's."""
    beat = read_heartbeat(paths)
    return beat is not None and beat.pid == pid and beat.stage != "starting"


def gone(identity: ProcessId | None) -> bool:
    """Whether a process has ended."""
    return identity is None or not alive(identity)
