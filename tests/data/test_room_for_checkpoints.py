"""The preparer leaves room for the next checkpoints of lines on its disk: it waits, or gives a half-made cycle up."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from data_helpers import make_line, prepare, prepared, prose_tree, source, start_preparer, write_tree
from sized_checkpoints import make_sized_line, put_sized
from small_disk import fill, small_disk
from typer.testing import CliRunner

from nstrain.base.errors import DiskFull, ExitCode
from nstrain.base.units import human_bytes
from nstrain.cli.data import app
from nstrain.data import preparer as preparer_module
from nstrain.data import room as room_module
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.data.plan import plan_line
from nstrain.data.preparer import PreparerStatus, read_status, run_preparer
from nstrain.data.room import CheckpointRoom, bytes_to_open, disk_room, room_of_lines
from nstrain.line.paths import LinePaths
from nstrain.line.retention import apply_retention
from nstrain.line.room import ROOM_BESIDE_BYTES, RoomNeeded, room_for_checkpoints

MIB = 1 << 20
CYCLES = 3
TIGHT = 64 << 10
"""So much is too little or enough: more than the disk's pages, less than a checkpoint."""


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    base = tmp_path_factory.mktemp("original")
    tree = write_tree(base / "web", prose_tree(1, {"a": 80, "b": 40}, words=40))
    return make_line(base / "line", tokenizer, [source("web", tree, held_out=0.05)], 1280, CYCLES)


@pytest.fixture(scope="module")
def straight(original: DataLine, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """The line prepared with all the room in the world."""
    work = tmp_path_factory.mktemp("straight") / "line"
    shutil.copytree(original.work, work)
    line = DataLine.open(work)
    prepare(line)
    return line


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64) as disk:
        yield disk


@pytest.fixture
def line(original: DataLine, disk: Path) -> DataLine:
    """The data line on that disk; nothing is prepared."""
    shutil.copytree(original.work, disk / "line")
    return DataLine.open(disk / "line")


def training(run: Path, line: DataLine) -> LinePaths:
    """A line that trains on it, and has its checkpoint of the start, of 1 MiB."""
    paths = make_sized_line(run, keep_last=2)
    put_sized(paths, 0, MIB, kept=True)
    write_consumer(line.work, run.name, 1, 0, 0, run)
    return paths


