"""`status`: every state, from the files that processes leave, and the page that people read."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sized_checkpoints import put_sized
from small_disk import small_disk
from small_lines import CYCLE_TOKENS, CYCLES, ROW_TOKENS, UPDATE_TOKENS

from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import Refusal
from nstrain.base.process import ProcessId, identify, this_process
from nstrain.data.preparer import PreparerStatus, run_preparer
from nstrain.line.branches import add_branch, new_branch
from nstrain.line.paths import LinePaths
from nstrain.line.room import ROOM_BESIDE_BYTES
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    read_stop,
    request_stop,
    write_heartbeat,
    write_supervisor,
)
from nstrain.ops.lines import find_lines, lines_root
from nstrain.ops.status import Status, status
from nstrain.ops.status_page import render, watch_page
from nstrain.ops.stop import stop_line
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, load_run

TOTAL_TOKENS = CYCLES * CYCLE_TOKENS

ISSUE_FIELDS = (
    "state", "update", "tokens", "tokens_total", "loss", "tokens_per_s", "cycle", "checkpoint", "eta_s", "waiting_for",
)  # fmt: skip


def work_of(paths: LinePaths) -> Path:
    """The line's data line."""
    return Path(load_run(paths.run_json).data.work)


def page(look: Status) -> str:
    """The page as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(render(look))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(paths: LinePaths, updates: int, loss: float = 2.5) -> None:
    """Rows up to an update, every eighth with a validation."""
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        first = journal.last_update()
        for update in range(0 if first is None else first + 1, updates + 1):
            row = {"tokens": update * UPDATE_TOKENS, "cycle": 1 + update // 9, "row_tokens": ROW_TOKENS, "rows": 8}
            if update:
                row |= {"train/loss": loss, "train/learning_rate": 1e-3, "perf/tokens_per_s": 1000.0}
            if update % 8 == 0:
                row |= {f"val_{ROW_TOKENS}/mix": 3.0 + update, f"val_{ROW_TOKENS}/prose": 2.0 + update}
            journal.commit(update, row)


def supervise(paths: LinePaths, **fields: Any) -> None:
    """supervisor.json of this process."""
    write_supervisor(paths, SupervisorState(this_process(), time.time(), **fields))


def beat(paths: LinePaths, pid: int, **fields: Any) -> None:
    """A trainer's heartbeat of now."""
    values: dict[str, Any] = {"stage": "training", "update": 5, "tokens": 5 * UPDATE_TOKENS, **fields}
    write_heartbeat(paths, Heartbeat(time=time.time(), pid=pid, **values))


def save(paths: LinePaths, update: int) -> None:
    """A checkpoint as far as status looks into one."""
    paths.checkpoint(update).mkdir(parents=True)
    (paths.checkpoint(update) / "weights.safetensors").write_bytes(b"x" * 1000)
    state = {"update": update, "tokens": update * UPDATE_TOKENS}
    atomic_write_json(paths.checkpoint(update) / "state.json", state)
    paths.latest.write_text(paths.checkpoint(update).name + "\n")


