"""`kill -9` of the supervisor: one notice, whatever its line was doing, from the child that can give it.

The children are the real ones, on real data, with a stand-in model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_card import UUID
from fault_lines import copy_data, make_faulty_line, make_long_data_line, use_standin
from notice_sink import notices, set_notify
from supervise_helpers import wait_until

from nstrain.base.process import ProcessId, alive, identify
from nstrain.data.line import DataLine
from nstrain.data.preparer import read_status
from nstrain.gpu.lease import gpu_lease
from nstrain.line.orphaned import tell_of_the_supervisors_death
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Outcome, SupervisorState, read_supervisor, write_supervisor
from nstrain.settings.run import load_run

SupervisorOf = Callable[[LinePaths], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """Long enough for the preparer to wait for the trainer; nothing of it is prepared."""
    return make_long_data_line(tmp_path_factory.mktemp("data"), 6)


@pytest.fixture
def line(data: DataLine, tmp_path: Path, host: Path) -> Callable[..., LinePaths]:
    """line(fault, ...) makes one on a data line of its own."""
    use_standin(host)
    return lambda *faults: make_faulty_line(tmp_path, copy_data(data.work, tmp_path), *faults)


@pytest.fixture
def supervised() -> Iterator[SupervisorOf]:
    """Runs a line; a trainer that failed would be launched again in ten minutes."""
    started: list[subprocess.Popen[bytes]] = []

    def start(paths: LinePaths) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).with_name("foreground.py")), str(paths.root)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen([*command, "faulty", "real", "600"], stdout=subprocess.DEVNULL, env=environment)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def fault(do: str, after: int) -> dict[str, Any]:
    return {"do": do, "after": after}


def preparer_of(paths: LinePaths) -> ProcessId:
    """The preparer, once it waits for the trainer to get on."""
    found: list[ProcessId] = []

    def waits() -> bool:
        now = read_status(Path(load_run(paths.run_json).data.work))
        identity = None if now is None or now.stage != "waiting_consumer" else identify(now.pid)
        found.extend([] if identity is None else [identity])
        return bool(found)

    wait_until(waits)
    return found[0]


def waits_for(paths: LinePaths, words: str) -> None:
    """Wait until the supervisor waits for this, and no trainer runs."""

    def waits() -> bool:
        state = read_supervisor(paths)
        return state is not None and state.trainer_pid is None and words in (state.waiting_for or "")

    wait_until(waits)


def the_notice(sink: Path, *children: ProcessId) -> dict[str, Any]:
    """The one notice that is given by the time that these children are gone, but for those of long waits before it:
    on a busy machine they are long.
    """

    def given() -> list[dict[str, Any]]:
        return [one for one in notices(sink) if not one["event"].startswith("waiting_")]

    wait_until(lambda: not any(alive(child) for child in children))
    wait_until(given)
    time.sleep(0.3)
    told = given()
    assert [one["event"] for one in told] == ["supervisor_failed"]
    return told[0]


def test_in_a_back_off(line: Callable[..., LinePaths], supervised: SupervisorOf, tmp_path: Path) -> None:
    sink = set_notify(tmp_path)
    paths = line(fault("crash", 3))
    process = supervised(paths)
    waits_for(paths, "to pass after a failure")
    preparer = preparer_of(paths)
    process.kill()
    told = the_notice(sink, preparer)
    assert "no trainer ran" in told["text"]
    assert (told["line"], told["run"], told["update"]) == ("run", str(paths.root), 3)


def test_in_a_wait_for_the_gpu(line: Callable[..., LinePaths], supervised: SupervisorOf, tmp_path: Path) -> None:
    sink = set_notify(tmp_path)
    paths = line()
    card = paths.root.with_name("run.card")
    card.mkdir()
    lease = gpu_lease(UUID, card / "leases").acquire("it")
    process = supervised(paths)
    waits_for(paths, f"held by process {os.getpid()}")
    preparer = preparer_of(paths)
    process.kill()
    assert "no trainer ran" in the_notice(sink, preparer)["text"]
    lease.release()


@pytest.mark.parametrize("updates", [-1, 0], ids=["before it has its lock", "at its first update"])
def test_beside_a_trainer(
    updates: int, line: Callable[..., LinePaths], supervised: SupervisorOf, tmp_path: Path
) -> None:
    """The trainer tells, once it has saved, and the preparer, which is gone long before, does not."""
    sink = set_notify(tmp_path)
    paths = line(fault("kill supervisor", updates))
    process = supervised(paths)
    assert process.wait(60) == -signal.SIGKILL
    state = read_supervisor(paths)
    assert state is not None
    assert state.trainer_pid is not None
    assert state.preparer_pid is not None
    children = [identity for pid in (state.trainer_pid, state.preparer_pid) if (identity := identify(pid)) is not None]
    assert "its trainer ends" in the_notice(sink, *children)["text"]


@pytest.mark.parametrize("outcome", [None, "done", "stopped", "failed"])
def test_a_child_that_was_left_behind_tells_nothing(
    outcome: Outcome | None, line: Callable[..., LinePaths], tmp_path: Path
) -> None:
    """The supervisor has told itself how it ended, and ends its pipe last."""
    sink = set_notify(tmp_path)
    paths = line()
    write_supervisor(paths, SupervisorState(ProcessId(2**22, 1, "an earlier boot"), 0.0, outcome=outcome))
    tell_of_the_supervisors_death(paths, "its trainer ends")
    assert [one["event"] for one in notices(sink)] == (["supervisor_failed"] if outcome is None else [])
