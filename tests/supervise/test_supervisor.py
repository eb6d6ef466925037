"""The supervisor with children that behave in every way they can, in this process and as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from foreground import preparer_command, trainer_command
from supervise_helpers import SupervisorProcess, gone, wait_until

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.process import identify
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import run_preparer
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor, request_stop, stop_requested
from nstrain.ops.consumer import consumer_path
from nstrain.ops.status import status
from nstrain.ops.stop import stop_line
from nstrain.settings.run import load_run, save_run
from nstrain.supervise import supervisor as supervisor_module
from nstrain.supervise.supervisor import Ending, Supervisor

Start = Callable[..., SupervisorProcess]


@pytest.fixture
def short_hunger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer in want of data is believed sooner."""
    monkeypatch.setattr(supervisor_module, "HUNGER_S", 0.3)
    monkeypatch.setattr(supervisor_module, "PREPARER_RETRY_S", 0.3)


def supervise(paths: LinePaths, trainer: str, preparer: str) -> tuple[Ending, list[str]]:
    """Run a line in this process; how it ended and what was told."""
    events: list[str] = []
    ending = Supervisor(paths.root, events.append, trainer_command(trainer), preparer_command(preparer)).run()
    return ending, events


def work_of(paths: LinePaths) -> Path:
    """The line's data line."""
    return Path(load_run(paths.run_json).data.work)


# ---- how a line ends -------------------------------------------------------------------------------------------------


def test_done(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "done", "idle")
    assert ending == Ending("done", ExitCode.DONE, None)
    state = read_supervisor(paths)
    assert state is not None
    assert (state.outcome, state.reason, state.launches) == ("done", None, 1)
    assert (state.trainer_pid, state.preparer_pid) == (None, None)
    assert state.supervisor.pid == os.getpid()
    assert not FileLock(work_of(paths) / "preparer.lock").held_elsewhere(), "the preparer was left running"
    assert FileLock(paths.supervisor_lock).try_acquire(), "the supervisor's lock was left held"


def test_the_trainers_refusal_is_the_lines(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "refuses", "idle")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.BAD_CONFIGURATION)
    assert ending.reason == "bad_configuration: run.json: field 'x'\nhas a second line"
    assert status(paths.root).reason == ending.reason


def test_the_trainers_crash_is_told_with_its_traceback(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "crashes", "idle")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert ending.reason is not None
    assert ending.reason.startswith("Traceback")
    assert ending.reason.endswith("ZeroDivisionError: a bug in the trainer")
    assert "u1 trained" in paths.run_log.read_text()


def test_trainer_that_cannot_be_started(paths: LinePaths) -> None:
    events: list[str] = []
    ending = Supervisor(paths.root, events.append, ["/no/such/program"], preparer_command("idle")).run()
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert "/no/such/program" in (ending.reason or "")
    wait_until(lambda: not FileLock(work_of(paths) / "preparer.lock").held_elsewhere())


# ---- the preparer ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_hunger")
def test_preparers_refusal_ends_a_trainer_that_waits(paths: LinePaths) -> None:
    ending, events = supervise(paths, "hungry", "refuses")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.BAD_CONFIGURATION)
    assert ending.reason == f"the preparer of {work_of(paths)}: source prose: ran out"
    assert (paths.root / "saved").exists(), "the trainer was ended without a checkpoint"
    assert sum("ran out" in event for event in events) == 2, "told once when it failed and once at the end"


@pytest.mark.usefixtures("short_hunger")
def test_preparers_crash_names_its_signal(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "hungry", "crashes")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert "it was killed by SIGKILL" in (ending.reason or "")
    assert "about to crash" in (ending.reason or "")


def test_preparers_failure_does_not_end_a_trainer_that_has_data(paths: LinePaths, start: Start) -> None:
    running = start("works", "refuses")
    running.wait_for_trainer()
    wait_until(lambda: running.state().reason is not None)
    time.sleep(1.5 * supervisor_module.HUNGER_S)
    assert running.process.poll() is None
    look = status(paths.root)
    assert look.state == "running"
    assert "ran out" in (look.reason or "")
    running.process.terminate()
    code, _ = running.wait()
    assert code == ExitCode.STOPPED


