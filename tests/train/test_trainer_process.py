"""Training lines as real processes on real data: exact through kill -9, every way to stop, orphans and full disks.

The model is the stand-in package that host.json names; everything else is real.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_line import (
    ROOT,
    change_run,
    environment,
    journal_summary,
    last_update,
    launch,
    log_of,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run,
    state_of,
    tensors_of,
    wait_until,
)

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import clear_stop, read_heartbeat, request_stop

CYCLES = 3
LAST_UPDATE = 39
Outcome = tuple[str, dict[tuple[str, str], bytes]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), CYCLES)
    prepare(line.work, CYCLES)
    return line


EMA = {"horizon_tokens": 1000, "from_tokens": 2500}
"""The average begins with update 17, in cycle 2: checkpoints before have none, those after have one."""


@pytest.fixture
def line(data: DataLine, tmp_path: Path) -> LinePaths:
    return make_run(tmp_path / "run", data, ema=EMA)


@pytest.fixture(scope="module")
def uninterrupted(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The journal's digest and the final tensors of the line run through."""
    paths = make_run(tmp_path_factory.mktemp("reference") / "run", data, ema=EMA)
    assert run(paths) == ExitCode.DONE
    return outcome(paths)


def outcome(paths: LinePaths) -> Outcome:
    digest, differences = journal_summary(paths)
    assert differences == 0
    tensors = tensors_of(paths, LAST_UPDATE)
    assert {kind for kind, _ in tensors} == {"weights", "exp_avg", "exp_avg_sq", "ema"}
    return digest, tensors


def test_killed_at_any_step_it_goes_on_to_the_same_bytes(uninterrupted: Outcome, line: LinePaths) -> None:
    kills = [
        "checkpoint:6",  # in the middle of the line's start checkpoint
        "train:5",  # an update is done, its row is not yet committed
        "checkpoint:17",  # in the middle of a rolling checkpoint, while the next update trains and rows are read ahead
        "journal:14",  # a row is committed, its checkpoint is not
        "train:24",
        "checkpoint:11",
        "checkpoint:31",  # retention, or a file of the average
    ]
    replays = 0
    for where in [*kills, None]:
        reached, log_so_far = last_update(line) or 0, len(log_of(line))
        if where is None:
            assert run(line) == ExitCode.DONE
        else:
            assert run(line, NSTRAIN_KILL_POINT=where) == -signal.SIGKILL, where
        resumed = re.search(r"going on from u(\d+)", log_of(line)[log_so_far:])
        replays += resumed is not None and int(resumed[1]) < reached
    assert replays >= 2, "too few launches had updates to train again"
    assert outcome(line) == uninterrupted


@pytest.mark.slow  # tests/supervise stops in every stage
def test_every_way_to_stop_saves_at_the_next_boundary(uninterrupted: Outcome, line: LinePaths) -> None:
    for how in ("SIGTERM", "STOP", "parent", "SIGINT"):
        before = last_update(line) or 0
        read_end, write_end = os.pipe()
        trainer = launch(line, "--parent-fd", str(read_end), pass_fds=(read_end,))
        os.close(read_end)
        wait_until(lambda before=before: (last_update(line) or 0) >= before + 2, what="two more updates")  # type: ignore[misc]
        if how == "STOP":
            request_stop(line)
        elif how == "parent":
            os.close(write_end)
        else:
            trainer.send_signal(signal.Signals[how])
        assert trainer.wait(timeout=30) == ExitCode.STOPPED, how
        if how != "parent":
            os.close(write_end)
        stopped_at = last_update(line)
        assert stopped_at is not None
        assert stopped_at < LAST_UPDATE, "the stop came after the end"
        assert line.checkpoint_updates()[-1] == stopped_at, how
        heartbeat = read_heartbeat(line)
        assert heartbeat is not None
        assert (heartbeat.stage, heartbeat.update) == ("stopping", stopped_at)
        assert heartbeat.checkpoint == line.latest.read_text().strip()
        clear_stop(line)
    assert run(line) == ExitCode.DONE
    assert outcome(line) == uninterrupted


