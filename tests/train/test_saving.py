"""When a line saves, what a checkpoint holds while the line trains on, and what follows a commit."""

from __future__ import annotations

import collections
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows, run_settings

from nstrain.base.errors import DiskFull
from nstrain.base.units import human_bytes
from nstrain.data.consumers import read_consumers
from nstrain.line import background
from nstrain.line.checkpoint import Checkpoint, load_checkpoint, newest_good, read_latest
from nstrain.line.paths import LinePaths
from nstrain.line.retention import set_aside_later
from nstrain.line.room import ROOM_BESIDE_BYTES
from nstrain.line.tensor_file import LazyTensors, NotFinite
from nstrain.settings.run import CheckpointSettings, LengthSettings
from nstrain.train import host_copy
from nstrain.train.checkpointing import CycleOrder, LineState, restore
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.host_copy import HostCopy, HostTensors, LazyCopy, open_host_copy
from nstrain.train.plan import Position, Update
from nstrain.train.saving import Saver, room_for, save_reason


def engine_of(seed: int = 1, with_ema: bool = False) -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=seed), optimizer_settings(), with_ema=with_ema)
    engine.set_length(LengthSettings(micro_rows=4))
    return engine


def train(engine: EagerEngine, ema: float | None = None) -> None:
    train_update(engine, random_rows(6, seed=engine.counts.step), 4, 1e-2, 0.1, ema)


def at(update: int) -> LineState:
    return LineState(Position(update, 1, update), update * 8, 1, CycleOrder(1, 8, "ab" * 32, "cd" * 32))


def bytes_of(tensors: Any) -> dict[tuple[str, str], bytes]:
    return {(kind, name): np.asarray(a).tobytes() for kind, arrays in tensors.items() for name, a in arrays.items()}


class Line:
    """A saver of a line on a tiny model, with what it said."""

    def __init__(self, root: Path, engine: EagerEngine | None = None, **checkpoints: Any) -> None:
        self.paths, self.work = LinePaths(root / "run"), root / "data"
        self.paths.root.mkdir()
        self.work.mkdir(exist_ok=True)
        self.engine = engine or engine_of()
        self.settings = run_settings(checkpoints={"every_updates": 4, "every_minutes": None, **checkpoints})
        self.said: list[str] = []
        self.saver = Saver(self.paths, self.settings, self.work, self.engine, self.said.append)


@pytest.fixture
def line(tmp_path: Path) -> Any:
    made = Line(tmp_path, keep_last=1)
    made.saver.open(None, at(0))
    yield made
    made.saver.close()


# ---- when ------------------------------------------------------------------------------------------------------------


def update_of(number: int, ends_cycle: bool = False) -> Update:
    return Update(number, 1, 0, 8, 8, 64, (number - 1) * 64, ends_cycle)


@pytest.mark.parametrize(
    ("update", "next_row_tokens", "ends_line", "since_s", "reason"),
    [
        (update_of(7), 8, False, 0.0, None),
        (update_of(8), 8, False, 0.0, "rolling"),
        (update_of(9), 8, False, 89.9, None),
        (update_of(9), 8, False, 90.0, "rolling"),
        (update_of(9, ends_cycle=True), 8, False, 0.0, "cycle_end"),
        (update_of(8, ends_cycle=True), 8, False, 99.0, "cycle_end"),
        (update_of(8, ends_cycle=True), 16, False, 0.0, "length_change"),
        (update_of(8, ends_cycle=True), 16, True, 0.0, "end"),
    ],
)
def test_reasons(update: Update, next_row_tokens: int, ends_line: bool, since_s: float, reason: str | None) -> None:
    settings = CheckpointSettings(every_updates=4, every_minutes=1.5)
    assert save_reason(settings, update, next_row_tokens, ends_line, since_s) == reason


def test_either_interval_may_be_left_out() -> None:
    by_time = CheckpointSettings(every_updates=None, every_minutes=1.0)
    assert save_reason(by_time, update_of(4), 8, False, 59.0) is None
    assert save_reason(by_time, update_of(5), 8, False, 61.0) == "rolling"
    by_count = CheckpointSettings(every_updates=4, every_minutes=None)
    assert save_reason(by_count, update_of(5), 8, False, 1e9) is None


# ---- what ------------------------------------------------------------------------------------------------------------


