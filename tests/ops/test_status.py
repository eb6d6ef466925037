"""`status`: every state a line can be in, from the files that processes leave."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
import types
from typing import Any

import pytest
from looked_at_lines import beat, page, record, save, supervise, work_of
from small_lines import CYCLE_TOKENS, CYCLES, UPDATE_TOKENS
from typer.testing import CliRunner

from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import ExitCode
from nstrain.base.process import ProcessId, identify, is_stopped, this_process
from nstrain.base.units import human_seconds
from nstrain.cli.main import app
from nstrain.data.preparer import PreparerStatus
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    request_stop,
    write_heartbeat,
    write_supervisor,
)
from nstrain.ops.lines import find_lines
from nstrain.ops.status import status
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION

TOTAL_TOKENS = CYCLES * CYCLE_TOKENS

ISSUE_FIELDS = (
    "state", "update", "tokens", "tokens_total", "loss", "tokens_per_s", "cycle", "checkpoint", "eta_s", "waiting_for",
)  # fmt: skip


def test_new(paths: LinePaths) -> None:
    look = status(paths.root)
    assert (look.state, look.update, look.tokens, look.tokens_total) == ("new", 0, 0, TOTAL_TOKENS)
    assert (look.loss, look.checkpoint, look.pid, look.cycle) == (None, None, None, None)
    assert (look.cycle_count, look.preset) == (CYCLES, "tiny-32k")


def test_running(paths: LinePaths) -> None:
    record(paths, 10)
    save(paths, 4)
    supervise(paths, trainer_pid=os.getpid())
    beat(
        paths, os.getpid(), update=11, tokens=11 * UPDATE_TOKENS, loss=2.25, tokens_per_s=900.0, learning_rate=5e-4,
        cycle=2, cycle_progress=0.375, eta_s=7.0, checkpoint="u00000004", tokens_total=TOTAL_TOKENS,
    )  # fmt: skip
    look = status(paths.root)
    assert (look.state, look.stage, look.reason) == ("running", "training", None)
    assert (look.update, look.tokens, look.loss) == (11, 11 * UPDATE_TOKENS, 2.25)
    assert (look.tokens_per_s, look.eta_s, look.learning_rate) == (900.0, 7.0, 5e-4)
    assert (look.cycle, look.cycle_progress) == (2, 0.375)
    assert (look.checkpoint, look.checkpoints) == ("u00000004", ("u00000004",))
    assert (look.pid, look.trainer_pid) == (os.getpid(), os.getpid())
    assert look.validated_update == 8
    assert look.validation == {"val_64/mix": 11.0, "val_64/mean": 8.0, "val_64/prose": 10.0}
    assert not look.stopping
    request_stop(paths)
    assert status(paths.root).stopping


def test_trainer_that_is_still_starting_stands_at_its_checkpoint(paths: LinePaths) -> None:
    record(paths, 10)
    save(paths, 4)
    supervise(paths, trainer_pid=os.getpid())
    beat(paths, os.getpid(), stage="starting", update=0, tokens=0)
    look = status(paths.root)
    assert (look.state, look.update, look.tokens) == ("running", 4, 4 * UPDATE_TOKENS)


def test_heartbeat_of_an_earlier_trainer_does_not_count(paths: LinePaths, other_process: int) -> None:
    record(paths, 10)
    supervise(paths, trainer_pid=os.getpid())
    beat(paths, other_process, update=3, tokens_per_s=1.0)
    look = status(paths.root)
    assert (look.state, look.update, look.tokens_per_s) == ("running", 10, None)


def test_waiting_for_data(paths: LinePaths) -> None:
    supervise(paths, trainer_pid=os.getpid())
    beat(paths, os.getpid(), stage="waiting_data", waiting_for="cycle 2 of DATA", waiting_since=123.0)
    preparing = PreparerStatus(os.getpid(), "preparing", 2, 0.25, time.time(), None)
    atomic_write_json(work_of(paths) / "preparer.json", dataclasses.asdict(preparing))
    look = status(paths.root)
    assert look.state == "waiting"
    assert look.waiting_for == "cycle 2 of DATA (preparing cycle 2, 25 %)"
    assert look.waiting_since == 123.0
    assert look.preparer_pid == os.getpid()


def test_a_clock_that_is_set(paths: LinePaths) -> None:
    """Back: nothing is waited for since tomorrow. Forwards: the start of processes moves with it, files do not."""
    supervise(paths, trainer_pid=os.getpid(), preparer_pid=os.getpid())
    beat(paths, os.getpid(), stage="waiting_data", waiting_for="data", waiting_since=time.time() + 86400)
    preparing = PreparerStatus(os.getpid(), "preparing", 2, 0.25, time.time() - 1e6, None)
    atomic_write_json(work_of(paths) / "preparer.json", dataclasses.asdict(preparing))
    look = status(paths.root)
    assert ", for 0s" in page(look)
    assert look.preparer_pid == os.getpid()
    supervise(paths, trainer_pid=os.getpid())
    assert status(paths.root).preparer_pid is None, "no supervisor says that it is the one that wrote the file"


def test_no_sign_of_life(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that hangs is ended by the watchdog only after the budget of its stage: half an hour, say."""
    supervise(paths, trainer_pid=os.getpid())
    cases = (("training", None, 180), ("training", 1.0, 10), ("training", 4.0, 20), ("saving", 1.0, 180))
    for update, (stage, update_s, quiet_s) in enumerate(cases):
        with Journal.open(paths.journal, METRICS_VERSION) as journal:
            journal.commit(update, {"tokens": 0} | ({} if update_s is None else {"time/update_s": update_s}))
        beat(paths, os.getpid(), stage=stage, tokens_per_s=900.0, eta_s=7.0, budget_s=1800.0)
        for passed_s, silent in ((quiet_s - 1, False), (quiet_s + 1, True)):
            clock = types.SimpleNamespace(time=lambda passed_s=passed_s: time.time() + passed_s)
            monkeypatch.setattr("nstrain.ops.status_life.time", clock)
            look = status(paths.root)
            assert (look.silent_s is not None, look.tokens_per_s is None, look.eta_s is None) == (silent,) * 3
            assert look.heartbeat_at == pytest.approx(time.time(), abs=5)
            assert look.budget_s == 1800
        told = f"no sign of life for {human_seconds(look.silent_s or 0)} (ended after 30m00s)"
        assert told in page(look)
        assert "left" not in page(look)
        assert told in find_lines(paths.root)[0].row()[-1]