def test_waits_for_data_visibly_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    data = make_data_line(tmp_path / "d", 2)
    prepare(data.work, 1)
    paths = make_run(tmp_path / "run", data)
    trainer = launch(paths)

    def waiting() -> bool:
        heartbeat = read_heartbeat(paths)
        return heartbeat is not None and heartbeat.stage == "waiting_data"

    wait_until(waiting, what="the trainer to wait for cycle 2")
    heartbeat = read_heartbeat(paths)
    assert heartbeat is not None
    assert heartbeat.waiting_for == f"cycle 2 of {data.work}"
    assert heartbeat.waiting_since is not None
    assert heartbeat.update == 13
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(timeout=10) == ExitCode.STOPPED
    assert state_of(paths, 13)["reason"] == "cycle_end", "there was nothing new to save"
    trainer = launch(paths)
    wait_until(waiting, what="the trainer to wait again")
    prepare(data.work, 2)
    assert trainer.wait(timeout=60) == ExitCode.DONE
    assert rows_of(paths)[-1]["tokens"] == 4032


@pytest.mark.slow  # with a supervisor in every run
def test_an_error_of_the_background_writer_ends_the_process_with_its_story_in_the_log(
    uninterrupted: Outcome, line: LinePaths
) -> None:
    """At the checkpoint of update 36, before a byte is written. Launched again, the line mends it."""
    plan = [{"after": 33, "do": "failing writer"}]
    line.root.with_name("run.faults.json").write_text(json.dumps(plan))
    with line.run_log.open("ab") as log_file:
        command = [sys.executable, str(ROOT / "tests" / "supervise" / "faulty_trainer.py"), str(line.root)]
        trainer = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT, env=environment(line), cwd=ROOT)
    assert trainer.wait(timeout=60) == ExitCode.FAILED
    log = log_of(line)
    assert "NotADirectoryError: at checkpoint:begin" in log
    assert "_write_files" not in log, "it came before a byte was written"
    assert line.latest.read_text().strip() == "u00000032"
    (line.checkpoints / "u00000036.partial").write_text("half-written")
    assert run(line) == ExitCode.DONE
    assert "u00000036.partial: removed, left by an interrupted write" in log_of(line)
    assert outcome(line) == uninterrupted


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.slow  # with a supervisor in every run
def test_a_checkpoint_that_cannot_be_written_ends_the_process_and_nothing_is_lost(line: LinePaths) -> None:
    # 3 MB of weights against 1 MB a file; the journal stays far below.
    change_run(line, model={"preset": "stand-in", "config": {"vocab_size": 384, "width": 640}})
    assert run(line, NSTRAIN_KILL_POINT="train:4") == -signal.SIGKILL
    command = [sys.executable, "-m", "nstrain.train", str(line.root)]
    with line.run_log.open("ab") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, env=environment(line), preexec_fn=limit_file_size, cwd=ROOT, check=False
        ).returncode
    assert code == ExitCode.NEEDS_OPERATOR
    assert "u00000004: cannot be written" in log_of(line)
    assert line.checkpoint_updates() == [0]
    assert run(line, NSTRAIN_KILL_POINT="train:13") == -signal.SIGKILL
    assert line.checkpoint_updates() == [0, 4]
    assert journal_summary(line)[1] == 0


def test_waits_for_an_orphan_that_holds_the_line(line: LinePaths) -> None:
    lock = FileLock(line.trainer_lock).acquire("the line")
    trainer = launch(line)
    wait_until(lambda: "waiting up to 60 s for trainer" in log_of(line), what="the notice")
    assert not line.journal.exists()
    request_stop(line)
    lock.release()
    assert trainer.wait(timeout=30) == ExitCode.STOPPED
    assert line.checkpoint_updates() == [0]