@pytest.mark.usefixtures("short_hunger")
def test_finished_preparer_is_started_once_more_for_a_trainer_that_waits(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "hungry", "done")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert "it is done, but the trainer still waits" in (ending.reason or "")
    assert len(json.loads((work_of(paths) / "preparer-starts.json").read_text())) == 2


def test_another_process_prepares(paths: LinePaths) -> None:
    lock = FileLock(work_of(paths) / "preparer.lock").acquire("the test's lock")
    ending, events = supervise(paths, "done", "idle")
    assert ending.outcome == "done"
    assert any(f"process {os.getpid()} already" in event for event in events)
    assert not (work_of(paths) / "preparer-starts.json").exists()
    lock.release()


def test_preparer_that_does_not_end_is_killed(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "PREPARER_GRACE_S", 0.3)
    ending, _ = supervise(paths, "done", "stubborn")
    assert ending.outcome == "done"
    assert not FileLock(work_of(paths) / "preparer.lock").held_elsewhere()


@pytest.mark.parametrize("preparer", ["done", "idle"])
def test_consumed_cycles_are_deleted(paths: LinePaths, preparer: str) -> None:
    """While no preparer runs ("done") and at the line's end ("idle": one that never deletes any)."""
    line = DataLine.open(work_of(paths))
    run_preparer(line.work, until_cycle=3, workers=0)
    entry = consumer_path(line.work, "small")
    entry.write_text(entry.read_text().replace('"cycle": 1', '"cycle": 3'))
    _, events = supervise(paths, "done", preparer)
    assert cycles_on_disk(line) == [3]
    assert any("deleted consumed cycles 1, 2" in event for event in events)


def test_missing_consumer_is_entered_before_the_preparer_starts(paths: LinePaths) -> None:
    entry = consumer_path(work_of(paths), "small")
    content = entry.read_bytes()
    entry.unlink()
    _, events = supervise(paths, "done", "idle")
    assert entry.read_bytes() == content
    assert any("missing entry" in event for event in events)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_no_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no run\.json"):
        Supervisor(tmp_path / "nothing").run()
    assert not (tmp_path / "nothing").exists()


def test_failed_check_starts_nothing(paths: LinePaths) -> None:
    settings = load_run(paths.run_json)
    save_run(paths.run_json, settings.model_copy(update={"metrics": 99}))
    with pytest.raises(Refusal, match="field 'metrics' is 99"):
        supervise(paths, "done", "idle")
    assert not paths.supervisor_json.exists()
    assert not paths.run_log.exists()


def test_second_supervisor_is_refused(paths: LinePaths, start: Start) -> None:
    first = start()
    first.wait_for_trainer()
    before = first.state()
    code, output = start().wait()
    assert code == ExitCode.BAD_CONFIGURATION
    assert f"is run by process {first.process.pid} already" in output
    assert first.state() == before, "the refused one wrote something"
    assert first.process.poll() is None


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_stop(paths: LinePaths, start: Start) -> None:
    running = start()
    running.wait_for_trainer()
    assert status(paths.root).state == "running"
    seen = []
    stopped = stop_line(paths.root, 20.0, lambda look: seen.append(look.stopping))
    assert stopped.ended
    assert stopped.status.state == "stopped"
    assert stopped.status.reason == f"stopped by process {os.getpid()}"
    code, _ = running.wait()
    assert code == ExitCode.STOPPED
    assert (paths.root / "saved").exists()
    assert not stop_requested(paths)
    with pytest.raises(Refusal, match="does not run: it is stopped"):
        stop_line(paths.root, 1.0)
    assert not stop_requested(paths)


def test_stop_that_takes_longer_than_one_waits(paths: LinePaths, start: Start) -> None:
    running = start("slow")
    running.wait_for_trainer()
    seen = []
    stopped = stop_line(paths.root, 1.2, lambda look: seen.append(look.stopping))
    assert not stopped.ended
    assert stopped.status.state == "running"
    assert seen == [True]
    assert running.wait()[0] == ExitCode.STOPPED


def test_left_over_stop_does_not_stop_the_next_run(paths: LinePaths) -> None:
    request_stop(paths)
    ending, _ = supervise(paths, "done", "idle")
    assert ending.outcome == "done"
    assert not stop_requested(paths)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_with_a_checkpoint(paths: LinePaths, start: Start, number: signal.Signals) -> None:
    running = start()
    running.wait_for_trainer()
    running.process.send_signal(number)
    code, _ = running.wait()
    assert code == ExitCode.STOPPED
    assert (paths.root / "saved").exists()
    assert status(paths.root).reason == f"stopped by {number.name}"