@pytest.fixture
def dead_process() -> ProcessId:
    """A process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    identity = identify(process.pid)
    process.kill()
    process.wait()
    assert identity is not None
    return identity


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process that runs."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


# ---- states ----------------------------------------------------------------------------------------------------------


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
    assert look.validation == {"val_64/mix": 11.0, "val_64/prose": 10.0}
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


# ---- what else it says -----------------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_is_null(paths: LinePaths) -> None:
    record(paths, 3, loss=float("nan"))
    value = status(paths.root).to_json()
    assert value["loss"] is None
    assert json.loads(json.dumps(value, allow_nan=False)) == json.loads(json.dumps(value))


def test_json_begins_with_the_fields_that_scripts_use(paths: LinePaths) -> None:
    assert tuple(status(paths.root).to_json())[: len(ISSUE_FIELDS)] == ISSUE_FIELDS


def test_differences_are_shown(paths: LinePaths) -> None:
    record(paths, 10)
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        assert journal.commit(10, {"tokens": 1}) == "different"
    look = status(paths.root)
    assert look.differences == 1
    assert "1 replayed updates differed" in page(look)


def test_disk_use_and_ready_cycles(paths: LinePaths) -> None:
    run_preparer(work_of(paths), until_cycle=2, workers=0)
    save(paths, 4)
    look = status(paths.root)
    assert look.cycles_ready == (1, 2)
    cycles = work_of(paths) / "cycles"
    assert look.disk.cycles_bytes == sum(file.stat().st_size for file in cycles.rglob("*") if file.is_file())
    assert 1000 < look.disk.kept_bytes < 1100
    assert look.disk.rolling_bytes == look.disk.set_aside_bytes == 0
    assert look.ahead_tokens == 2 * CYCLE_TOKENS
    assert look.disk.free_bytes > 0


def test_the_room_that_the_preparer_leaves_is_shown(paths: LinePaths) -> None:
    look = status(paths.root)
    assert (look.disk.reserved_bytes, "preparer leaves" in page(look)) == (0, False), "it has no checkpoint yet"
    put_sized(paths, 0, 1 << 20, kept=True)
    look = status(paths.root)
    assert look.disk.reserved_bytes == (4 << 20) + 2 * ROOM_BESIDE_BYTES, "two rolling ones, a cycle's end, one more"
    assert "36.0 MiB of it the preparer leaves for checkpoints" in " ".join(page(look).split())
    put_sized(paths, 24, 1 << 20, cycle=CYCLES + 1, kept=True)
    assert status(paths.root).disk.reserved_bytes == 0, "it is done"


def test_a_data_line_on_another_disk_leaves_no_room(paths: LinePaths, tmp_path: Path) -> None:
    put_sized(paths, 0, 1 << 20, kept=True)
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copy(work_of(paths) / "line.json", disk)
        value = json.loads(paths.run_json.read_text())
        value["data"]["work"] = str(disk)
        paths.run_json.write_text(json.dumps(value))
        look = status(paths.root)
    assert (look.tokens_total, look.disk.reserved_bytes) == (TOTAL_TOKENS, 0)


def test_the_disk_by_kind_has_all_that_a_line_and_its_data_line_hold(paths: LinePaths) -> None:
    """The two that can be tens of GB among them: opened files, and those that are fetched."""
    for place, size in (
        (paths.tune / "trials.log", 3 << 10), (work_of(paths) / "cycles" / "000001" / "prose.bin", 5 << 10),
        (work_of(paths) / "open" / "prose" / "00000-0000000-ab.tokens", 7 << 10),
        (work_of(paths) / "downloads" / "prose" / "data" / "part" / "1.parquet", 9 << 10),
    ):  # fmt: skip
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(size))
    disk = status(paths.root).disk
    assert (disk.tune_bytes, disk.cycles_bytes, disk.opened_bytes) == (3 << 10, 5 << 10, 7 << 10)
    assert disk.downloads_bytes == 9 << 10
    text = " ".join(page(status(paths.root)).split())
    assert "tune 3.0 KiB, data cycles 5.0 KiB, opened files 7.0 KiB, fetched files 9.0 KiB" in text


def test_losses_have_a_course_and_a_trend(paths: LinePaths) -> None:
    record(paths, 100, loss=4.0)
    assert status(paths.root).loss_trend == 0.0
    record(paths, 200, loss=3.0)
    look = status(paths.root)
    assert look.loss_trend == -1.0
    assert (len(look.losses), look.losses[0], look.losses[-1]) == (40, 4.0, 3.0)
    assert "▁  -1.0000 in the last 100 updates" in page(look)


def test_alarms_of_the_last_validation_and_of_the_last_losses(paths: LinePaths) -> None:
    record(paths, 15)
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        journal.commit(16, {"tokens": 16 * UPDATE_TOKENS, "train/loss": 9.0, "train/loss_jump": 30.0})
        journal.commit(17, {"tokens": 17 * UPDATE_TOKENS, "val_64/mix": 1.0, "val_64/dendritic/firing": 0.001})
    look = status(paths.root)
    assert [alarm.split()[0] for alarm in look.alarms] == ["u16:", "val_64/dendritic/firing"]
    assert "jumped to 9.0000" in page(look)
    assert "nearly dead" in page(look)


def test_rolled_back_and_branched_lines_say_so(paths: LinePaths) -> None:
    record(paths, 10)
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        journal.begin_generation(5)
        journal.commit(5, {"tokens": 5 * UPDATE_TOKENS, "train/loss": 1.0})
    add_branch(paths, new_branch(paths.root / "b1", "b1", 1, 8, 4096, "decay:1e3"))
    look = status(paths.root)
    assert (look.generation, look.update, look.branches) == (2, 5, (str(paths.root / "b1"),))
    text = page(look)
    assert "rolled back once" in text
    assert "branches" in text


def make_new_branch(paths: LinePaths) -> None:
    """What `nstrain branch` leaves of a line: its parent's record up to the end of cycle 3, a checkpoint in cycle 1."""
    record(paths, 24)
    shutil.move(paths.journal, paths.root / "parent.db")
    with Journal.open_for_reading(paths.root / "parent.db") as parent:
        Journal.make_branch(paths.journal, parent, 24)
    save(paths, 24)
    place = paths.checkpoint(24) / "state.json"
    atomic_write_json(place, {**json.loads(place.read_text()), "position": {"cycle": 1, "row": 0}})


