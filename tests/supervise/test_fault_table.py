"""The table of recovery, row by row, on real processes: a tiny line that is disturbed ends with the same bits.

The real trainer on real data, with a stand-in model so that it starts fast, under the real supervisor at a quick pace.
What the login's end does is in test_background.py and test_login.py.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_lines import Outcome, last_update, make_data, make_faulty_line, outcome, plan, supervisor, use_standin
from notice_sink import notices, set_notify
from supervise_helpers import wait_until

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode
from nstrain.base.process import identify
from nstrain.data.line import DataLine
from nstrain.line.checkpoint import read_latest
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor, request_stop
from nstrain.ops.rollback import roll_back

CYCLES = 2
MakeLine = Callable[..., LinePaths]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    return make_data(tmp_path_factory.mktemp("data"), CYCLES)


@pytest.fixture(scope="module")
def undisturbed(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the line comes to if nothing happens."""
    root = tmp_path_factory.mktemp("undisturbed")
    use_standin(root / "host.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSTRAIN_HOST", str(root / "host.json"))
        paths = make_faulty_line(root, data)
        assert run(paths)[0] == ExitCode.DONE
        assert read_latest(paths) == last_update(data)
        return outcome(paths)


@pytest.fixture
def line(data: DataLine, tmp_path: Path, host: Path) -> MakeLine:
    """line(fault, ...) makes one whose launches have these faults."""
    use_standin(host)
    return lambda *faults, **changes: make_faulty_line(tmp_path, data, *faults, **changes)


def run(paths: LinePaths, preparer: str = "idle") -> tuple[int, str]:
    """Supervise the line to an end; exit code and what was told."""
    process = supervisor(paths, preparer)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def fault(do: str, after: int) -> dict[str, Any]:
    return {"do": do, "after": after}


def counted(paths: LinePaths) -> tuple[int, int]:
    """Launches and failures of the last supervisor."""
    state = read_supervisor(paths)
    assert state is not None
    return state.launches, state.failures_total


# ---- the trainer crashes or is killed --------------------------------------------------------------------------------


def test_crash_kill_and_segmentation_fault(line: MakeLine, undisturbed: Outcome) -> None:
    paths = line(fault("crash", 6), fault("kill", 3), fault("segfault", 7))
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert counted(paths) == (4, 3)
    assert outcome(paths) == undisturbed


@pytest.mark.slow  # test_a_stop_is_heard_in_every_stage asks for a stop as well
def test_sigterm_from_elsewhere(line: MakeLine, undisturbed: Outcome, tmp_path: Path) -> None:
    sink = set_notify(tmp_path)
    paths = line(fault("sigterm", 6))
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert counted(paths) == (2, 0)
    assert outcome(paths) == undisturbed
    told = notices(sink)
    assert [one["event"] for one in told] == ["signal_restart", "finished"]
    assert told[0]["checkpoint"] == "u00000006", "it saved where it was"


def test_five_failures_in_a_row_stop_the_line_and_the_next_run_goes_on(line: MakeLine, undisturbed: Outcome) -> None:
    """The fault comes back every time before the next checkpoint; then it is mended."""
    paths = line(fault("kill", 6), *[fault("kill", 2)] * 4)
    code, output = run(paths)
    assert code == ExitCode.FAILED
    assert "5 launches in a row failed without a checkpoint committed since" in output
    assert counted(paths) == (5, 5)
    plan(paths)
    assert run(paths)[0] == ExitCode.DONE
    assert outcome(paths) == undisturbed


# ---- it hangs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # test_a_hang_that_ignores_sigterm is killed the same way
def test_sigstop(line: MakeLine, undisturbed: Outcome, tmp_path: Path) -> None:
    """Stopped, it hears nothing; woken by the watchdog, it saves and is launched again."""
    sink = set_notify(tmp_path)
    paths = line(fault("sigstop", 6))
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert "the trainer hangs" in output
    assert [one["event"] for one in notices(sink)] == ["watchdog_restart", "finished"]
    assert outcome(paths) == undisturbed


def test_a_hang_that_ignores_sigterm(line: MakeLine, undisturbed: Outcome) -> None:
    paths = line(fault("hang deaf", 6))
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert "SIGKILL to trainer" in output
    assert "in hang" in paths.run_log.read_text(), "the stacks name the function that hangs"
    assert outcome(paths) == undisturbed


# ---- the supervisor dies ---------------------------------------------------------------------------------------------