def slow_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes begin only once the event is set."""
    go_on, write = threading.Event(), background.write_checkpoint

    def waiting(paths: LinePaths, checkpoint: Checkpoint) -> Path:
        assert go_on.wait(30)
        return write(paths, checkpoint)

    monkeypatch.setattr(background, "write_checkpoint", waiting)
    return go_on


def test_a_checkpoint_is_the_state_at_its_update_though_the_line_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path, engine_of(with_ema=True))
    line.saver.open(None, at(0))
    train(line.engine, ema=1.0)
    expected = bytes_of({kind: line.engine.flat.export(kind) for kind in line.engine.flat.kinds})
    assert len(line.engine.flat.kinds) == 4
    go_on = slow_writes(monkeypatch)
    line.saver.save(at(4), "rolling")
    for _ in range(3):
        train(line.engine, ema=0.5)
    assert line.saver.newest is None, "nothing waited for the write"

    def take(copy: HostCopy) -> HostTensors:
        assert not line.saver._writer.busy, "pinned memory is used again: its last state must have been written"
        return really_take(copy)

    really_take = HostCopy.take
    monkeypatch.setattr(HostCopy, "take", take)
    threading.Timer(0.1, go_on.set).start()
    line.saver.save(at(8), "rolling")
    line.saver.wait()
    loaded = load_checkpoint(line.paths.checkpoint(4))
    assert bytes_of(loaded.tensors) == expected
    assert loaded.state["optimizer"]["step"] == 1
    assert line.saver.newest == "u00000008"
    for from_tokens in (None, loaded.state["tokens"]):  # the update that ends where it begins has moved it
        again = engine_of(seed=5, with_ema=True)
        restore(again, loaded, "here", from_tokens)
        assert again.flat.ema_begun
        assert bytes_of({kind: again.flat.export(kind) for kind in again.flat.kinds}) == expected


def test_a_line_that_gave_up_its_average_goes_on_without_and_one_that_takes_it_up_begins_it(tmp_path: Path) -> None:
    line = Line(tmp_path, engine_of(with_ema=True))
    line.saver.open(None, at(0))
    train(line.engine, ema=1.0)
    line.saver.save_now(at(4), "rolling")
    with_ema = load_checkpoint(line.paths.checkpoint(4))
    without = engine_of(seed=5)
    restore(without, with_ema, "here")
    assert without.flat.kinds == ("weights", "exp_avg", "exp_avg_sq")
    del with_ema.tensors["ema"]
    begun = engine_of(seed=5, with_ema=True)
    restore(begun, with_ema, "here")
    assert not begun.flat.ema_begun


def test_tensors_that_are_read_while_they_are_written_make_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU's host without room for a copy, with the device's part played by the CPU."""
    files = []
    for name, copy in (("copied", HostCopy), ("lazy", lambda engine: LazyCopy(engine, "no room"))):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("nstrain.train.saving.open_host_copy", copy)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        line = Line(tmp_path / name)
        line.saver.open(None, at(0))
        train(line.engine)
        go_on = slow_writes(monkeypatch)
        threading.Timer(0.2, go_on.set).start()
        line.saver.save(at(4), "rolling")
        assert (line.saver.newest is not None) == (name == "lazy"), "the line stands still until it is written"
        line.saver.wait()
        path = line.paths.checkpoint(4)
        files.append({file.name: file.read_bytes() for file in sorted(path.iterdir())})
        monkeypatch.undo()
    assert files[0] == files[1]
    assert line.said[0] == "checkpoints stop the line, no room"
    assert line.saver.slow == "no room"


def test_room_for_a_copy_decides_how_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(with_ema=True)
    assert type(open_host_copy(engine)) is HostCopy
    elements = sum(group.master.numel() for group in engine.flat.groups)
    needed_bytes = 4 * 4 * elements
    monkeypatch.setattr(engine.flat, "device", torch.device("cuda"))
    made: list[Any] = []
    monkeypatch.setattr(host_copy, "PinnedCopy", lambda engine: made.append(engine) or "pinned")
    free = needed_bytes + host_copy.KEPT_FREE_BYTES
    monkeypatch.setattr(host_copy, "available_host_bytes", lambda: free)
    assert open_host_copy(engine) == "pinned"  # type: ignore[comparison-overlap]
    free -= 1
    slow = open_host_copy(engine)
    assert isinstance(slow, LazyCopy)
    assert f"needs {human_bytes(needed_bytes)} of host memory" in (slow.slow or "")
    assert all(isinstance(tensors, LazyTensors) for tensors in _taken(slow, monkeypatch).values())
    free += 1

    def refuse(engine: EagerEngine) -> Any:
        raise host_copy.NstrainError("the driver does not pin 1 GiB of host memory (cudaErrorMemoryAllocation)")

    monkeypatch.setattr(host_copy, "PinnedCopy", refuse)
    unpinned = open_host_copy(engine)
    assert type(unpinned) is HostCopy, "the line stands still for the copy alone"
    assert (unpinned.slow or "").startswith("until each is copied: the driver does not pin")