def test_a_new_branch_stands_in_its_own_first_cycle(paths: LinePaths) -> None:
    make_new_branch(paths)
    look = status(paths.root)
    assert (look.state, look.update, look.cycle, look.loss) == ("new", 24, 1, 2.5)
    assert look.reason == f"it has not been run yet; `nstrain run {paths.root}` goes on from update 24"
    assert f"cycle 1 of {CYCLES}" in page(look)


@pytest.mark.parametrize("stage", [None, "starting", "waiting_data"])
def test_a_branch_can_be_stopped_at_its_first_cycle_before_it_has_trained(paths: LinePaths, stage: str | None) -> None:
    """Its record's last row is of the parent's cycle 3: nothing of that is behind it in its own data line."""
    make_new_branch(paths)
    supervise(paths, trainer_pid=os.getpid())
    if stage is not None:
        cycle = 3 if stage == "starting" else None
        beat(paths, os.getpid(), stage=stage, update=24, tokens=24 * UPDATE_TOKENS, cycle=cycle, cycle_progress=cycle)
    look = status(paths.root)
    assert (look.cycle, look.cycle_progress) == (1, None)
    assert not stop_line(paths.root, 0, at_cycle_end=1).ended
    stop = read_stop(paths)
    assert stop is not None
    assert stop.at_cycle_end == 1


def test_a_line_that_starts_again_after_a_rollback_stands_at_its_checkpoint(paths: LinePaths) -> None:
    """The heartbeat of a start repeats the one before it, which was of the continuation that was given up."""
    record(paths, 20)
    save(paths, 3)
    place = paths.checkpoint(3) / "state.json"
    atomic_write_json(place, {**json.loads(place.read_text()), "position": {"cycle": 1, "row": 24}})
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        journal.begin_generation(4)
    supervise(paths, trainer_pid=os.getpid())
    beat(paths, os.getpid(), stage="starting", update=20, tokens=20 * UPDATE_TOKENS, cycle=3, cycle_progress=0.5)
    look = status(paths.root)
    assert (look.update, look.cycle, look.cycle_progress) == (3, 1, None)


def test_a_done_line_that_was_rolled_back_says_that(paths: LinePaths, dead_process: ProcessId) -> None:
    record(paths, 24)
    save(paths, 8)
    write_supervisor(paths, SupervisorState(dead_process, time.time(), 1, outcome="done"))
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        journal.begin_generation(9)
    look = status(paths.root)
    assert (look.state, look.update) == ("stopped", 8)
    assert look.reason == f"it was rolled back since it was done; `nstrain run {paths.root}` goes on from update 8"


def test_a_branchs_schedule_counts_on_from_its_fork(paths: LinePaths) -> None:
    line = json.loads((work_of(paths) / "line.json").read_text())
    line["fork"] = {"line": "x", "cycle": 1, "manifest_sha256": "0", "tokens": 5000}
    atomic_write_json(work_of(paths) / "line.json", line)
    ready = work_of(paths) / "cycles" / "000002"
    ready.mkdir(parents=True)
    (ready / "READY").write_text("")
    look = status(paths.root)
    assert look.tokens_total == 5000 + TOTAL_TOKENS
    assert look.ahead_tokens == CYCLE_TOKENS


def test_a_stop_at_a_cycles_end_is_shown(paths: LinePaths) -> None:
    supervise(paths, trainer_pid=os.getpid())
    beat(paths, os.getpid(), stage="training", update=3, tokens=3 * UPDATE_TOKENS, cycle=2, cycle_progress=0.5)
    for cycle, message in ((4, "schedule has cycles 1 ... 3"), (1, "past the end of cycle 1: it stands in cycle 2")):
        with pytest.raises(Refusal, match=message):
            stop_line(paths.root, 0.0, at_cycle_end=cycle)
    assert status(paths.root).stop_at_cycle_end is None
    assert not stop_line(paths.root, 0.0, at_cycle_end=2).ended
    look = status(paths.root)
    assert (look.stop_at_cycle_end, look.stopping) == (2, False)
    assert "to stop at the end of cycle 2" in page(look)
    stop_line(paths.root, 0.0)
    assert status(paths.root).stopping


