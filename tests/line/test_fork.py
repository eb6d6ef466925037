"""A branch's first checkpoint: its parent's tensors under its own state."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from nstrain.base.errors import DiskFull
from nstrain.line.checkpoint import DamagedCheckpoint, load_checkpoint, newest_good, read_latest, write_checkpoint
from nstrain.line.fork import fork_checkpoint
from nstrain.line.paths import LinePaths

POSITION = {"cycle": 1, "row": 0, "row_tokens": 256, "manifest_sha256": None, "order_digest": None, "previous": None}
CHANGES = {"id": "branch", "position": POSITION, "reason": "start", "kept": True, "settings": {"seed": 7}}


@pytest.fixture
def parent(tmp_path: Any, make_checkpoint: Any) -> LinePaths:
    paths = LinePaths(tmp_path / "parent")
    paths.root.mkdir()
    write_checkpoint(paths, make_checkpoint(20, kept=True, ema=True))
    write_checkpoint(paths, make_checkpoint(30))
    return paths


@pytest.fixture
def branch(tmp_path: Any) -> LinePaths:
    (tmp_path / "branch").mkdir()
    return LinePaths(tmp_path / "branch")


def test_tensors_are_the_parents_and_the_state_is_the_branchs(parent: LinePaths, branch: LinePaths) -> None:
    path = fork_checkpoint(parent, 20, branch, CHANGES)
    assert newest_good(branch) == path == branch.checkpoint(20)
    found, source = load_checkpoint(path), load_checkpoint(parent.checkpoint(20))
    forked_from = {"id": "line", "update": 20, "run": str(parent.root)}
    assert found.state == {**source.state, **CHANGES, "forked_from": forked_from}
    for name in ("weights", "exp_avg", "exp_avg_sq", "ema"):
        file = f"{name}.safetensors"
        assert (path / file).read_bytes() == (parent.checkpoint(20) / file).read_bytes()
        assert not os.path.samefile(path / file, parent.checkpoint(20) / file), "no link: the parent may go"


def test_a_damaged_parent_begins_no_branch(parent: LinePaths, branch: LinePaths) -> None:
    ema = parent.checkpoint(20) / "ema.safetensors"
    data = bytearray(ema.read_bytes())
    data[-1] ^= 1
    ema.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"parent/checkpoints/u00000020/ema\.safetensors: damaged"):
        fork_checkpoint(parent, 20, branch, CHANGES)
    assert os.listdir(branch.checkpoints) == []
    assert read_latest(branch) is None
    with pytest.raises(DamagedCheckpoint, match="u00000025: no such checkpoint"):
        fork_checkpoint(parent, 25, branch, CHANGES)


def test_changes_that_make_no_state_are_refused_before_a_byte_is_copied(parent: LinePaths, branch: LinePaths) -> None:
    with pytest.raises(ValueError, match="field 'reason'"):
        fork_checkpoint(parent, 20, branch, {**CHANGES, "reason": "because"})
    assert os.listdir(branch.root) == []


def test_a_full_disk_is_named(parent: LinePaths, branch: LinePaths, with_file_size_limit: Any) -> None:
    def full() -> None:
        with pytest.raises(DiskFull, match=r"u00000020: cannot be written.* needs ([\d,]+) bytes") as told:
            fork_checkpoint(parent, 20, branch, CHANGES)
        needed = re.findall(r"needs ([\d,]+) bytes", str(told.value))[0].replace(",", "")
        assert int(needed) >= sum(file.stat().st_size for file in parent.checkpoint(20).iterdir())
        assert os.listdir(branch.checkpoints) == []

    with_file_size_limit(300, full)
