"""The data line's preparer under a supervisor: started again, relied on, and given up only for what cannot pass."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from foreground import QUICK, preparer_command, trainer_command
from notice_sink import notices, set_notify
from supervise_helpers import Heard, SupervisorProcess, set_guards, starts, supervise, wait_until, work_of

from nstrain.base.disk import FileLock, atomic_write
from nstrain.base.errors import ExitCode
from nstrain.data.consumers import consumer_path
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import PreparerStatus, read_status, run_preparer
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import request_stop
from nstrain.ops.status import status
from nstrain.settings.run import load_run
from nstrain.supervise.children import DeathPipe
from nstrain.supervise.preparing import PreparerKeeper
from nstrain.supervise.supervisor import Supervisor

Start = Callable[..., SupervisorProcess]


def test_a_preparer_that_fails_is_started_again_after_a_growing_wait(paths: LinePaths) -> None:
    events: list[str] = []

    def tell(text: str) -> None:
        events.append(text)
        if "(2 in a row)" in text:
            request_stop(paths)

    pace = dataclasses.replace(QUICK, preparer_backoff_s=(0.2, 3.0))
    commands = trainer_command("works"), preparer_command("refuses,crashes,idle")
    assert Supervisor(paths.root, tell, *commands, pace).run().outcome == "stopped"
    told = [event for event in events if "in a row)" in event]
    assert "source prose: is away; it is started again in 0s" in told[0]
    assert "it was killed by SIGKILL" in told[1]
    assert told[1].endswith("it is started again in 3s")
    assert len(starts(work_of(paths), "preparer")) == 2


def test_repeated_failures_are_notified_once_and_training_goes_on(
    paths: LinePaths, start: Start, tmp_path: Path
) -> None:
    sink = set_notify(tmp_path)
    running = start("works", "refuses,refuses,crashes,refuses,refuses,idle")
    running.wait_for_trainer()
    wait_until(lambda: len(starts(work_of(paths), "preparer")) == 6)
    assert running.process.poll() is None
    state = running.state()
    assert (state.preparer_failures, state.launches) == (5, 1)
    assert state.preparer_failure
    running.process.terminate()
    assert running.wait()[0] == ExitCode.STOPPED
    told = notices(sink)
    assert [notice["event"] for notice in told] == ["preparer_failing"]
    assert "(3 in a row): it was killed by SIGKILL" in told[0]["text"]
    assert "about to crash" in told[0]["text"]


def test_only_a_prepared_cycle_ends_a_row_of_failures(paths: LinePaths) -> None:
    """Not the time that it ran: here each preparer dies a day after it was started, and hours before the next one."""
    work, now, heard, pipe = work_of(paths), [1e6], Heard(), DeathPipe()
    command = preparer_command("crashes")
    keeper = PreparerKeeper(paths, load_run(paths.run_json), command, pipe, QUICK, heard, lambda: now[0])

    def fail() -> None:
        keeper.watch(hungry=False, wanted=True)
        assert keeper.running()
        now[0] += 86_400.0
        wait_until(lambda: (keeper.watch(hungry=False, wanted=False), not keeper.running())[1])
        keeper.watch(hungry=False, wanted=True)
        assert not keeper.running(), "started again before its wait was over"
        now[0] += 7200.0

    rows = []
    for cycles in (0, 0, 0, 0, 1, 1, 1, 3):
        state = json.loads((work / "state.json").read_text())
        (work / "state.json").write_text(json.dumps(state | {"prepared_cycles": cycles}))
        if cycles:
            keeper.watch(hungry=False, wanted=False)
            assert heard.fields["preparer_failures"] == (0 if cycles != rows[-1][0] else rows[-1][1])
        fail()
        rows.append((cycles, heard.fields["preparer_failures"]))
    assert rows == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (3, 1)]
    assert heard.events == ["preparer_failing"] * 2, "once a row"
    pipe.close()


def test_a_trainer_that_waits_goes_on_waiting_and_is_notified_once(
    paths: LinePaths, start: Start, tmp_path: Path
) -> None:
    sink = set_notify(tmp_path)
    set_guards(paths, watchdog_s=0.5)
    running = start("hungry", "idle")
    running.wait_for_trainer()
    wait_until(lambda: notices(sink))
    time.sleep(1.0)
    assert status(paths.root).state == "waiting"
    running.process.terminate()
    running.wait()
    assert [notice["event"] for notice in notices(sink)] == ["waiting_data"]
    assert "cycle 7" in notices(sink)[0]["text"]


@pytest.mark.parametrize(
    ("trainer", "fault", "events"),
    [("works", "full", ["disk_full"]), ("hungry", "no room", ["disk_full", "waiting_data"])],
)
def test_a_preparer_that_waits_for_the_disk_is_notified_once(
    trainer: str, fault: str, events: list[str], paths: LinePaths, start: Start, tmp_path: Path
) -> None:
    """The real one, which tries again and again, also getting into the cycle each time: that is one wait, and life."""
    sink = set_notify(tmp_path)
    set_guards(paths, watchdog_s=1.5)
    full = tmp_path / "full"
    full.touch()
    running = start(trainer, f"{fault} while {full}")
    running.wait_for_trainer()
    seen: list[PreparerStatus] = []

    def look() -> bool:
        now = read_status(work_of(paths))
        if now is not None and seen[-1:] != [now]:
            seen.append(now)
        return now is not None and now.disk_full_tries >= 8

    wait_until(look)
    assert sorted(notice["event"] for notice in notices(sink)) == events
    assert all("no room" in notice["text"] for notice in notices(sink) if notice["event"] == "disk_full")
    assert ("preparing" in {status.stage for status in seen[-8:]}) == (fault == "full")
    assert len({status.pid for status in seen}) == 1, "it was taken for silent and killed"
    waits = [status for status in seen if status.stage == "waiting_disk"]
    assert len({status.since for status in waits}) == 1, "it cannot be told how long it has waited"
    full.unlink()
    wait_until(lambda: now_of(paths).stage == "waiting_consumer")
    assert now_of(paths).disk_full_since is None
    running.process.terminate()
    assert running.wait()[0] == ExitCode.STOPPED, "the wait for the disk ended the line"
    assert len(notices(sink)) == len(events)


def now_of(paths: LinePaths) -> PreparerStatus:
    """What the preparer says."""
    found = read_status(work_of(paths))
    assert found is not None
    return found


def test_a_silent_preparer_is_killed_while_the_trainer_waits(paths: LinePaths, start: Start) -> None:
    set_guards(paths, watchdog_s=0.5)
    running = start("hungry", "quiet,idle")
    running.wait_for_trainer()
    wait_until(lambda: len(starts(work_of(paths), "preparer")) == 2)
    running.process.terminate()
    code, output = running.wait()
    assert code == ExitCode.STOPPED
    assert "the preparer has done nothing for" in output


def test_a_source_that_is_used_up_ends_a_trainer_that_waits(paths: LinePaths) -> None:
    ending, events = supervise(paths, "hungry", "exhausted")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.NEEDS_OPERATOR)
    assert ending.reason == f"the preparer of {work_of(paths)}: source prose: ran out"
    assert (paths.root / "saved").exists(), "the trainer was ended without a checkpoint"
    assert sum("ran out" in event for event in events) == 2, "told once when it failed and once at the end"
    assert len(starts(work_of(paths), "preparer")) == 1, "a source that is used up stays so"


def test_a_source_that_is_used_up_does_not_end_a_trainer_that_has_data(paths: LinePaths, start: Start) -> None:
    running = start("works", "exhausted")
    running.wait_for_trainer()
    wait_until(lambda: running.state().reason is not None)
    time.sleep(0.6)
    assert running.process.poll() is None
    look = status(paths.root)
    assert look.state == "running"
    assert "ran out" in (look.reason or "")
    running.process.terminate()
    assert running.wait()[0] == ExitCode.STOPPED


def test_a_preparer_that_ended_for_a_person_is_started_again_once_line_json_is_changed(paths: LinePaths) -> None:
    """As `nstrain data exclude` and `extend` change it; and it is told while there is time."""
    work, heard, pipe = work_of(paths), Heard(), DeathPipe()
    pace = dataclasses.replace(QUICK, preparer_retry_s=0.0)
    command = preparer_command("exhausted,exhausted,idle")
    keeper = PreparerKeeper(paths, load_run(paths.run_json), command, pipe, pace, heard)

    def look(hungry: bool = False) -> bool:
        keeper.watch(hungry, wanted=True)
        return keeper.running()

    for times in (1, 2):
        wait_until(lambda: (look(), keeper.failure is not None)[1])
        assert heard.events == ["preparer_failing"] * times
        assert "ran out" in str(heard.fields["reason"])
        assert not any(look() for _ in range(5))
        atomic_write(work / "line.json", (work / "line.json").read_bytes())
        assert not look(hungry=True), "the supervisor has asked the trainer to stop by then"
        assert look()
        assert heard.fields["reason"] is None
    wait_until(lambda: len(starts(work, "preparer")) == 3)
    assert keeper.failure is None
    keeper.end()
    pipe.close()


def test_finished_preparer_is_started_once_more_for_a_trainer_that_waits(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "hungry", "done")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert "it is done, but the trainer still waits" in (ending.reason or "")
    assert len(starts(work_of(paths), "preparer")) == 2

    # The trainer has time to see what it has done.
    now, pipe, pace = [1e6], DeathPipe(), dataclasses.replace(QUICK, fed_s=60.0)
    settings = load_run(paths.run_json)
    keeper = PreparerKeeper(paths, settings, preparer_command("done"), pipe, pace, Heard(), lambda: now[0])

    def look() -> bool:
        keeper.watch(hungry=True, wanted=True)
        return keeper.running()

    assert look()
    wait_until(lambda: not look())
    now[0] += 59.0
    assert not look()
    assert keeper.failure is None
    now[0] += 2.0
    assert not look()
    assert keeper.failure is not None
    pipe.close()


def test_another_process_prepares(paths: LinePaths) -> None:
    lock = FileLock(work_of(paths) / "preparer.lock").acquire("the test's lock")
    ending, events = supervise(paths, "done")
    assert ending.outcome == "done"
    assert any(f"process {os.getpid()} already" in event for event in events)
    assert starts(work_of(paths), "preparer") == []
    lock.release()

    # One that comes between our look at the lock and the start of ours is no failure of ours.
    heard, pipe = Heard(), DeathPipe()
    keeper = PreparerKeeper(paths, load_run(paths.run_json), preparer_command("crashes"), pipe, QUICK, heard)
    keeper.watch(hungry=False, wanted=True)
    assert keeper.running()
    lock.acquire("the test's lock")
    wait_until(lambda: (keeper.watch(hungry=False, wanted=False), not keeper.running())[1])
    assert "preparer_failures" not in heard.fields
    lock.release()
    pipe.close()


def test_preparer_that_does_not_end_is_killed(paths: LinePaths) -> None:
    ending, _ = supervise(paths, "done", "stubborn", preparer_grace_s=0.3)
    assert ending.outcome == "done"
    assert not FileLock(work_of(paths) / "preparer.lock").held_elsewhere()


def test_consumed_cycles_are_deleted_while_no_preparer_runs(paths: LinePaths) -> None:
    _consume_two_cycles(paths)
    _, events = supervise(paths, "done", "done")
    assert cycles_on_disk(DataLine.open(work_of(paths))) == [3]
    assert any("deleted consumed cycles 1, 2" in event for event in events)


def test_consumed_cycles_are_deleted_at_the_end(paths: LinePaths) -> None:
    """Also if a preparer ran that never deletes any."""
    _consume_two_cycles(paths)
    supervise(paths, "done", "idle")
    assert cycles_on_disk(DataLine.open(work_of(paths))) == [3]


def _consume_two_cycles(paths: LinePaths) -> None:
    line = DataLine.open(work_of(paths))
    run_preparer(line.work, until_cycle=3, workers=0)
    entry = consumer_path(line.work, "small")
    entry.write_text(entry.read_text().replace('"cycle": 1', '"cycle": 3'))


def test_missing_consumer_is_entered_before_the_preparer_starts(paths: LinePaths) -> None:
    entry = consumer_path(work_of(paths), "small")
    content = entry.read_bytes()
    entry.unlink()
    _, events = supervise(paths, "done")
    assert entry.read_bytes() == content
    assert any("missing entry" in event for event in events)
