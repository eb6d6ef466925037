"""A disk that fills up at each stage of a line: it ends for a person, nothing recorded is lost, and it goes on to the
same bits once there is room."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_line import (
    ROOT,
    change_run,
    journal_summary,
    last_update,
    log_of,
    make_data_line,
    make_run,
    prepare,
    run,
    run_here,
    tensors_of,
    wait_until,
)
from small_disk import fill, small_disk

from nstrain.base.errors import DiskFull, ExitCode
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.preparer import read_status
from nstrain.line import checkpoint
from nstrain.line.checkpoint import newest_good
from nstrain.line.listing import list_checkpoints
from nstrain.line.paths import LinePaths
from nstrain.line.room import room_for_checkpoints
from nstrain.record.journal import Journal
from nstrain.train import saving
from nstrain.train.loop import Trainer

LAST_UPDATE = 13


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 1)
    prepare(line.work, 1)
    return line


@pytest.fixture(scope="module")
def through(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    paths = make_run(tmp_path_factory.mktemp("through") / "run", data)
    assert run_here(paths) == ExitCode.DONE
    return paths


@pytest.fixture
def line(data: DataLine, tmp_path: Path) -> Iterator[LinePaths]:
    """A line on a disk of 40 MiB; its data line lies elsewhere."""
    with small_disk(tmp_path / "disk", 40) as disk:
        yield make_run(disk / "run", data)


def assert_goes_on_to_the_same_bits(line: LinePaths, through: LinePaths) -> None:
    assert run_here(line) == ExitCode.DONE
    assert journal_summary(line) == journal_summary(through)
    assert journal_summary(line)[1] == 0
    assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)


def when_done(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, update: int, then: Any) -> None:
    """Call `then` before the trainer's method `name`, once, when an update is done."""
    method = getattr(owner, name)
    done: list[bool] = []

    def watched(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.state.position.update == update and not done:
            done.append(True)
            then()
        return method(trainer, *arguments)

    monkeypatch.setattr(owner, name, watched)


def test_somebody_takes_the_room_and_the_line_saves_while_it_can(
    line: LinePaths, through: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one more checkpoint, but not for the journal up to the one after it."""
    change_run(line, checkpoints={"every_updates": 100, "every_minutes": None})  # none is being written at u6
    disk = line.root.parent
    with monkeypatch.context() as patch:
        when_done(patch, Trainer, "beat", 6, lambda: fill(disk, leave_bytes=8 << 20))
        with pytest.raises(DiskFull, match="the line is saved at u6 and stops") as caught:
            run_here(line)
    assert str(line.root) in str(caught.value)
    assert "MiB are free" in str(caught.value)
    assert last_update(line) == 6
    assert newest_good(line) == line.checkpoint(6)
    with pytest.raises(DiskFull, match="the line is saved at u6 and stops"):
        run_here(line)
    assert last_update(line) == 6, "started on the same disk it trains nothing"
    (disk / "filler").unlink()
    assert_goes_on_to_the_same_bits(line, through)


def test_a_data_lines_own_disk_may_be_full_for_a_while(
    data: DataLine, through: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the consumer's entry is written there, which may be late: found full at u3, with room again at u10."""
    monkeypatch.setattr(saving, "ENTRY_RETRY_S", 0.0)
    with small_disk(tmp_path / "disk", 4) as disk:
        shutil.copytree(data.work, disk / "data")
        line = make_run(tmp_path / "run", DataLine.open(disk / "data"))
        entries: list[int] = []

        def room() -> None:
            entries.append(read_consumers(disk / "data")[-1].row)
            (disk / "filler").unlink()

        with monkeypatch.context() as patch:
            when_done(patch, Trainer, "_note", 3, lambda: fill(disk, leave_bytes=0))
            when_done(patch, Trainer, "_note", 10, room)
            assert run_here(line, stop_after=11) == ExitCode.STOPPED
        assert entries == [0], "checkpoints at 4 and 8 were committed, the entry stood"
        assert read_consumers(disk / "data")[-1].row == 55
        fill(disk, leave_bytes=0)
        for _ in range(2):  # a line at its end has nothing else to do, and an entry that holds cycles
            with pytest.raises(DiskFull, match="trained to its end, .* run it once more"):
                run_here(line)
        assert read_consumers(disk / "data")[-1].cycle == 1
        (disk / "filler").unlink()
        assert_goes_on_to_the_same_bits(line, through)
        assert read_consumers(disk / "data")[-1].cycle == 2


@pytest.mark.parametrize(
    ("method", "recorded"),
    [
        ("_note", 5),  # then the row is committed
        ("beat", 6),  # then the heartbeat is written
    ],
)
def test_all_room_vanishes_at_once(
    line: LinePaths, through: LinePaths, monkeypatch: pytest.MonkeyPatch, method: str, recorded: int
) -> None:
    """At the journal and at the heartbeat: the updates since the last checkpoint are trained again."""
    disk = line.root.parent
    with monkeypatch.context() as patch:
        when_done(patch, Trainer, method, 6, lambda: fill(disk, leave_bytes=0))
        # Less than this is taken for a full disk before anything fails, as the test above shows.
        patch.setattr(saving, "ROOM_BESIDE_BYTES", 0)
        with pytest.raises(DiskFull, match=str(disk)):
            run_here(line)
    assert last_update(line) in (recorded, 6)
    assert newest_good(line) == line.checkpoint(4)
    (disk / "filler").unlink()
    assert_goes_on_to_the_same_bits(line, through)


def test_the_room_goes_while_a_checkpoint_is_written(
    line: LinePaths, through: LinePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the thread that writes: what was there stays, what was half written is gone, and the process ends.

    The next row may find the disk full first; the writer's error is then said as the trainer closes.
    """
    disk = line.root.parent
    refuse = checkpoint._refuse_too_little_space

    def fill_after(target: Path, needed_bytes: int) -> None:
        refuse(target, needed_bytes)
        if target.name == "u00000008":
            fill(disk, leave_bytes=60_000)  # less than one of its files

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_refuse_too_little_space", fill_after)
        patch.setattr(saving.Saver, "stop_on_full_disk", lambda self, state: None)
        with pytest.raises(DiskFull, match="No space left on device") as caught:
            run_here(line)
    told = f"{caught.value}\n{capsys.readouterr().out}"
    assert re.search(r"u00000008: cannot be written .* This checkpoint needs [\d,]+ bytes", told)
    assert newest_good(line) == line.checkpoint(4)
    assert sorted(path.name for path in line.checkpoints.iterdir()) == ["latest", "u00000000", "u00000004"]
    (disk / "filler").unlink()
    assert_goes_on_to_the_same_bits(line, through)


def test_a_line_that_is_done_needs_no_room(line: LinePaths, through: LinePaths) -> None:
    assert_goes_on_to_the_same_bits(line, through)
    fill(line.root.parent, leave_bytes=1 << 20)
    assert run_here(line) == ExitCode.DONE


def test_a_new_line_without_room_does_not_begin(line: LinePaths) -> None:
    fill(line.root.parent, leave_bytes=10 << 20)
    with pytest.raises(DiskFull, match="the next checkpoint needs"):
        run_here(line)
    assert last_update(line) is None
    assert not line.checkpoints.exists()


def test_the_process_says_so_and_its_exit_code_is_the_operators(line: LinePaths) -> None:
    fill(line.root.parent, leave_bytes=10 << 20)
    assert run(line) == ExitCode.NEEDS_OPERATOR
    assert f"disk_full: {line.root}: the next checkpoint needs" in log_of(line)
    assert "MiB on that file system" in log_of(line)


def test_a_journal_on_a_full_disk_can_still_be_read(line: LinePaths) -> None:
    assert run_here(line, stop_after=5) == ExitCode.STOPPED
    fill(line.root.parent, leave_bytes=0)
    with Journal.open_for_reading(line.journal) as journal:
        assert journal.last_update() == 5


def test_the_preparer_leaves_room_for_the_checkpoints_of_a_line_on_its_disk(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It waits from the middle of the first cycle on, and the line writes all its checkpoints up to the cycle's end."""
    data = make_data_line(tmp_path / "there", 2)
    prepare(data.work, 1)
    with small_disk(tmp_path / "disk", 56) as disk:
        work = Path(shutil.copytree(data.work, disk / "data"))
        checkpoints = {"every_updates": 2, "every_minutes": None, "keep_last": 4}
        line = make_run(disk / "run", DataLine.open(work), checkpoints=checkpoints)
        assert run_here(line, stop_after=4) == ExitCode.STOPPED
        needed = room_for_checkpoints(line.root, 2)
        assert needed is not None
        filler = fill(disk, leave_bytes=needed.soon_bytes - (64 << 10))
        program = "import sys, nstrain.data.preparer as p; p.DISK_RETRY_S = 0.1; sys.exit(p.main())"
        command = [sys.executable, "-c", program, str(work), "--until", "2", "--workers", "0"]
        preparer = subprocess.Popen(command, cwd=ROOT)
        request.addfinalizer(preparer.kill)

        def waits() -> bool:
            status = read_status(work)
            return status is not None and (status.stage, status.cycle) == ("waiting_disk", 2)

        wait_until(waits)
        assert run_here(line, stop_after=LAST_UPDATE) == ExitCode.STOPPED
        assert [item.update for item in list_checkpoints(line)] == [0, 6, 8, 10, 12, LAST_UPDATE]
        assert waits()
        filler.unlink()
        assert preparer.wait(60) == ExitCode.DONE
        assert run_here(line) == ExitCode.DONE
        prepare(data.work, 2)
        elsewhere = make_run(tmp_path / "elsewhere" / "run", data, checkpoints=checkpoints)
        assert run_here(elsewhere) == ExitCode.DONE
        assert journal_summary(line) == journal_summary(elsewhere)
        last = last_update(line)
        assert last is not None
        assert tensors_of(line, last) == tensors_of(elsewhere, last)
