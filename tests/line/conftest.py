"""Small checkpoints, and ways to run code in a process that is killed or runs out of room."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nstrain.base import killpoints
from nstrain.line.checkpoint import Checkpoint
from nstrain.line.paths import LinePaths

MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def paths(tmp_path: Path) -> LinePaths:
    """A new line's directory."""
    return LinePaths(tmp_path)


@pytest.fixture
def make_checkpoint() -> MakeCheckpoint:
    """make(update, seed=..., kept=..., floats=..., ema=...) -> Checkpoint; other seeds have other tensors."""

    def make(
        update: int, seed: int = 0, kept: bool = False, floats: int = 60, ema: bool = False, **state: Any
    ) -> Checkpoint:
        draw = np.random.default_rng([update, seed])

        def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
            return {
                "layers.0.w": draw.standard_normal((floats // 4, 4), dtype=np.float32),
                "embedding": draw.standard_normal(floats, dtype=np.float32),
                "scale": np.float32(draw.standard_normal()).reshape(()),
            }

        values = {
            "format": 1,
            "update": update,
            "tokens": update * 512,
            "generation": 0,
            "position": {"cycle": 1, "row": update * 2, "row_tokens": 256, "manifest_sha256": "a", "order_digest": "b"},
            "optimizer": {"step": update, "consecutive_skips": 0, "total_skips": 0},
            "reason": "cycle_end" if kept else "rolling",
            "kept": kept,
            "settings": {"seed": seed},
            "changes": {"applied": [], "spent": {}},
            "versions": {"nstrain": "0"},
            "threads": 1,
            "id": "line",
        }
        stems = ("weights", "exp_avg", "exp_avg_sq", *(["ema"] if ema else []))
        return Checkpoint({**values, **state}, {stem: tensors() for stem in stems})

    return make


@pytest.fixture
def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is synchronised, given its name or removed as a whole from now on, each with its inode, in order.

    A name is durable once its directory is synchronised after it, a file once itself is. No kill -9 shows that.
    """
    events: list[tuple[str, int]] = []
    fsync, rename, replace, rmtree = os.fsync, os.rename, os.replace, shutil.rmtree

    def synchronised(fd: int) -> None:
        fsync(fd)
        events.append(("synchronised", os.fstat(fd).st_ino))

    def named(how: Any, old: Any, new: Any) -> None:
        how(old, new)
        events.append(("named", Path(new).stat().st_ino))

    def removed(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).exists():
            events.append((f"removed {Path(path).name}", Path(path).stat().st_ino))
        rmtree(path, *args, **options)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "rename", lambda old, new: named(rename, old, new))
    monkeypatch.setattr(os, "replace", lambda old, new: named(replace, old, new))
    monkeypatch.setattr(shutil, "rmtree", removed)
    return events


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; returns its exit status as `os.waitpid` gives it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def killed_at() -> Callable[[int, Callable[[], object]], bool]:
    """killed_at(n, work): run work in a process that is killed at its n-th checkpoint step; whether it got that far."""

    def run(n: int, work: Callable[[], object]) -> bool:
        def armed() -> None:
            killpoints.arm(f"checkpoint:{n}")
            work()

        status = in_child(armed)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0
        return False

    return run


@pytest.fixture
def with_file_size_limit() -> Callable[[int, Callable[[], object]], None]:
    """Run assertions in a process whose files may not grow beyond a size (errno EFBIG)."""

    def run(limit_bytes: int, work: Callable[[], object]) -> None:
        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
            work()

        assert in_child(limited) == 0

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MiB, mounted for the test; None where this user may not mount one."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield directory if mounted else None
    if mounted:
        subprocess.run(["umount", str(directory)], check=True)