def _taken(copy: HostCopy, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return copy.take().by_kind


# ---- after a commit --------------------------------------------------------------------------------------------------


def test_what_follows_a_commit_in_its_order(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int | None, int | None]] = []

    def watch(name: str, function: Callable[..., Any]) -> None:
        def watched(*arguments: Any) -> Any:
            events.append(
                (name, read_latest(line.paths), None if not line.saver.newest else int(line.saver.newest[1:]))
            )
            return function(*arguments)

        monkeypatch.setattr(f"nstrain.train.saving.{name}", watched)

    from nstrain.train import saving

    for name in ("write_consumer", "apply_retention", "remove_set_aside"):
        watch(name, getattr(saving, name))
    for update in (4, 8, 12):
        line.saver.save_now(at(update), "cycle_end" if update == 4 else "rolling")
    assert events == [
        (name, update, before)
        for update, before in ((4, None), (8, 4), (12, 8))
        for name in ("write_consumer", "apply_retention", "remove_set_aside")
    ]
    assert line.paths.checkpoint_updates() == [4, 12]
    assert [(c.cycle, c.row, c.tokens) for c in read_consumers(line.work)] == [(1, 12, 96)]
    assert line.said[-1].startswith("checkpoint u00000012 (rolling): ")
    assert line.said[-1].endswith("; removed u00000008")


@pytest.mark.parametrize(("reason", "last"), [("rolling", 12), ("end", 10)])
def test_what_a_rollback_set_aside_goes_once_the_line_is_as_far_or_at_its_end(
    line: Line, reason: str, last: int
) -> None:
    for update in (4, 8, 12):
        line.saver.save_now(at(update), "cycle_end")
    set_aside_later(line.paths, 4)
    for update in (8, 9):
        line.saver.save_now(at(update), "rolling")
        assert line.paths.set_aside.exists()
    line.saver.save_now(at(last), reason)
    assert not line.paths.set_aside.exists()
    assert "set-aside/u00000008, set-aside/u00000012" in line.said[-1]


def test_a_launch_removes_what_a_kill_has_left_set_aside_and_no_more(line: Line) -> None:
    for update in (4, 8):
        line.saver.save_now(at(update), "end")
    set_aside_later(line.paths, 4)

    def launch(update: int) -> None:
        saver = Saver(line.paths, line.settings, line.work, line.engine, line.said.append)
        saver.open(line.paths.checkpoint(update), at(update))
        saver.close()

    launch(4)
    assert line.paths.set_aside.exists(), "rolled back to an end of before; nothing was trained since"
    line.saver.save_now(at(7), "rolling")
    shutil.copytree(line.paths.checkpoint(4), line.paths.set_aside / "u00000004")
    shutil.rmtree(line.paths.set_aside / "u00000008")
    launch(7)
    assert not line.paths.set_aside.exists()


def test_a_launch_mends_the_consumers_entry(line: Line) -> None:
    line.saver.save_now(at(4), "rolling")
    (line.work / "consumers" / "line-1.json").unlink()
    again = Saver(line.paths, line.settings, line.work, line.engine, line.said.append)
    again.open(line.paths.checkpoint(4), at(4))
    assert [(c.cycle, c.row) for c in read_consumers(line.work)] == [(1, 4)]
    before = line.paths.latest.stat().st_mtime_ns
    again.save_now(at(4), "stop")
    assert line.paths.latest.stat().st_mtime_ns == before, "it is on disk already"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_not_committed_and_the_line_ends(line: Line) -> None:
    line.saver.save_now(at(4), "rolling")
    line.engine.flat.groups[0].exp_avg_sq[3] = float("inf")
    name = line.engine.flat.groups[0].slices[0].name
    with pytest.raises(NotFinite, match=f"exp_avg_sq: tensor '{name}' holds a NaN or an infinity"):
        line.saver.save_now(at(8), "rolling")
    assert newest_good(line.paths) == line.paths.checkpoint(4)
    assert line.paths.checkpoint_updates() == [4]