def test_a_process_that_a_signal_has_stopped_is_told(paths: LinePaths, other_process: int) -> None:
    identity = identify(other_process)
    assert identity is not None
    write_supervisor(paths, SupervisorState(identity, time.time(), trainer_pid=os.getpid()))
    beat(paths, os.getpid())
    assert status(paths.root).stopped_pids == ()
    os.kill(other_process, signal.SIGSTOP)
    while not is_stopped(other_process):
        time.sleep(0.001)
    look = status(paths.root)
    assert look.stopped_pids == (other_process,)
    told = f"process {other_process} is stopped (SIGSTOP, Ctrl-Z): `kill -CONT {other_process}`"
    assert told in page(look)
    ran = CliRunner().invoke(app, ["stop", str(paths.root), "--wait", "0"])
    assert (ran.exit_code, told in ran.stdout) == (ExitCode.FAILED, True), ran.stdout


def test_a_preparer_that_fails_is_told_with_how_often_and_why(paths: LinePaths) -> None:
    """Else a line whose data can't be prepared looks like one that only waits."""
    why = "/texts/even/003.txt: has other content than was pinned"
    supervise(paths, trainer_pid=os.getpid(), preparer_failures=4, preparer_failure=why)
    beat(paths, os.getpid(), stage="waiting_data", waiting_for="cycle 2 of DATA", waiting_since=time.time())
    look = status(paths.root)
    assert look.waiting_for == "cycle 2 of DATA (its preparer has failed 4 times in a row)"
    assert (look.preparer_failures, look.preparer_failure) == (4, why)
    assert "".join(why.split()) in "".join(page(look).split())
    assert why in find_lines(paths.root)[0].row()[-1]
    supervise(paths, trainer_pid=os.getpid(), preparer_failures=0, preparer_failure=why)
    assert why not in page(status(paths.root)), "a cycle was prepared since"


def test_waiting_for_an_earlier_trainer(paths: LinePaths) -> None:
    supervise(paths, waiting_for="trainer 17", waiting_since=5.0)
    look = status(paths.root)
    assert (look.state, look.waiting_for, look.waiting_since) == ("waiting", "trainer 17", 5.0)