@pytest.mark.slow  # test_supervisor_dies.py kills it beside a made-up trainer
def test_the_supervisor_dies(line: MakeLine, undisturbed: Outcome, tmp_path: Path) -> None:
    """The trainer saves where it is, sends the notice itself and ends; the next run goes on from there."""
    sink = set_notify(tmp_path)
    paths = line(fault("kill supervisor", 6))
    code, _ = run(paths)
    assert code == -signal.SIGKILL
    wait_until(lambda: not FileLock(paths.trainer_lock).held_elsewhere())
    assert read_latest(paths) in (6, 7), "at the next update boundary"
    wait_until(lambda: notices(sink))
    assert [one["event"] for one in notices(sink)] == ["supervisor_failed"]
    assert run(paths)[0] == ExitCode.DONE
    assert outcome(paths) == undisturbed


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_write_is_interrupted(line: MakeLine, undisturbed: Outcome) -> None:
    paths = line(fault("kill in checkpoint 4", 2), fault("kill in checkpoint 7", 0), fault("kill in journal 6", 1))
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert counted(paths) == (4, 3)
    assert not list(paths.checkpoints.glob("*.partial")), "a partial write was left"
    assert outcome(paths) == undisturbed


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_the_disk_fills_up_under_the_trainer(line: MakeLine, undisturbed: Outcome, tmp_path: Path) -> None:
    """It stops for the operator and is not launched again; with space again, the same command goes on."""
    sink = set_notify(tmp_path)
    paths = line(fault("full disk", 6), model={"preset": "stand-in", "config": {"vocab_size": 384, "width": 24}})
    code, output = run(paths)
    assert code == ExitCode.NEEDS_OPERATOR, output
    assert counted(paths) == (1, 0)
    assert [one["event"] for one in notices(sink)] == ["disk_full"]
    assert "bytes" in notices(sink)[0]["text"], "what is needed"
    assert run(paths)[0] == ExitCode.DONE
    assert outcome(paths) == undisturbed


# ---- updates that are not finite -------------------------------------------------------------------------------------


def test_a_run_of_updates_that_are_not_finite(line: MakeLine, undisturbed: Outcome) -> None:
    """Skipped one by one, then the line stops for the operator, who goes back to before the first of them."""
    guards = {"max_consecutive_skips": 6, "watchdog_s": 30.0}
    checkpoints = {"every_updates": 4, "every_minutes": None, "keep_last": 9}
    paths = line(fault("nan", 9), guards=guards, checkpoints=checkpoints)
    code, output = run(paths)
    assert code == ExitCode.NEEDS_OPERATOR, output
    assert "6 updates in a row were skipped" in output
    assert counted(paths) == (1, 0)
    assert run(paths)[0] == ExitCode.NEEDS_OPERATOR, "a new launch does not forget them"
    roll_back(paths.root, 8)
    plan(paths)
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert outcome(paths)[1] == undisturbed[1]


# ---- another process on the card -------------------------------------------------------------------------------------


def test_another_process_appears_and_leaves(line: MakeLine, undisturbed: Outcome) -> None:
    paths = line(fault("others", 4))
    paths.root.with_name("run.card").mkdir()
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert counted(paths) == (2, 0)
    assert "gpu_taken: process 1 (" in output
    assert "it is launched again once the GPU is free" in output
    assert outcome(paths) == undisturbed


@pytest.mark.slow  # test_gpu_waits.py has it with a made-up trainer
def test_a_crash_beside_another_process_is_no_failure(line: MakeLine, undisturbed: Outcome) -> None:
    paths = line(fault("others and crash", 4))
    paths.root.with_name("run.card").mkdir()
    code, output = run(paths)
    assert code == ExitCode.DONE, output
    assert counted(paths) == (2, 0)
    assert "not counted: process 1" in output
    assert outcome(paths) == undisturbed


# ---- the data --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unprepared(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    from real_line import make_data_line

    return make_data_line(tmp_path_factory.mktemp("unprepared"), CYCLES)


@pytest.fixture
def fresh(unprepared: DataLine, tmp_path: Path, host: Path) -> Callable[..., LinePaths]:
    """fresh(fault, ...) makes a line on a data line of its own, of which nothing is prepared."""
    use_standin(host)

    def make(*faults: dict[str, Any]) -> LinePaths:
        shutil.copytree(unprepared.work, tmp_path / "data")
        return make_faulty_line(tmp_path, DataLine.open(tmp_path / "data"), *faults)

    return make


