"""`checkpoints`: the list, and the removal of kept ones that only a person decides on."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from nstrain.base.disk import FileLock
from nstrain.base.errors import Refusal
from nstrain.base.process import this_process
from nstrain.line.branches import add_branch, new_branch
from nstrain.line.checkpoint import Checkpoint, newest_good, write_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.line.retention import set_aside_later
from nstrain.line.state_files import Heartbeat, SupervisorState, write_heartbeat, write_supervisor
from nstrain.ops.branch import _state_at_cycle_end
from nstrain.ops.checkpoints import checkpoints_of, forecast, remove, remove_aside, thin
from nstrain.ops.rollback import _refuse_missing
from nstrain.ops.status import status
from nstrain.ops.status_page import render
from nstrain.settings.model import dump
from nstrain.settings.run import load_run

REASONS = {0: "start", 30: "length_change", 60: "end", 45: "rolling", 47: "rolling"}
"""By update; every tenth update ends a cycle."""


def save(paths: LinePaths, update: int) -> None:
    reason = REASONS.get(update, "cycle_end")
    ends_cycle = reason not in ("start", "rolling")
    previous = {"cycle": update // 10, "row_tokens": 64, "manifest_sha256": "a", "order_digest": "b"}
    state: dict[str, Any] = {
        "format": 1, "update": update, "tokens": update * 512, "generation": 1,
        "position": {"cycle": update // 10 + 1, "row": 0, "previous": previous if ends_cycle else None},
        "optimizer": {}, "reason": reason, "kept": reason != "rolling", "settings": dump(load_run(paths.run_json)),
        "versions": {}, "threads": 1, "id": "line", "changes": {"applied": [], "spent": {}},
    }  # fmt: skip
    tensors = {"w": np.full(64, update, np.float32)}
    write_checkpoint(paths, Checkpoint(state, dict.fromkeys(("weights", "exp_avg", "exp_avg_sq"), tensors)))


@pytest.fixture
def line(paths: LinePaths) -> LinePaths:
    for update in (0, 10, 20, 30, 40, 45, 47, 50):
        save(paths, update)
    return paths


def test_removal_by_number(line: LinePaths) -> None:
    sizes = {item.update: item.bytes for item in checkpoints_of(line.root)}
    moved = line.checkpoint(10).rename(line.root / "moved")
    line.checkpoint(10).symlink_to(moved)
    removed = remove(line.root, [20, 45, 20, 10])
    assert [item.update for item in removed.checkpoints] == [10, 20, 45]
    assert removed.bytes == sizes[20] + sizes[45] > 0, "a link frees nothing"
    assert moved.is_dir()
    assert line.checkpoint_updates() == [0, 30, 40, 47, 50]
    assert newest_good(line) == line.checkpoint(50)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([10, 50], "u00000050: the line goes on from it"),
        ([10, 25], "no checkpoint after update 25; it has: 0, 10, 20, 30, 40, 45, 47, 50"),
        ([10, 20], "branches began with update 20 (/runs/b1, /runs/b2)"),
    ],
)
def test_nothing_goes_if_one_may_not(line: LinePaths, updates: list[int], message: str) -> None:
    for name in ("/runs/b1", "/runs/b2"):
        add_branch(line, new_branch(Path(name), name[-2:], 2, 20, 10_240, "decay:1e3"))
    with pytest.raises(Refusal, match=re.escape(message)):
        remove(line.root, updates)
    assert line.checkpoint_updates() == [0, 10, 20, 30, 40, 45, 47, 50]


def test_what_the_line_goes_on_from_stays_also_where_latest_is_lost(line: LinePaths) -> None:
    for latest, goes_on in (("u00000049", 47), ("torn", 50), (None, 50)):
        line.latest.unlink() if latest is None else line.latest.write_text(latest)
        assert [item.update for item in checkpoints_of(line.root) if item.latest] == [goes_on]
        assert newest_good(line, warn=lambda text: None) == line.checkpoint(goes_on)
        with pytest.raises(Refusal, match="the line goes on from it"):
            remove(line.root, [goes_on])
        if goes_on < 50:
            with pytest.raises(Refusal, match="u00000050 is beyond the line's newest checkpoint, u00000049"):
                _refuse_missing(line, 50)
            with pytest.raises(Refusal, match="end of data cycle 5; it has those of cycles 1, 2, 3, 4$"):
                _state_at_cycle_end(line, 5)
    thin(line.root, 100)
    assert newest_good(line, warn=lambda text: None) == line.checkpoint(50)


def test_what_the_line_goes_on_from_stays_also_without_a_good_latest(line: LinePaths) -> None:
    save(line, 60)
    line.latest.unlink()
    with pytest.raises(Refusal, match="u00000060: the line goes on from it"):
        remove(line.root, [60])
    flipped = bytearray((line.checkpoint(60) / "weights.safetensors").read_bytes())
    flipped[-1] ^= 1
    (line.checkpoint(60) / "weights.safetensors").write_bytes(flipped)
    for latest in (None, "u00000060\n"):
        if latest is not None:
            line.latest.write_text(latest)
        assert 50 not in [item.update for item in thin(line.root, 100).checkpoints]
        with pytest.raises(Refusal, match="u00000050: the line goes on from it"):
            remove(line.root, [50])
    assert newest_good(line) == line.checkpoint(50)


def test_a_fork_goes_if_that_is_said(line: LinePaths) -> None:
    add_branch(line, new_branch(Path("/runs/b1"), "b1", 2, 20, 10_240, "decay:1e3"))
    assert [item.update for item in thin(line.root, 10).checkpoints] == [10, 40]
    assert [item.update for item in remove(line.root, [20], forks=True).checkpoints] == [20]


def test_thinning_leaves_every_nth_cycle_and_whatever_is_no_plain_end_of_one(line: LinePaths) -> None:
    save(line, 60)
    save(line, 70)
    assert [item.update for item in thin(line.root, 2).checkpoints] == [10, 50]
    assert line.checkpoint_updates() == [0, 20, 30, 40, 45, 47, 60, 70], "70 is the newest, 30 changes the length"
    assert [item.update for item in thin(line.root, 100).checkpoints] == [20, 40, 60], "60 was the end once"
    assert thin(line.root, 100).checkpoints == ()
    with pytest.raises(Refusal, match="expected a number from 1"):
        thin(line.root, 0)


def test_a_lines_end_stays_until_the_schedule_has_grown(line: LinePaths) -> None:
    save(line, 60)
    assert [item.update for item in thin(line.root, 100).checkpoints] == [10, 20, 40, 50]
    assert line.checkpoint_updates() == [0, 30, 45, 47, 60]


def test_what_was_set_aside_is_removed_if_a_person_says_so(line: LinePaths) -> None:
    set_aside_later(line, 40)
    os.rename(line.set_aside / "u00000050", line.set_aside / "u00000050.before-the-spike")
    assert [item.name for item in checkpoints_of(line.root) if item.set_aside] == ["u00000045", "u00000047"]
    removed = remove_aside(line.root)
    assert [item.name for item in removed.checkpoints] == ["u00000045", "u00000047"]
    assert removed.bytes > 0
    assert [path.name for path in line.set_aside.iterdir()] == ["u00000050.before-the-spike"], "a person's"
    assert line.checkpoint_updates() == [0, 10, 20, 30, 40]
    with FileLock(line.trainer_lock).acquire("the trainer"), pytest.raises(Refusal, match="thinned"):
        remove_aside(line.root)


def test_what_was_set_aside_is_listed_and_left(line: LinePaths) -> None:
    set_aside_later(line, 40)
    assert [item.name for item in checkpoints_of(line.root) if item.set_aside] == [
        "u00000045",
        "u00000047",
        "u00000050",
    ]
    with pytest.raises(Refusal, match="no checkpoint after update 45"):
        remove(line.root, [45])
    thin(line.root, 100)
    assert len([item for item in checkpoints_of(line.root) if item.set_aside]) == 3


def test_not_while_the_line_runs(line: LinePaths) -> None:
    with FileLock(line.trainer_lock).acquire("the trainer"), pytest.raises(Refusal, match="thinned"):
        thin(line.root, 2)
    with FileLock(line.supervisor_lock).acquire("the supervisor"), pytest.raises(Refusal, match="thinned"):
        remove(line.root, [10])
    assert line.checkpoint_updates() == [0, 10, 20, 30, 40, 45, 47, 50]


def test_forecast(line: LinePaths) -> None:
    found = forecast(line.root)
    assert (found.kept, found.rolling) == (6, 2)
    assert found.kept_to_come == 0, "the schedule of three cycles is behind it"
    assert found.end_bytes == 0


def test_the_command(line: LinePaths) -> None:
    def command(*arguments: str, code: int = 0) -> str:
        program = [sys.executable, "-m", "nstrain.cli.main", "checkpoints", str(line.root), *arguments]
        ran = subprocess.run(program, capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    listed = json.loads(command("--json"))
    assert [item["update"] for item in listed["checkpoints"]] == [0, 10, 20, 30, 40, 45, 47, 50]
    assert listed["forecast"]["kept"] == 6
    assert "removed" not in listed
    shown = command("--remove", "10", "--remove", "45")
    assert "removed: u00000010, u00000045" in shown
    assert "u00000050" in shown
    assert "cycle_end 5" in shown
    assert "give one of them" in command("--remove", "20", "--thin", "2", code=2)
    assert "--forks says what else --remove or --thin takes" in command("--forks", code=2)
    assert "goes on from it" in command("--remove", "50", code=2)
    assert "give one of them" in command("--set-aside", "--thin", "2", code=2)
    set_aside_later(line, 40)
    assert "set-aside/u00000050" in command()
    shown = command("--set-aside")
    assert "removed: u00000047, u00000050" in shown
    assert "set-aside/" not in shown


def test_status_says_that_checkpoints_stop_the_line(line: LinePaths) -> None:
    write_supervisor(line, SupervisorState(this_process(), time.time(), trainer_pid=os.getpid()))
    why = "until each is written: a copy for checkpoints needs 24 GiB of host memory"
    write_heartbeat(line, Heartbeat(time.time(), os.getpid(), "saving", 50, 25_600, slow_saving=why))
    look = status(line.root)
    assert look.slow_saving == why
    console = Console(file=io.StringIO(), width=120)
    console.print(render(look))
    assert isinstance(console.file, io.StringIO)
    assert f"they stop the line, {why}" in console.file.getvalue()
