"""Which checkpoints stay, so that a line's disk use is bounded.

After a commit there stay: the checkpoint that `latest` names; kept ones (a line's start, cycle ends, length changes,
its end: the points that a branch or a later stage goes on from); the newest `keep_last` others. What has a higher
number than `latest` belongs to an abandoned continuation and goes. A directory whose state cannot be read is not as
this code wrote it: it takes no other's place, and stays until a person has looked at it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable

from nstrain.base.disk import PARTIAL_SUFFIX, fsync_dir
from nstrain.base.errors import Refusal
from nstrain.base.killpoints import kill_point
from nstrain.line.checkpoint import read_latest, read_state
from nstrain.line.paths import LinePaths, checkpoint_name


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint directory as retention sees it."""

    update: int
    kept: bool | None
    """state.json's `kept`; None if it cannot be read."""


def keep(checkpoints: Iterable[Found], latest: int | None, keep_last: int) -> set[int]:
    """The updates whose checkpoints stay; all of them while `latest` names none."""
    checkpoints = list(checkpoints)
    if latest is None:
        return {found.update for found in checkpoints}
    of_line = [found for found in checkpoints if found.update <= latest]
    rolling = sorted(found.update for found in of_line if found.kept is False)
    stay = {found.update for found in of_line if found.kept is not False or found.update == latest}
    return stay | set(rolling[max(0, len(rolling) - keep_last) :])


def find_checkpoints(paths: LinePaths) -> list[Found]:
    """The line's checkpoint directories in order of their number."""
    return [Found(update, _kept(paths, update)) for update in paths.checkpoint_updates()]


def _kept(paths: LinePaths, update: int) -> bool | None:
    try:
        return bool(read_state(paths.checkpoint(update))["kept"])
    except Refusal:
        return None


def apply_retention(paths: LinePaths, keep_last: int) -> list[str]:
    """Remove what does not stay; returns the names removed.

    A directory loses its own name first, so that a kill in the middle never leaves half a checkpoint under a
    checkpoint's name.
    """
    checkpoints = find_checkpoints(paths)
    stay = keep(checkpoints, read_latest(paths), keep_last)
    removed = []
    for found in checkpoints:
        if found.update in stay:
            continue
        name = checkpoint_name(found.update)
        partial = paths.checkpoints / (name + PARTIAL_SUFFIX)
        if partial.exists():
            shutil.rmtree(partial)
        os.rename(paths.checkpoint(found.update), partial)
        kill_point("checkpoint:old one unnamed")
        shutil.rmtree(partial)
        kill_point("checkpoint:old one deleted")
        removed.append(name)
    if removed:
        fsync_dir(paths.checkpoints)
    return removed