@pytest.mark.slow  # test_preparing.py and tests/data kill it
def test_the_preparer_is_killed(fresh: MakeLine, undisturbed: Outcome) -> None:
    """It is started again and goes on with the same files, to the same rows."""
    paths = fresh()
    code, output = run(paths, "dies cycle:2,cycle:3,cycle:5")
    assert code == ExitCode.DONE, output
    assert output.count("it was killed by SIGKILL") == 3
    assert counted(paths) == (1, 0)
    assert outcome(paths) == undisturbed


def test_a_source_is_away_and_comes_back(
    fresh: MakeLine, unprepared: DataLine, undisturbed: Outcome, tmp_path: Path
) -> None:
    sink = set_notify(tmp_path)
    texts = unprepared.work.parent / "texts"
    away = texts.with_name("texts away")
    paths = fresh()
    texts.rename(away)
    process = supervisor(paths, "real")
    try:
        wait_until(lambda: any(one["event"] == "preparer_failing" for one in notices(sink)))
        state = read_supervisor(paths)
        assert state is not None
        assert state.running()
        assert state.preparer_failures >= 3
    finally:
        away.rename(texts)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.DONE, output
    assert [one["event"] for one in notices(sink)].count("preparer_failing") == 1
    assert outcome(paths) == undisturbed


def test_the_disk_fills_up_under_the_preparer(fresh: MakeLine, undisturbed: Outcome, tmp_path: Path) -> None:
    """It waits for space by itself, the trainer for data; nothing is started anew."""
    paths = fresh()
    full = tmp_path / "full"
    full.touch()
    process = supervisor(paths, f"full while {full}")
    work = tmp_path / "data"
    wait_until(lambda: _stage(work) == "waiting_disk")
    state = read_supervisor(paths)
    assert state is not None
    assert state.preparer_failures == 0
    full.unlink()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.DONE, output
    assert counted(paths) == (1, 0)
    assert outcome(paths) == undisturbed


def _stage(work: Path) -> str | None:
    try:
        return str(json.loads((work / "preparer.json").read_text())["stage"])
    except (OSError, ValueError):
        return None


# ---- requests to stop, in every stage --------------------------------------------------------------------------------


STOPS = {
    "quick": {"saving": "STOP", "validating": "SIGTERM"},
    "one": {"saving": "STOP", "starting": "SIGTERM", "validating": "STOP", "training": "SIGTERM"},
    "the other": {"saving": "SIGTERM", "starting": "STOP", "validating": "SIGTERM", "training": "STOP"},
}


@pytest.mark.parametrize("way", ["quick", *(pytest.param(way, marks=pytest.mark.slow) for way in ("one", "the other"))])
def test_a_stop_is_heard_in_every_stage(way: str, line: MakeLine, undisturbed: Outcome) -> None:
    """Asked in one stage of the trainer after the other: each time it saves and ends, the next goes on.

    In the preparation of a launch's first update: test_stop_in_a_capture.py.
    """
    paths = line(*[fault(f"slow {stage}", -1) for stage in STOPS[way]])
    for stage, how in STOPS[way].items():
        assert _stopped_in(paths, stage, how) == ExitCode.STOPPED
    assert run(paths)[0] == ExitCode.DONE
    assert outcome(paths) == undisturbed


@pytest.mark.slow  # without a supervisor in every run
@pytest.mark.parametrize("how", ["STOP", "SIGTERM"])
def test_a_stop_is_heard_while_waiting_for_data(how: str, fresh: MakeLine, undisturbed: Outcome) -> None:
    paths = fresh()
    assert _stopped_in(paths, "waiting_data", how) == ExitCode.STOPPED
    assert run(paths, "real")[0] == ExitCode.DONE
    assert outcome(paths) == undisturbed


def _stopped_in(paths: LinePaths, stage: str, how: str) -> int:
    """Run the line; once its trainer is in a stage ask it to stop, by SIGTERM to the supervisor or STOP: exit code."""
    asked = paths.root.with_name(f"{paths.root.name}.asked")
    asked.unlink(missing_ok=True)
    process = supervisor(paths)
    wait_until(
        lambda: (beat := read_heartbeat(paths)) is not None and beat.stage == stage and identify(beat.pid) is not None
    )
    if how == "STOP":
        request_stop(paths)
    else:
        process.terminate()
    asked.touch()
    process.communicate(timeout=120)
    return process.returncode