def needed_by(paths: LinePaths) -> RoomNeeded:
    needed = room_for_checkpoints(paths.root, CYCLES)
    assert needed is not None
    return needed


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the disk, and tells what it does, at every step."""
    for module, name in (
        (room_module, "LOOK_EVERY_S"), (room_module, "SURE_S"), (preparer_module, "SHOW_EVERY_S"),
        (preparer_module, "DISK_RETRY_S"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 0.0)


def test_it_waits_before_it_takes_the_room_of_a_checkpoint(
    line: DataLine, disk: Path, straight: DataLine, request: pytest.FixtureRequest
) -> None:
    paths = training(disk / "run", line)
    room = needed_by(paths).soon_bytes
    assert room == 4 * MIB + 2 * ROOM_BESIDE_BYTES, "two rolling checkpoints, the cycle's end, one more"
    filler = fill(disk, leave_bytes=room - TIGHT)
    child = start_preparer(line.work, "--until", str(CYCLES))
    request.addfinalizer(child.kill)

    def waits() -> PreparerStatus | None:
        status = read_status(line.work)
        return status if status is not None and status.stage == "waiting_disk" else None

    until(waits)
    first = waits()
    assert first is not None
    assert first.cycle == 1
    planned = plan_line(line)
    assert planned is not None
    takes = round(planned.cycle_bytes * (1 + 1 / 8)) + planned.opens_bytes + planned.tables_bytes
    assert planned.opens_bytes > planned.cycle_bytes, "whole files are opened for it"
    assert f"cycle 1 takes about {human_bytes(takes)}; that disk has" in str(first.error)
    assert f"leaves {human_bytes(room)} for the next checkpoints of {paths.root}. Free 7" in str(first.error)
    put_sized(paths, 4, MIB)  # what the room is for
    time.sleep(0.5)
    later = waits()
    assert later is not None
    assert later.since == first.since, "however often it looks, it is one wait"
    assert not any((line.work / "cycles").iterdir())
    filler.unlink()
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert prepared(line) == prepared(straight)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def prepare_and(line: DataLine, meanwhile: Callable[[], None], waiting: Callable[[], None]) -> list[str]:
    """Prepare here; `meanwhile` happens once in the middle of a cycle, `waiting` as it waits. What it waited for."""
    done: list[bool] = []
    waited: list[str] = []

    def show(status: PreparerStatus) -> None:
        if status.stage == "preparing" and status.progress > 0 and not done:
            done.append(True)
            meanwhile()
        if status.stage == "waiting_disk":
            waited.append(str(status.error))
            waiting()

    assert run_preparer(line.work, until_cycle=CYCLES, on_status=show, workers=0) == ExitCode.DONE
    assert done
    return waited


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("who", ["somebody", "the line"])
def test_it_gives_up_a_cycle_for_the_next_checkpoint(line: DataLine, disk: Path, straight: DataLine, who: str) -> None:
    """The room goes while it prepares: somebody takes it, or the line with more kept checkpoints than were to come."""
    paths = training(disk / "run", line)
    fillers = [fill(disk, leave_bytes=needed_by(paths).soon_bytes + MIB // 2)]

    def take() -> None:
        if who == "somebody":
            fill(disk, leave_bytes=needed_by(paths).next_bytes - TIGHT)
        else:
            for update in range(1, 21):
                put_sized(paths, update, MIB, cycle=2, kept=True)

    def given_up() -> None:
        assert not any((line.work / "cycles").iterdir()), "what it had written is free again"
        fillers[0].unlink(missing_ok=True)

    waited = prepare_and(line, take, given_up)
    assert len(waited) == 1
    assert "cycle 1 was given up half-made; that disk has" in waited[0]
    assert prepared(line) == prepared(straight)


@pytest.mark.usefixtures("at_once")
def test_the_checkpoints_of_a_whole_cycle_do_not_disturb_it(line: DataLine, disk: Path, straight: DataLine) -> None:
    paths = training(disk / "run", line)
    fill(disk, leave_bytes=needed_by(paths).soon_bytes + MIB // 2)

    def save() -> None:
        for update in (4, 8, 12, 16):
            put_sized(paths, update, MIB)
            apply_retention(paths, keep_last=2)
        put_sized(paths, 17, MIB, cycle=2, kept=True)
        put_sized(paths, 20, MIB, name="u00000020.partial")

    def disturbed() -> None:
        paths.checkpoint(17).rename(disk / "gone")  # so that this ends
        shutil.rmtree(disk / "gone")

    waited = prepare_and(line, save, disturbed)
    assert not any("given up" in error for error in waited)
    assert prepared(line) == prepared(straight)


def test_nothing_is_left_for_lines_elsewhere_done_or_gone(
    line: DataLine, disk: Path, tmp_path: Path, straight: DataLine
) -> None:
    training(tmp_path / "elsewhere", line)
    put_sized(training(disk / "done", line), 40, MIB, cycle=CYCLES + 1, kept=True)
    shutil.rmtree(training(disk / "gone", line).root)
    make_sized_line(disk / "new")
    write_consumer(line.work, "new", 1, 0, 0, disk / "new")
    assert room_of_lines(line) == {}
    fill(disk, leave_bytes=2 * MIB)
    assert run_preparer(line.work, until_cycle=CYCLES, workers=0) == ExitCode.DONE
    assert prepared(line) == prepared(straight)


def test_two_lines_have_room_both(line: DataLine, disk: Path) -> None:
    one, other = training(disk / "one", line), training(disk / "other", line)
    put_sized(other, 4, MIB)
    rooms = {str(one.root): 4 * MIB + 2 * ROOM_BESIDE_BYTES, str(other.root): 3 * MIB + 2 * ROOM_BESIDE_BYTES}
    assert disk_room(line).for_checkpoints == rooms
    needed = sum(room.next_bytes for room in room_of_lines(line).values())
    assert needed > 2 * MIB
    between_looks = round(line.cycle_bytes(1) / 64)
    assert CheckpointRoom(line)._short_bytes(1) == needed + between_looks - shutil.disk_usage(disk).free


def test_a_cycle_that_was_given_up_begins_again_with_more_room_only(
    line: DataLine, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one that takes more than is thought is not begun for ever."""
    needed = needed_by(training(disk / "run", line))
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(room_module, "SURE_S", 0.0)
    monkeypatch.setattr(room_module, "_opened_bytes", lambda line, cycle: {})
    tables_bytes = {1: 3 * line.cycle_bytes(1), 2: 0}
    monkeypatch.setattr(room_module, "cycle_tables_bytes", lambda line, cycle: tables_bytes[cycle])
    usage = shutil.disk_usage(disk)

    def free(size: float) -> None:
        monkeypatch.setattr(room_module.shutil, "disk_usage", lambda place: usage._replace(free=round(size)))

    keeper, cycle_bytes = CheckpointRoom(line), line.cycle_bytes(1)
    for times in range(4):
        enough = needed.soon_bytes + (1 + 1 / 8 + times / 4 + 1 / 64) * cycle_bytes + tables_bytes[1] + 2
        free(enough - 4)
        with pytest.raises(DiskFull, match="cycle 1 takes about"):
            keeper.refuse_to_begin(1)
        free(enough)
        keeper.refuse_to_begin(1)
        keeper.refuse_to_go_on(1)
        free(needed.next_bytes)
        with pytest.raises(DiskFull, match="cycle 1 was given up half-made"):
            keeper.refuse_to_go_on(1)
    free(needed.soon_bytes + 1.2 * cycle_bytes)
    keeper.refuse_to_begin(2)


def test_files_that_are_open_already_take_no_more_room(line: DataLine) -> None:
    """Left there by a cycle that was given up, or read ahead."""
    expected = bytes_to_open(line, 1)
    assert expected > line.cycle_bytes(1)
    (line.work / "open" / "web").mkdir(parents=True)
    (line.work / "open" / "web" / "some.tokens").write_bytes(bytes(expected // 2))
    assert bytes_to_open(line, 1) == expected - expected // 2
    (line.work / "open" / "web" / "more.tokens").write_bytes(bytes(expected))
    assert bytes_to_open(line, 1) == 0


def test_plan_and_status_tell(line: DataLine, disk: Path) -> None:
    def told(*command: str) -> str:
        return CliRunner().invoke(app, [*command, "--work", str(line.work)]).output

    assert "leaves" not in told("plan") + told("status")
    paths = training(disk / "run", line)
    left = f", the preparer leaves 36.0 MiB for the next checkpoints of {paths.root}"
    assert left in told("plan")
    assert "the preparer leaves" in told("status")
    assert json.loads(told("status", "--json"))["disk"]["for_checkpoints"] == {str(paths.root): 36 * MIB}
    assert "would wait" not in told("plan")
    fill(disk, leave_bytes=30 * MIB)
    assert f"the preparer would wait: {line.work}: cycle 1 takes about" in told("plan")
