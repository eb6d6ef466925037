"""Two whole lines and one card: the later one waits for the lease, says so, and takes the card when it is given back.

On a real card with the commands of a user. A CPU's lines do the same with a card that is made up: there the supervisor
and the trainer are those of foreground.py, which know it.

The lines are the same but for their names, so that each is what the other one must come to: one is stopped, waits for
the card and goes on, the other one has it from its beginning to its end. A trainer that has just taken the card is held
still (SIGSTOP) until the other line has been seen waiting, so that nothing depends on which of them is faster.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lines import environment, make_data, outcome
from real_line import ROOT
from supervise_helpers import wait_until

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor
from nstrain.ops.status import status

BASELINES = ROOT / "benchmarks" / "models" / "baselines"
CYCLES, CYCLE_UPDATES = 2, 16
PATIENCE_S = 120.0
"""For one step. A card whose last user is still listed when the lease is free counts as free half a minute later."""

Start = Callable[[LinePaths], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    return make_data(tmp_path_factory.mktemp("data"), CYCLES)


@pytest.fixture(autouse=True)
def baselines(host: Path) -> None:
    """The model is a small Llama: it has few kernels to compile."""
    host.write_text(json.dumps({"neuronspark": str(BASELINES)}))


def nstrain(*arguments: object) -> str:
    """Run a command to its end; what it printed."""
    command = [sys.executable, "-m", "nstrain.cli.main", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def new_line(run: Path, data: DataLine, device: str) -> LinePaths:
    nstrain(
        *("new", run, "--model", "llama-tiny", "--data", data.work, "--peak-lr", "2e-3", "--threads", 1),
        *("--device", device, "--row-tokens", 32, "--tokens-per-update", 128, "--micro-rows", 2),
        *("--validate-every", 8, "--validation-rows", 3, "--checkpoint-every", 6),
    )
    return LinePaths(run)


@pytest.fixture(
    params=[
        pytest.param("made up", marks=pytest.mark.slow),
        pytest.param("real", marks=[pytest.mark.gpu, pytest.mark.card_alone]),
    ]
)
def lines(
    request: pytest.FixtureRequest, data: DataLine, tmp_path: Path
) -> Iterator[tuple[LinePaths, LinePaths, Start]]:
    """Two new lines for one card, and what starts one of them; what still runs at the test's end is killed."""
    real = request.param == "real"
    first, second = (new_line(tmp_path / name, data, "cuda" if real else "cpu") for name in ("first", "second"))
    if real:
        command = [sys.executable, "-m", "nstrain.cli.main", "run", "--foreground"]
        arguments: list[str] = []
    else:
        (tmp_path / "first.card").mkdir()
        (tmp_path / "second.card").symlink_to("first.card")
        command = [sys.executable, str(Path(__file__).with_name("foreground.py"))]
        arguments = ["faulty", "idle"]
    started: list[subprocess.Popen[bytes]] = []

    def start(paths: LinePaths) -> subprocess.Popen[bytes]:
        with paths.root.with_suffix(".told").open("ab") as told:
            process = subprocess.Popen(
                [*command, str(paths.root), *arguments], stdout=told, stderr=subprocess.STDOUT, env=environment()
            )
        started.append(process)
        return process

    yield first, second, start
    for process in started:
        process.kill()
        process.wait()
    for paths in (first, second):  # a trainer that lost its supervisor would end by itself, but not at once
        state = read_supervisor(paths)
        if state is not None and state.trainer_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.trainer_pid, signal.SIGKILL)


def log_of(paths: LinePaths) -> str:
    return paths.run_log.read_text() if paths.run_log.exists() else ""


@contextlib.contextmanager
def held_still_with_the_card(paths: LinePaths, times: int) -> Iterator[int]:
    """From the moment that the line has taken the card for so many times, its trainer stands still; its pid."""
    wait_until(lambda: log_of(paths).count(" is leased") == times, PATIENCE_S)
    state = read_supervisor(paths)
    assert state is not None
    assert state.trainer_pid is not None
    os.kill(state.trainer_pid, signal.SIGSTOP)
    try:
        yield state.trainer_pid
    finally:
        os.kill(state.trainer_pid, signal.SIGCONT)


def refuse_other_than_a_wait(paths: LinePaths, holder: int, began: float) -> None:
    """Fail unless the line comes to wait for that process's card, and its status says so."""
    wait_until(lambda: f"held by process {holder}" in (status(paths.root).waiting_for or ""), PATIENCE_S)
    time.sleep(1.0)  # some looks at the lease later it waits still
    said: dict[str, Any] = json.loads(nstrain("status", paths.root, "--json"))
    assert said["state"] == "waiting"
    assert said["waiting_for"].startswith("a free GPU: GPU-")
    assert said["waiting_for"].endswith(f", held by process {holder}")
    assert began <= said["waiting_since"] <= time.time() - 1.0
    assert said["trainer_pid"] is None, "a trainer is started only when the card is free"


def test_two_lines_take_turns(lines: tuple[LinePaths, LinePaths, Start]) -> None:
    first, second, start = lines
    running = start(first)
    with held_still_with_the_card(first, 1) as holder:
        nstrain("stop", first.root, "--at-cycle-end", 1)
        began = time.time()
        other = start(second)
        refuse_other_than_a_wait(second, holder, began)
    assert running.wait(PATIENCE_S) == ExitCode.STOPPED, log_of(first)
    assert status(first.root).update == CYCLE_UPDATES

    with held_still_with_the_card(second, 1) as holder:
        began = time.time()
        running = start(first)
        refuse_other_than_a_wait(first, holder, began)
    assert other.wait(PATIENCE_S) == ExitCode.DONE, log_of(second)
    assert running.wait(PATIENCE_S) == ExitCode.DONE, log_of(first)

    for paths, launches, resumed in ((first, 2, 1), (second, 1, 0)):
        log = log_of(paths)
        assert (log.count(" is leased"), log.count("going on from u")) == (launches, resumed)
        state = read_supervisor(paths)
        assert state is not None
        assert (state.launches, state.failures_total) == (1, 0)
    assert status(second.root).update == CYCLES * CYCLE_UPDATES
    assert outcome(first) == outcome(second)
