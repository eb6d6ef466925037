"""Real kills at every step of a checkpoint write, and disks without room: a line never loses its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import DiskFull
from nstrain.line import checkpoint as checkpoint_module
from nstrain.line.checkpoint import (
    Checkpoint,
    discard_partial_writes,
    load_checkpoint,
    newest_good,
    read_latest,
    write_checkpoint,
)
from nstrain.line.fork import fork_checkpoint
from nstrain.line.paths import LinePaths, parse_checkpoint_name
from nstrain.line.retention import apply_retention, find_set_aside, remove_set_aside, set_aside_later

Kill = Callable[[int, Callable[[], object]], bool]


def nothing_said(message: str) -> None:
    raise AssertionError(f"nothing is wrong, but this was said: {message}")


def loaded_seed(path: Path) -> int:
    """Which of two versions of an update a checkpoint is; every byte of it is verified."""
    return int(load_checkpoint(path).state["settings"]["seed"])


def assert_only_whole_checkpoints(paths: LinePaths) -> None:
    for name in os.listdir(paths.checkpoints):
        if name != "latest":
            update = parse_checkpoint_name(name)
            assert update is not None, name
            load_checkpoint(paths.checkpoint(update))


def kill_at_every_step(tmp_path: Path, kill: Kill, prepare: Callable[[LinePaths], None],
                       work: Callable[[LinePaths], object], check: Callable[[LinePaths], None]) -> int:  # fmt: skip
    """Run `prepare`, `work` killed at step n, `check`, for n = 1, 2, ... until work survives; returns the kills."""
    n = 0
    killed = True
    while killed:
        n += 1
        paths = LinePaths(tmp_path / f"{n:02d}")
        paths.root.mkdir()
        prepare(paths)
        killed = kill(n, lambda paths=paths: work(paths))  # type: ignore[misc]
        check(paths)
    return n - 1


def test_first_checkpoint(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """There is none, or the new one, which is found even while `latest` does not name it."""
    outcomes = set()

    def check(paths: LinePaths) -> None:
        discard_partial_writes(paths)
        found = newest_good(paths, lambda _: None)
        outcomes.add(found is not None)
        assert found is None or loaded_seed(found) == 0
        assert_only_whole_checkpoints(paths)
        assert loaded_seed(write_checkpoint(paths, make_checkpoint(0, seed=1))) == 1
        assert newest_good(paths, nothing_said) == paths.checkpoint(0)

    kills = kill_at_every_step(
        tmp_path, killed_at, lambda paths: paths.checkpoints.mkdir(),
        lambda paths: write_checkpoint(paths, make_checkpoint(0)), check,
    )  # fmt: skip
    assert outcomes == {False, True}
    assert kills >= 20


@pytest.mark.parametrize("unnamed_newer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_next_checkpoint(tmp_path: Path, killed_at: Kill, make_checkpoint: Any, unnamed_newer: bool) -> None:
    """The line goes on from the old one until `latest` names the new one; then from the new one.

    With `unnamed_newer` a complete checkpoint of the same update is left by an earlier kill, and is written over.
    """
    outcomes = set()

    def prepare(paths: LinePaths) -> None:
        write_checkpoint(paths, make_checkpoint(10))
        if unnamed_newer:
            write_checkpoint(paths, make_checkpoint(20, seed=1))
            paths.latest.write_text("u00000010\n")

    def check(paths: LinePaths) -> None:
        named = read_latest(paths)
        found = newest_good(paths, nothing_said)  # also before anything is cleared away
        discard_partial_writes(paths)
        assert newest_good(paths, nothing_said) == found == paths.checkpoint(named or 0)
        outcomes.add(named)
        assert loaded_seed(found) == {10: 0, 20: 2}[named or 0]
        assert_only_whole_checkpoints(paths)
        write_checkpoint(paths, make_checkpoint(20, seed=3))
        found = newest_good(paths, nothing_said)
        assert found == paths.checkpoint(20)
        assert loaded_seed(found) == 3
        assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000010", "u00000020"]

    kill_at_every_step(
        tmp_path, killed_at, prepare, lambda paths: write_checkpoint(paths, make_checkpoint(20, seed=2)), check
    )
    assert outcomes == {10, 20}


def test_only_checkpoint_written_again(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """There is no other to fall back on, yet at every step the old or the new one is there."""
    outcomes = set()

    def check(paths: LinePaths) -> None:
        discard_partial_writes(paths)
        found = newest_good(paths, nothing_said)
        assert found == paths.checkpoint(10)
        outcomes.add(loaded_seed(found))
        assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000010"]
        write_checkpoint(paths, make_checkpoint(10, seed=3))
        assert loaded_seed(paths.checkpoint(10)) == 3

    kill_at_every_step(
        tmp_path, killed_at, lambda paths: write_checkpoint(paths, make_checkpoint(10, seed=1)),
        lambda paths: write_checkpoint(paths, make_checkpoint(10, seed=2)), check,
    )  # fmt: skip
    assert outcomes == {1, 2}


def test_retention(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """Killed while old ones are deleted: whole checkpoints and garbage by another name, never half a checkpoint."""

    def prepare(paths: LinePaths) -> None:
        for update in (0, 10, 20, 30):
            write_checkpoint(paths, make_checkpoint(update, kept=update == 0))

    def check(paths: LinePaths) -> None:
        assert newest_good(paths, nothing_said) == paths.checkpoint(30)
        discard_partial_writes(paths)
        assert_only_whole_checkpoints(paths)
        apply_retention(paths, keep_last=1)
        assert paths.checkpoint_updates() == [0, 30]
        assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000000", "u00000030"]

    assert kill_at_every_step(tmp_path, killed_at, prepare, lambda paths: apply_retention(paths, 1), check) == 4


def test_the_average_too(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """A line whose average has just begun: the old checkpoint has no such file, the new one has."""
    outcomes = set()

    def check(paths: LinePaths) -> None:
        discard_partial_writes(paths)
        found = newest_good(paths, nothing_said)
        assert found is not None
        outcomes.add((found.name, len(load_checkpoint(found).tensors)))
        assert_only_whole_checkpoints(paths)

    kill_at_every_step(
        tmp_path, killed_at, lambda paths: write_checkpoint(paths, make_checkpoint(10)),
        lambda paths: write_checkpoint(paths, make_checkpoint(20, ema=True)), check,
    )  # fmt: skip
    assert outcomes == {("u00000010", 3), ("u00000020", 4)}


def test_rollback(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """Killed after any step, the line goes on from where it was rolled back to; asked again, the rest is moved."""

    def prepare(paths: LinePaths) -> None:
        for update in (10, 20, 30):
            write_checkpoint(paths, make_checkpoint(update))

    def check(paths: LinePaths) -> None:
        assert newest_good(paths, nothing_said) == paths.checkpoint(10)
        assert discard_partial_writes(paths) == []
        assert_only_whole_checkpoints(paths)
        for name in find_set_aside(paths):
            load_checkpoint(paths.set_aside / name)
        assert len(paths.checkpoint_updates()) + len(find_set_aside(paths)) == 3, "none is lost"
        set_aside_later(paths, 10)
        assert newest_good(paths, nothing_said) == paths.checkpoint(10)
        assert find_set_aside(paths) == {"u00000020": 20, "u00000030": 30}

    assert kill_at_every_step(tmp_path, killed_at, prepare, lambda paths: set_aside_later(paths, 10), check) == 3


def test_removal_of_what_was_set_aside(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    def prepare(paths: LinePaths) -> None:
        for update in (10, 20, 30):
            write_checkpoint(paths, make_checkpoint(update))
        set_aside_later(paths, 10)
        write_checkpoint(paths, make_checkpoint(40))

    def check(paths: LinePaths) -> None:
        assert newest_good(paths, nothing_said) == paths.checkpoint(40)
        remove_set_aside(paths, 40)
        assert not paths.set_aside.exists()

    assert kill_at_every_step(tmp_path, killed_at, prepare, lambda paths: remove_set_aside(paths, 40), check) == 2


def test_fork(tmp_path: Path, killed_at: Kill, make_checkpoint: Any) -> None:
    """A branch has its first checkpoint or none; its parent is as it was. Made again, it is there."""
    parent = LinePaths(tmp_path / "parent")
    parent.root.mkdir()
    write_checkpoint(parent, make_checkpoint(20, ema=True))
    outcomes = set()

    def fork(paths: LinePaths) -> None:
        fork_checkpoint(parent, 20, paths, {"id": "branch", "reason": "start"})

    def check(paths: LinePaths) -> None:
        discard_partial_writes(paths)
        found = newest_good(paths, lambda _: None)
        outcomes.add(found is not None)
        assert_only_whole_checkpoints(paths)
        fork(paths)
        assert newest_good(paths, nothing_said) == paths.checkpoint(20)
        assert load_checkpoint(paths.checkpoint(20)).state["id"] == "branch"
        assert load_checkpoint(parent.checkpoint(20)).state["id"] == "line"

    kills = kill_at_every_step(tmp_path, killed_at, lambda paths: paths.checkpoints.mkdir(), fork, check)
    assert outcomes == {False, True}
    assert kills >= 12


def test_garbage_of_killed_writers_is_cleared_and_said(paths: LinePaths, make_checkpoint: Any) -> None:
    write_checkpoint(paths, make_checkpoint(10))
    write_checkpoint(paths, make_checkpoint(20))
    (paths.checkpoints / "u00000030.partial").mkdir()
    (paths.checkpoints / "u00000030.partial" / "weights.safetensors").write_bytes(b"half")
    (paths.checkpoints / "latest.partial").write_text("u000")
    os.rename(paths.checkpoint(10), paths.checkpoints / "u00000010.replaced")
    (paths.checkpoints / "u00000020.replaced").mkdir()
    (paths.checkpoints / "notes.txt").write_text("a person's")
    done = discard_partial_writes(paths)
    assert len(done) == 4
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "notes.txt", "u00000010", "u00000020"]
    load_checkpoint(paths.checkpoint(10))
    assert discard_partial_writes(paths) == []


def test_garbage_that_was_not_cleared_does_not_stop_a_write(paths: LinePaths, make_checkpoint: Any) -> None:
    write_checkpoint(paths, make_checkpoint(10))
    (paths.checkpoints / "u00000010.partial").mkdir()
    (paths.checkpoints / "u00000010.partial" / "ema.safetensors").write_bytes(b"half")
    (paths.checkpoints / "u00000010.replaced").mkdir()
    path = write_checkpoint(paths, make_checkpoint(10, seed=1))
    assert loaded_seed(path) == 1
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000010"]


# ---- no room ---------------------------------------------------------------------------------------------------------


def assert_disk_full(paths: LinePaths, checkpoint: Checkpoint) -> None:
    """The write fails with the bytes needed and free, and the line has what it had."""
    before = {name: sorted(os.listdir(paths.checkpoints / name)) for name in ("u00000010",)}
    with pytest.raises(DiskFull, match=r"[\d,]+ bytes are free there.* needs [\d,]{7,} bytes"):
        write_checkpoint(paths, checkpoint)
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000010"]
    assert {name: sorted(os.listdir(paths.checkpoints / name)) for name in ("u00000010",)} == before
    assert newest_good(paths, nothing_said) == paths.checkpoint(10)


@pytest.mark.parametrize("limit_bytes", [0, 4096, 500_000])
def test_a_file_size_limit(paths: LinePaths, make_checkpoint: Any, with_file_size_limit: Any, limit_bytes: int) -> None:
    write_checkpoint(paths, make_checkpoint(10))
    large = make_checkpoint(20, floats=1 << 18)  # 2 MiB a file
    with_file_size_limit(limit_bytes, lambda: assert_disk_full(paths, large))
    write_checkpoint(paths, large)
    assert newest_good(paths, nothing_said) == paths.checkpoint(20)


@pytest.mark.parametrize("room_vanishes_while_writing", [False, True])
def test_a_full_disk(
    tmp_path: Path, make_checkpoint: Any, with_file_size_limit: Any, small_disk: Path | None,
    monkeypatch: pytest.MonkeyPatch, room_vanishes_while_writing: bool,
) -> None:  # fmt: skip
    """Refused before a byte is written if the room is seen to be too little, and cleaned up if it vanishes later."""
    paths = LinePaths(small_disk or tmp_path)
    write_checkpoint(paths, make_checkpoint(10))
    large = make_checkpoint(20, floats=1 << 17)  # 1 MiB a file
    if small_disk is None:  # this user may not mount a small disk
        with_file_size_limit(500_000, lambda: assert_disk_full(paths, large))
        return
    written: list[str] = []
    write_files = checkpoint_module._write_files
    monkeypatch.setattr(checkpoint_module, "_write_files", lambda *args: (written.append("began"), write_files(*args)))
    if room_vanishes_while_writing:
        monkeypatch.setattr(checkpoint_module, "_refuse_too_little_space", lambda *_: None)
    assert_disk_full(paths, large)
    assert written == (["began"] if room_vanishes_while_writing else [])
    write_checkpoint(paths, make_checkpoint(20))
    assert newest_good(paths, nothing_said) == paths.checkpoint(20)