def test_pinned_pages_are_mapped_until_the_driver_has_let_go_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[int] = []

    def unregister(address: int) -> None:
        maps = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        assert any(int(first, 16) <= address < int(last, 16) for first, last in maps), "unmapped before"
        let_go.append(address)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=unregister, cudaError=SimpleNamespace(success=0)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    copy = host_copy.PinnedCopy.__new__(host_copy.PinnedCopy)
    copy._pages, copy._buffers = [], {}
    copy._buffers["weights", "matrix"], copy._buffers["weights", "norm"] = copy._pin(64 << 20), copy._pin(64 << 20)
    pinned = [pages.data_ptr() for pages in copy._pages]
    copy.close()
    assert sorted(let_go) == sorted(pinned)


@pytest.mark.parametrize("call", ["poll", "wait", "save", "save_now", "close"])
def test_an_error_of_the_writer_comes_to_whatever_is_called_next(
    line: Line, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    line.saver.save_now(at(4), "rolling")

    def fail(paths: LinePaths, checkpoint: Checkpoint) -> Path:
        raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(background, "write_checkpoint", fail)
        line.saver.save(at(8), "rolling")
        while line.saver._writer.busy:
            pass
    if call == "close":
        line.saver.close()
        assert "the checkpoint that was being written is lost: [Errno 5] the disk is gone" in line.said[-1]
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            getattr(line.saver, call)(*([at(12), "rolling"] if call.startswith("save") else []))
    assert newest_good(line.paths) == line.paths.checkpoint(4)
    line.saver.save_now(at(12), "rolling")
    assert newest_good(line.paths) == line.paths.checkpoint(12)


Usage = collections.namedtuple("Usage", ["total", "used", "free"])


def test_room_is_kept_for_an_average_that_has_not_begun() -> None:
    without, with_average = (room_for(engine_of(with_ema=ema).flat) - ROOM_BESIDE_BYTES for ema in (False, True))
    assert 3 * with_average == 4 * without > 0


def test_the_line_saves_while_there_is_room_and_stops(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    needed_bytes = room_for(line.engine.flat)
    free_bytes = needed_bytes
    monkeypatch.setattr("nstrain.train.saving.shutil.disk_usage", lambda path: Usage(1 << 40, 0, free_bytes))
    line.saver.stop_on_full_disk(at(3))
    assert line.paths.checkpoint_updates() == []
    free_bytes -= 1
    with pytest.raises(DiskFull, match="the line is saved at u3 and stops") as caught:
        line.saver.stop_on_full_disk(at(3))
    assert re.search(r"the next checkpoint needs 16\.\d MiB there, 16\.\d MiB are free;", str(caught.value))
    assert f"Free 1 B on that file system (`nstrain checkpoints {line.paths.root}` shows" in str(caught.value)
    assert newest_good(line.paths) == line.paths.checkpoint(3)
    again = Saver(line.paths, line.settings, line.work, line.engine, line.said.append)
    again.open(line.paths.checkpoint(3), at(3))
    assert [(c.cycle, c.row) for c in read_consumers(line.work)] == [(1, 3)]
    before = line.paths.latest.stat().st_mtime_ns
    with pytest.raises(DiskFull, match="the line is saved at u3 and stops"):
        again.stop_on_full_disk(at(3))
    assert line.paths.latest.stat().st_mtime_ns == before, "it was saved already"
    with pytest.raises(DiskFull, match="the line does not begin"):
        again.open(None, at(0))


def test_room_taken_by_a_checkpoint_that_is_being_written_is_no_full_disk(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = slow_writes(monkeypatch)
    line.saver.save(at(4), "rolling")
    monkeypatch.setattr("nstrain.train.saving.shutil.disk_usage", lambda path: Usage(1 << 40, 0, 0))
    line.saver.stop_on_full_disk(at(5))
    monkeypatch.undo()
    go_on.set()
    line.saver.wait()


def test_without_room_for_it_nothing_is_lost_and_the_message_says_what_is_needed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.saver.save_now(at(4), "rolling")
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 40, 0, 1000))
    with pytest.raises(
        DiskFull, match=r"u00000005: cannot be written; 1,000 bytes are free there.* needs [\d,]+ bytes"
    ):
        line.saver.stop_on_full_disk(at(5))
    assert newest_good(line.paths) == line.paths.checkpoint(4)
