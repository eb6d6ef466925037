"""A supervisor whose trainers crash, hang, are signalled or need somebody: processes, but light ones."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from foreground import QUICK, preparer_command, trainer_command
from supervise_helpers import SupervisorProcess, set_guards, starts, supervise, wait_until

from nstrain.base.errors import ExitCode
from nstrain.base.process import alive, identify
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor, request_stop, write_heartbeat
from nstrain.supervise import children
from nstrain.supervise.children import Child, DeathPipe
from nstrain.supervise.supervisor import Supervisor

Start = Callable[..., SupervisorProcess]


def test_five_crashes_in_a_row_end_the_line_with_the_traceback(paths: LinePaths) -> None:
    ending, events = supervise(paths, "crashes")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert (ending.reason or "").startswith("5 launches in a row failed without a checkpoint committed since; the last")
    assert (ending.reason or "").endswith("ZeroDivisionError: a bug in the trainer")
    assert len(starts(paths.root, "trainer")) == 5
    assert sum("it is launched again" in event for event in events) == 4
    state = read_supervisor(paths)
    assert state is not None
    assert (state.launches, state.failures, state.failures_total) == (5, 5, 5)
    assert "a bug in the trainer" in (state.last_failure or "")
    assert (state.last_event or "").startswith("failed: 5 launches")


def test_a_line_that_makes_progress_may_crash_without_end(paths: LinePaths) -> None:
    ending, _ = supervise(paths, ",".join(["progresses"] * 7 + ["done"]))
    assert ending.outcome == "done"
    state = read_supervisor(paths)
    assert state is not None
    assert (state.launches, state.failures, state.failures_total) == (8, 1, 7)


def test_progress_begins_the_count_anew(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "crashes,crashes,crashes,crashes,progresses,crashes")
    assert ending.outcome == "failed"
    assert len(starts(paths.root, "trainer")) == 4 + 5


def test_kill_dash_9_of_the_trainer(paths: LinePaths, start: Start) -> None:
    running = start("works")
    first = running.wait_for_trainer()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: running.state().trainer_pid not in (None, first))
    second = running.wait_for_trainer()
    assert running.state().failures == 1
    assert "was killed by SIGKILL" in (running.state().last_failure or "")
    running.process.terminate()
    assert running.wait()[0] == ExitCode.STOPPED
    assert starts(paths.root, "trainer") == [first, second]


def test_sigterm_from_elsewhere_saves_and_is_launched_again(paths: LinePaths, start: Start) -> None:
    running = start("works")
    first = running.wait_for_trainer()
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: running.state().trainer_pid not in (None, first))
    assert (paths.root / "saved").exists()
    running.wait_for_trainer()
    state = running.state()
    assert (state.launches, state.failures, state.failures_total) == (2, 0, 0), "a saved trainer has not failed"
    request_stop(paths)
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert "a signal that its supervisor did not send; it is launched again" in output


@pytest.mark.parametrize(("mode", "event"), [("needs", "failed"), ("full", "disk_full")])
def test_what_needs_the_operator_is_not_launched_again(paths: LinePaths, mode: str, event: str) -> None:
    ending, _ = supervise(paths, mode)
    assert (ending.outcome, ending.exit_code, ending.event) == ("failed", ExitCode.NEEDS_OPERATOR, event)
    assert len(starts(paths.root, "trainer")) == 1


def test_stop_during_the_wait_for_a_relaunch(paths: LinePaths) -> None:
    events: list[str] = []

    def ask(text: str) -> None:
        events.append(text)
        if "it is launched again" in text:
            request_stop(paths)

    pace = dataclasses.replace(QUICK, relaunch_s=(600.0,))
    ending = Supervisor(paths.root, ask, trainer_command("crashes"), preparer_command("idle"), pace).run()
    assert (ending.outcome, ending.reason) == ("stopped", f"stopped by process {os.getpid()}")
    assert len(starts(paths.root, "trainer")) == 1


def test_the_last_words_of_the_one_before_are_not_its_own(tmp_path: Path) -> None:
    log, pipe = tmp_path / "run.log", DeathPipe()
    log.write_text("failed: what the one before died of\n")
    child = Child("trainer", [sys.executable, "-S", "-c", "raise SystemExit(1)"], pipe, log, tmp_path)
    assert child.wait(30) == 1
    assert child.last_words(lambda line: True) == ""
    pipe.close()


def test_what_a_trainer_left_behind_is_killed(paths: LinePaths) -> None:
    """A child of the trainer that outlives it would hold its GPU's memory."""
    ending, _ = supervise(paths, "leaves")
    assert ending.outcome == "done"
    group = starts(paths.root, "trainer")[0]
    wait_until(lambda: not _group_exists(group))


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# ---- hangs -----------------------------------------------------------------------------------------------------------