def test_ctrl_c_twice_loses_nothing(paths: LinePaths, start: Start) -> None:
    running = start("slow")
    running.wait_for_trainer()
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: (beat := read_heartbeat(paths)) is not None and beat.stage == "stopping")
    running.process.send_signal(signal.SIGINT)
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert (paths.root / "saved").exists(), "the second Ctrl-C cut the checkpoint short"
    assert "stopping with a checkpoint" in output
    assert "still waiting for the trainer" in output


def test_signal_while_the_trainer_is_still_starting(paths: LinePaths, start: Start) -> None:
    running = start("real")
    wait_until(lambda: running.state().trainer_pid is not None)
    running.process.terminate()
    code, _ = running.wait()
    assert code == ExitCode.STOPPED
    assert status(paths.root).state == "stopped"


def test_terminal_signals_do_not_reach_the_children(paths: LinePaths, start: Start) -> None:
    running = start()
    trainer = running.wait_for_trainer()
    preparer = running.state().preparer_pid
    assert preparer is not None
    for child in (trainer, preparer):
        assert os.getpgid(child) == child, "it is in the terminal's process group"
        assert os.getsid(child) == child
    running.process.terminate()
    running.wait()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def test_killed_trainer(paths: LinePaths, start: Start) -> None:
    running = start()
    os.kill(running.wait_for_trainer(), signal.SIGKILL)
    code, _ = running.wait()
    assert code == ExitCode.FAILED
    look = status(paths.root)
    assert look.state == "failed"
    assert "the trainer was killed by SIGKILL" in (look.reason or "")


def test_killed_supervisor(paths: LinePaths, start: Start) -> None:
    running = start("slow")
    trainer = identify(running.wait_for_trainer())
    preparer = identify(running.state().preparer_pid or 0)
    assert trainer is not None
    assert preparer is not None
    running.process.kill()
    running.process.wait()
    look = status(paths.root)
    assert look.state == "running"
    assert f"without a supervisor: trainer {trainer.pid} saves" in (look.reason or "")

    after = start("done")
    wait_until(lambda: after.state().waiting_for is not None)
    assert status(paths.root).state == "waiting"
    assert f"trainer {trainer.pid}" in (status(paths.root).waiting_for or "")
    assert not gone(trainer)
    code, output = after.wait()
    assert code == ExitCode.DONE
    assert "waiting up to 60 s for trainer" in output
    assert gone(trainer)
    assert gone(preparer)
    assert (paths.root / "saved").exists(), "the orphan ended without a checkpoint"
    assert status(paths.root).waiting_for is None


def test_killed_supervisor_without_a_successor(paths: LinePaths, start: Start) -> None:
    running = start()
    trainer = identify(running.wait_for_trainer())
    running.process.kill()
    running.process.wait()
    wait_until(lambda: gone(trainer))
    look = status(paths.root)
    assert look.state == "failed"
    assert "gone without a word" in (look.reason or "")
    assert f"`nstrain run {paths.root}`" in (look.reason or "")
    with pytest.raises(Refusal, match="does not run: it is failed"):
        stop_line(paths.root, 1.0)


def test_stop_while_waiting_for_an_orphan(paths: LinePaths) -> None:
    lock = FileLock(paths.trainer_lock).acquire("the test's lock")
    events: list[str] = []

    def ask_to_stop(text: str) -> None:
        events.append(text)
        request_stop(paths)

    ending = Supervisor(paths.root, ask_to_stop, trainer_command("done"), preparer_command("idle")).run()
    assert (ending.outcome, ending.exit_code) == ("stopped", ExitCode.STOPPED)
    assert not any("trainer started" in event for event in events)
    lock.release()


def test_orphan_that_does_not_end_in_time(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "ORPHAN_WAIT_S", 0.3)
    lock = FileLock(paths.trainer_lock).acquire("the test's lock")
    ending, _ = supervise(paths, "done", "idle")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert f"trainer {os.getpid()} of an earlier supervisor still runs" in (ending.reason or "")
    lock.release()


def test_torch_is_not_needed_to_supervise() -> None:
    code = "import sys, nstrain.supervise.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
