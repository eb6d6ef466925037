"""The supervisor with children that behave in every way they can, in this process and as a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from foreground import QUICK, preparer_command, trainer_command
from supervise_helpers import SupervisorProcess, gone, supervise, wait_until, work_of

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.process import identify
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor, request_stop, stop_requested
from nstrain.ops.status import status
from nstrain.ops.stop import stop_line
from nstrain.settings.run import load_run, save_run
from nstrain.supervise import stopping
from nstrain.supervise.failures import Ending
from nstrain.supervise.stopping import StopRequests
from nstrain.supervise.supervisor import Supervisor

Start = Callable[..., SupervisorProcess]


# ---- how a line ends -------------------------------------------------------------------------------------------------


def test_done(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "done", "idle")
    assert ending == Ending("done", ExitCode.DONE, None, "finished")
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


def test_trainer_that_cannot_be_started(paths: LinePaths) -> None:
    events: list[str] = []
    ending = Supervisor(paths.root, events.append, ["/no/such/program"], preparer_command("idle"), QUICK).run()
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert "/no/such/program" in (ending.reason or "")
    wait_until(lambda: not FileLock(work_of(paths) / "preparer.lock").held_elsewhere())


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_no_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no run\.json"):
        Supervisor(tmp_path / "nothing").run()
    assert not (tmp_path / "nothing").exists()


def test_a_stop_at_a_cycles_end_is_to_come_until_the_checkpoint_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = LinePaths(tmp_path)
    stops = StopRequests(paths, print)
    assert not stops.cycle_end_to_come()
    request_stop(paths, at_cycle_end=2)
    for cycle, to_come in ((1, True), (2, True), (3, False)):
        state = tmp_path, {"position": {"cycle": cycle}}
        monkeypatch.setattr(stopping, "newest_state", lambda paths, warn, state=state: state)
        assert stops.cycle_end_to_come() == to_come
        asked = [stops.asked_by_file(code) for code in (ExitCode.STOPPED, ExitCode.FAILED, None)]
        assert asked == [not to_come, False, False], "a trainer that is there says so itself"


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
    """A request to stop at a cycle's end, which the line has not reached, outlives that (a restart of the machine)."""
    request_stop(paths, at_cycle_end=2)
    running = start()
    running.wait_for_trainer()
    running.process.send_signal(number)
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert (paths.root / "saved").exists()
    assert status(paths.root).reason == f"stopped by {number.name}"
    assert f"asked to stop at the end of cycle 2, since before this start; `rm {paths.stop}`" in output
    assert status(paths.root).stop_at_cycle_end == 2
    shutil.rmtree(paths.checkpoints)  # the fake trainer's
    supervise(paths, "done", "idle")
    assert not paths.stop.exists()


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
    assert f"waiting for trainer {trainer.pid}, left behind" in output
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

    ending = Supervisor(paths.root, ask_to_stop, trainer_command("done"), preparer_command("idle"), QUICK).run()
    assert (ending.outcome, ending.exit_code) == ("stopped", ExitCode.STOPPED)
    assert not any("trainer started" in event for event in events)
    lock.release()


def test_orphan_that_does_not_end_in_time(paths: LinePaths) -> None:
    lock = FileLock(paths.trainer_lock).acquire("the test's lock")
    ending, _ = supervise(paths, "done", "idle", orphan_wait_s=0.3)
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert f"trainer {os.getpid()} of an earlier supervisor still runs" in (ending.reason or "")
    lock.release()


def test_torch_is_not_needed_to_supervise() -> None:
    code = "import sys, nstrain.supervise.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
