"""A request to stop that arrives while the first update of a launch is prepared: on a GPU, in its warm-up or capture.

The heartbeat says `capturing`, the budget is that of a start. The request is heard at the end of that very
update, which is saved, and the line goes on from it to the bits that it has undisturbed. The CPU's engine captures
nothing: there the request comes in the middle of the update.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fault_lines import GUARDS, Outcome, make_data, make_faulty_line, outcome, supervisor
from readings_line import FIELDS

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.checkpoint import read_latest
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor

WITHIN_S = 30.0
"""From the request to the end of the line, its process and the checkpoint included."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    return make_data(tmp_path_factory.mktemp("data"), 1)


def make_line(root: Path, data: DataLine, device: str, *faults: str) -> LinePaths:
    """A tiny NeuronSpark line whose launches have these faults from their beginning on."""
    planned: list[dict[str, Any]] = [{"after": -1, "do": fault} for fault in faults]
    guards = GUARDS | {"watchdog_s": 300.0}  # kernels are compiled under it
    return make_faulty_line(root, data, *planned, **FIELDS, device=device, guards=guards)


def run(paths: LinePaths) -> tuple[int, str]:
    """Supervise the line to an end; exit code and what was told."""
    process = supervisor(paths)
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


# On a CPU slow: test_fault_table.py and tests/train ask for a stop in an update as well.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.card_alone]),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(device: str, data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("undisturbed")
    (root / "host.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSTRAIN_HOST", str(root / "host.json"))
        paths = make_line(root, data, device)
        code, output = run(paths)
        assert code == ExitCode.DONE, output
        return outcome(paths)


@pytest.mark.parametrize(("how", "micro_batches"), [("sigterm to supervisor", (2, 1)), ("stop", (2,))])
def test_a_stop_is_heard(
    how: str, micro_batches: tuple[int, ...], device: str, data: DataLine, undisturbed: Outcome, tmp_path: Path
) -> None:
    paths = make_line(tmp_path, data, device, *(f"{how} in micro-batch {number}" for number in micro_batches))
    for update, number in enumerate(micro_batches, start=1):
        code, output = run(paths)
        ended = time.time()
        assert code == ExitCode.STOPPED, output
        came = json.loads(paths.root.with_name("run.disturbed.json").read_text())
        assert came["stage"] == "capturing"
        assert came["capturing"] == (device == "cuda" and number == 2)
        assert ended - came["time"] < WITHIN_S
        beat = read_heartbeat(paths)
        assert beat is not None
        assert (beat.stage, beat.update, read_latest(paths)) == ("stopping", update, update)
        state = read_supervisor(paths)
        assert state is not None
        assert (state.outcome, state.launches, state.failures_total) == ("stopped", 1, 0)
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert outcome(paths) == undisturbed
