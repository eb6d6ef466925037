"""`status`: what it says beside the state - place, losses, disk, forks - and the page that people read."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from looked_at_lines import beat, page, record, save, supervise, work_of
from rich.console import Console
from sized_checkpoints import put_sized
from small_disk import small_disk
from small_lines import CYCLE_TOKENS, CYCLES, UPDATE_TOKENS

from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import Refusal
from nstrain.base.process import ProcessId
from nstrain.data.preparer import run_preparer
from nstrain.line.branches import add_branch, new_branch
from nstrain.line.paths import LinePaths
from nstrain.line.room import ROOM_BESIDE_BYTES
from nstrain.line.state_files import (
    SupervisorState,
    read_stop,
    write_supervisor,
)
from nstrain.ops.lines import find_lines, lines_root
from nstrain.ops.status import status
from nstrain.ops.status_page import watch_page
from nstrain.ops.stop import stop_line
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION

TOTAL_TOKENS = CYCLES * CYCLE_TOKENS

ISSUE_FIELDS = (
    "state", "update", "tokens", "tokens_total", "loss", "tokens_per_s", "cycle", "checkpoint", "eta_s", "waiting_for",
)  # fmt: skip


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
    record(paths, 49, loss=5.0)
    assert (status(paths.root).loss_trend, status(paths.root).trend_updates) == (None, 0)
    record(paths, 98, loss=4.5)
    assert "-0.5000, the last 49 updates against the 49 before" in page(status(paths.root))
    record(paths, 150, loss=4.0)
    record(paths, 250, loss=3.5)
    record(paths, 300, loss=4.0)
    record(paths, 400, loss=3.0)
    look = status(paths.root)
    assert (look.loss_trend, look.trend_updates) == (-0.75, 100)
    assert (len(look.losses), look.losses[0], look.losses[-1]) == (40, 3.5, 3.0)
    assert "▁  -0.7500, the last 100 updates against the 100 before" in page(look)


def test_a_validation_is_compared_with_the_one_before_but_not_over_a_change_of_length(paths: LinePaths) -> None:
    """Where rows become as long as the model reads, their losses go on under the names of the long rows' losses."""
    record(paths, 16)
    look = status(paths.root)
    assert (look.validated_update, look.validated_before, look.validation_before["val_64/mix"]) == (16, 8, 11.0)
    assert "(mean +4.0000 since u8)" in page(look)  # whatever the mixture: that of now weights the mix
    record(paths, 23)
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        journal.commit(24, {"tokens": 24 * UPDATE_TOKENS, "row_tokens": 128, "val_64/mean": 20.0, "val_128/mean": 1.0})
    look = status(paths.root)
    assert (look.validated_update, look.validated_before, look.validation_before) == (24, None, {})
    assert "since u" not in page(look)


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
    assert "went back once" in text
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