def test_preparer_that_is_gone_is_not_shown(paths: LinePaths, dead_process: ProcessId) -> None:
    gone = PreparerStatus(dead_process.pid, "preparing", 2, 0.25, time.time(), None)
    atomic_write_json(work_of(paths) / "preparer.json", dataclasses.asdict(gone))
    assert status(paths.root).preparer is None


@pytest.mark.parametrize(("outcome", "reason"), [("stopped", "stopped by SIGINT"), ("failed", "no memory")])
def test_recorded_outcome(paths: LinePaths, dead_process: ProcessId, outcome: Any, reason: str) -> None:
    record(paths, 10)
    save(paths, 10)
    state = SupervisorState(dead_process, time.time(), 1, outcome=outcome, reason=reason)
    write_supervisor(paths, state)
    beat(paths, dead_process.pid, tokens_per_s=5.0, eta_s=3.0)
    look = status(paths.root)
    assert (look.state, look.reason) == (outcome, reason)
    assert (look.update, look.loss, look.cycle, look.learning_rate) == (10, 2.5, 2, 1e-3)
    assert (look.tokens_per_s, look.eta_s, look.pid, look.trainer_pid) == (None, None, None, None)


def test_a_copy_is_not_told_to_be_run(paths: LinePaths, dead_process: ProcessId) -> None:
    write_supervisor(paths, SupervisorState(dead_process, time.time(), outcome="stopped", reason="stopped by SIGINT"))
    copy = paths.root.with_name("copy")
    shutil.copytree(paths.root, copy)
    assert status(paths.root).reason == "stopped by SIGINT"
    told = status(copy).reason or ""
    assert told.startswith(f"it is one line with {paths.root}")
    assert "nstrain run" not in told
    shutil.rmtree(paths.root)
    assert status(copy).reason == "stopped by SIGINT", "it was moved, not copied"


def test_done_until_the_data_line_grows(paths: LinePaths, dead_process: ProcessId) -> None:
    record(paths, 24)
    save(paths, 24)
    write_supervisor(paths, SupervisorState(dead_process, time.time(), 1, outcome="done"))
    assert (status(paths.root).state, status(paths.root).reason) == ("done", None)
    line_json = work_of(paths) / "line.json"
    value = json.loads(line_json.read_text())
    value["schedule"].append({**value["schedule"][0], "cycles": 1})
    line_json.write_text(json.dumps(value))
    look = status(paths.root)
    assert (look.state, look.tokens_total) == ("stopped", TOTAL_TOKENS + CYCLE_TOKENS)
    assert "has grown" in (look.reason or "")
    assert "goes on from update 24" in (look.reason or "")


def test_killed_without_a_word(paths: LinePaths, dead_process: ProcessId) -> None:
    record(paths, 10)
    save(paths, 8)
    write_supervisor(paths, SupervisorState(dead_process, time.time(), 1, trainer_pid=dead_process.pid))
    beat(paths, dead_process.pid)
    look = status(paths.root)
    assert look.state == "failed"
    assert f"process {dead_process.pid}) is gone without a word" in (look.reason or "")
    assert f"`nstrain run {paths.root}` goes on from update 8" in (look.reason or "")
    assert look.update == 10


def test_reused_pid_is_not_the_dead_supervisor(paths: LinePaths) -> None:
    me = this_process()
    earlier = dataclasses.replace(me, start_ticks=me.start_ticks - 1)
    write_supervisor(paths, SupervisorState(earlier, time.time(), 1, trainer_pid=me.pid))
    assert status(paths.root).state == "failed"


def test_reused_pid_is_not_the_dead_trainer(paths: LinePaths, dead_process: ProcessId, other_process: int) -> None:
    write_supervisor(paths, SupervisorState(dead_process, time.time(), 1, trainer_pid=other_process))
    write_heartbeat(paths, Heartbeat(time.time() - 60, other_process, "training", 5, 5 * UPDATE_TOKENS))
    assert status(paths.root).state == "failed", "the heartbeat is older than the process that has its writer's pid now"


def test_orphan_that_saves(paths: LinePaths, dead_process: ProcessId, other_process: int) -> None:
    write_supervisor(paths, SupervisorState(dead_process, time.time(), 1, trainer_pid=other_process))
    beat(paths, other_process)
    look = status(paths.root)
    assert look.state == "running"
    assert f"without a supervisor: trainer {other_process}" in (look.reason or "")