def test_a_hang_is_dumped_asked_to_end_and_launched_again(paths: LinePaths) -> None:
    ending, events = supervise(paths, "hangs,done")
    assert ending.outcome == "done"
    assert any("hangs: no heartbeat for" in event and "in stage training" in event for event in events)
    assert any(event.startswith("SIGTERM to trainer") for event in events)
    assert not any(event.startswith("SIGKILL") for event in events)
    log = paths.run_log.read_text()
    assert "most recent call first" in log, "no stacks"
    assert "in trainer" in log[log.index("most recent call first") :], "the stack of the function that hangs"
    state = read_supervisor(paths)
    assert state is not None
    assert state.failures_total == 1


def test_a_hang_that_hears_nothing_is_killed(paths: LinePaths) -> None:
    ending, events = supervise(paths, "hangs deaf,done")
    assert ending.outcome == "done"
    assert any(event.startswith("SIGKILL to trainer") for event in events)


def test_a_hang_before_the_first_beat(paths: LinePaths) -> None:
    set_guards(paths, start_s=1.0)
    ending, events = supervise(paths, "early,done")
    assert ending.outcome == "done"
    assert any("since it was started" in event for event in events)


def test_a_stopped_process_is_woken_and_saves(paths: LinePaths, start: Start) -> None:
    """SIGSTOP: nothing of it goes on, it hears no SIGTERM; woken, it has a checkpoint to lose no update."""
    running = start("works,done")
    trainer = running.wait_for_trainer()
    _shorten_budget(paths, trainer)
    os.kill(trainer, signal.SIGSTOP)
    code, output = running.wait()
    assert code == ExitCode.DONE
    assert "hangs" in output
    assert "a signal that its supervisor did not send" not in output
    assert (paths.root / "saved").exists()


def _shorten_budget(paths: LinePaths, trainer: int) -> None:
    """Stop the trainer just after a beat and shorten that one's budget, so that the test need not wait for it."""
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(0.05)
    beat = read_heartbeat(paths)
    assert beat is not None
    write_heartbeat(paths, dataclasses.replace(beat, budget_s=0.3))


def test_a_process_that_cannot_be_killed_ends_the_supervision(
    paths: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL that has no effect, as on a process that hangs in a driver: nothing is launched beside it."""
    killed: list[int] = []
    monkeypatch.setattr(children.Child, "kill", lambda child: killed.append(child.pid))
    ending, _ = supervise(paths, "hangs deaf,done")
    trainer = identify(starts(paths.root, "trainer")[0])
    try:
        assert (ending.outcome, ending.exit_code, ending.event) == ("failed", ExitCode.STUCK, "stuck")
        assert killed == starts(paths.root, "trainer"), "another trainer was launched"
        assert f"trainer {killed[0]} is still there" in (ending.reason or "")
        assert "sleeping" in (ending.reason or ""), "the process's state"
        assert trainer is not None
        assert alive(trainer)
    finally:
        os.kill(killed[0], signal.SIGKILL)
        os.waitpid(killed[0], 0)


def test_a_save_that_hangs_is_bounded_and_the_line_is_stopped(paths: LinePaths, start: Start) -> None:
    running = start("hangs deaf")
    wait_until(lambda: len(starts(paths.root, "trainer")) == 1)
    request_stop(paths)
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert "to be trained again" in output
    assert len(starts(paths.root, "trainer")) == 1


def test_a_supervisor_that_was_itself_stopped_kills_nobody(paths: LinePaths, start: Start) -> None:
    running = start("works")
    trainer = running.wait_for_trainer()
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    running.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert running.state().trainer_pid == trainer
    running.process.terminate()
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert "hangs" not in output