def test_lines_below_a_directory(paths: LinePaths, tmp_path: Path) -> None:
    record(paths, 10)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "run.json").write_text("{}")
    found = find_lines(tmp_path)
    assert [line.shown for line in found] == ["deep/er", "run"]
    damaged, whole = found
    assert damaged.status is None
    assert "run.json" in (damaged.error or "")
    assert damaged.row()[2] == "damaged"
    assert whole.row()[:5] == ("run", "tiny-32k", "stopped", "10", "5,120 of 12.3K")
    assert json.loads(json.dumps([line.to_json() for line in found]))[1]["update"] == 10
    with pytest.raises(Refusal, match="no such directory"):
        find_lines(tmp_path / "nowhere")


def test_lines_below_the_hosts_work_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSTRAIN_HOST", str(tmp_path / "host.json"))
    (tmp_path / "host.json").write_text("{}")
    with pytest.raises(Refusal, match=r"name a directory to look into, or set work_root in .*host\.json"):
        lines_root(None)
    (tmp_path / "host.json").write_text(json.dumps({"work_root": str(tmp_path)}))
    assert lines_root(None) == tmp_path
    assert lines_root(str(tmp_path / "x")) == tmp_path / "x"


def test_not_a_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not a training line"):
        status(tmp_path)


def test_damaged_files_are_named(paths: LinePaths) -> None:
    paths.supervisor_json.write_text("{}")
    with pytest.raises(Refusal, match=r"supervisor\.json"):
        status(paths.root)
    paths.supervisor_json.unlink()
    paths.run_json.write_text("{}")
    with pytest.raises(Refusal, match=r"run\.json.*nstrain check"):
        status(paths.root)


def test_data_line_that_is_away(paths: LinePaths, tmp_path: Path) -> None:
    work_of(paths).rename(tmp_path / "elsewhere")
    look = status(paths.root)
    assert (look.state, look.tokens_total, look.cycles_ready) == ("new", None, ())


# ---- the page --------------------------------------------------------------------------------------------------------


def test_page(paths: LinePaths) -> None:
    record(paths, 10)
    save(paths, 4)
    supervise(paths, trainer_pid=os.getpid())
    beat(
        paths, os.getpid(), stage="waiting_data", update=12, tokens=12 * UPDATE_TOKENS, loss=2.25, tokens_per_s=12345.0,
        learning_rate=5e-4, cycle=2, cycle_progress=0.375, eta_s=125.0, waiting_for="cycle [3]",
        waiting_since=time.time() - 90,
    )  # fmt: skip
    text = page(status(paths.root))
    for part in (
        str(paths.root), "tiny-32k", "waiting", "50.0 %", "2m05s left", "cycle [3], for 1m30s", "2.2500", "0.0005",
        "12.3K tokens/s", "cycle 2 of 3 (38 % trained)", "mix 11.0000", "prose 10.0000", "u8", "u00000004",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"
    assert text.index("mix") < text.index("prose")


def test_page_of_a_failure_tells_why(paths: LinePaths, dead_process: ProcessId) -> None:
    state = SupervisorState(dead_process, time.time(), 1, outcome="failed", reason="[Errno 12] no memory")
    write_supervisor(paths, state)
    text = page(status(paths.root))
    assert "failed" in text
    assert "[Errno 12] no memory" in text


def test_a_page_is_watched_until_the_reader_has_seen_enough(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    record(paths, 3)
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(console.file.getvalue())  # type: ignore[attr-defined]
        if len(seen) == 2:
            raise KeyboardInterrupt
        record(paths, 4)

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr("nstrain.ops.status_page.time.sleep", sleep)
    watch_page(paths.root, console)
    assert "2,048 of 12.3K" not in seen[0]
    assert "2,048 of 12.3K" in seen[1]


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_status_is_quick(paths: LinePaths) -> None:
    record(paths, 200)
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from pathlib import Path; from nstrain.ops.status import status; status(Path(sys.argv[1]))\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'pydantic', 'tokenizers'} & set(sys.modules)\n"
        "print(time.perf_counter() - began, *heavy)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code, str(paths.root)], capture_output=True, text=True).stdout.split()
        for _ in range(3)
    ]
    assert all(len(run) == 1 for run in runs), f"heavy modules are imported: {runs}"
    assert min(float(run[0]) for run in runs) < 0.3
