"""Which checkpoints stay: what bounds the disk that a line takes.

A commit leaves: the checkpoint that `latest` names; kept ones (a line's start, cycle ends, length changes,
its end: the points that a branch or a later stage goes on from); the newest `keep_last` others. What has a higher
number than `latest` belongs to an abandoned continuation and goes. A directory whose state cannot be read is not as
this code wrote it: it takes no other's place, and stays until a person has looked at it. What a rollback has set aside
goes once the line has come as far as all of it again, or to its end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.disk import PARTIAL_SUFFIX, atomic_write, fsync_dir, remove_entry
from nstrain.base.errors import Refusal
from nstrain.base.killpoints import kill_point
from nstrain.line.checkpoint import read_latest, read_state
from nstrain.line.paths import LinePaths, checkpoint_name, parse_set_aside_name


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
    """Remove what does not stay; returns the names removed."""
    checkpoints = find_checkpoints(paths)
    stay = keep(checkpoints, read_latest(paths), keep_last)
    gone = [found.update for found in checkpoints if found.update not in stay]
    remove_checkpoints(paths, gone)
    return [checkpoint_name(update) for update in gone]


def remove_checkpoints(paths: LinePaths, updates: Iterable[int]) -> None:
    """Remove the checkpoints of some updates. Only for the holder of the trainer's lock.

    A directory loses its own name first, so that a kill in the middle never leaves half a checkpoint under a
    checkpoint's name.
    """
    removed = False
    for update in updates:
        partial = paths.checkpoints / (checkpoint_name(update) + PARTIAL_SUFFIX)
        if os.path.lexists(partial):
            remove_entry(partial)
        os.rename(paths.checkpoint(update), partial)
        kill_point("checkpoint:old one unnamed")
        remove_entry(partial)
        kill_point("checkpoint:old one deleted")
        removed = True
    if removed:
        fsync_dir(paths.checkpoints)


# ---- set aside by a rollback -----------------------------------------------------------------------------------------


def refuse_other_disk(paths: LinePaths) -> None:
    """Raise `Refusal` if checkpoints cannot be renamed into set-aside/, since they lie on another disk (by a link)."""
    place = paths.set_aside if paths.set_aside.exists() else paths.root
    if not paths.checkpoints.exists() or paths.checkpoints.stat().st_dev == place.stat().st_dev:
        return
    there = paths.checkpoints.resolve()
    beside = there.with_name(f"{there.name}.{paths.set_aside.name}")
    link = f"{typed('mkdir', beside)} && {typed('ln', '-sT', beside, paths.set_aside)}"
    raise Refusal(
        f"{paths.checkpoints}: lies on another disk than {place}; a rollback renames checkpoints from the one to the "
        f"other. Give it a place on that disk with `{link}`, once {paths.set_aside} is not there"
    )


def set_aside_later(paths: LinePaths, update: int) -> list[str]:
    """Make `latest` name the checkpoint of an update, and move those after it to set-aside/; returns their names there.

    Killed in between, the line goes on from that checkpoint already, and what was not moved goes at its next commit.
    Only for the holder of the trainer's lock. Raises `Refusal` if there is no such checkpoint.
    """
    if not paths.checkpoint(update).is_dir():
        raise Refusal(f"{paths.checkpoint(update)}: no such checkpoint")
    atomic_write(paths.latest, checkpoint_name(update) + "\n")
    kill_point("checkpoint:rolled back")
    moved = []
    for later in paths.checkpoint_updates():
        if later > update:
            paths.set_aside.mkdir(exist_ok=True)
            place = _free_place(paths.set_aside / checkpoint_name(later))
            os.rename(paths.checkpoint(later), place)
            kill_point("checkpoint:set aside")
            moved.append(place.name)
    if moved:
        fsync_dir(paths.set_aside)
        fsync_dir(paths.checkpoints)
    return moved


def _free_place(place: Path) -> Path:
    """`place`, or with a number after it if an earlier rollback has set aside one of the same update."""
    candidates = (place.with_name(f"{place.name}.{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([place], candidates) if not free.exists())


def find_set_aside(paths: LinePaths) -> dict[str, int]:
    """What rollbacks have set aside and not been removed yet, by directory, with its update.

    A directory under a name of a person's own is not among them, and stays for ever.
    """
    if not paths.set_aside.is_dir():
        return {}
    names = sorted(entry.name for entry in paths.set_aside.iterdir() if entry.is_dir())
    updates = {name: parse_set_aside_name(name) for name in names}
    return {name: update for name, update in updates.items() if update is not None}


def remove_set_aside(paths: LinePaths, committed: int | None) -> list[str]:
    """Remove what rollbacks have set aside, if the line has committed a checkpoint as far as all of it.

    `committed` is that checkpoint's update; None removes it in any case: the line is at its end (by other batches it
    may have come there in fewer updates), or a person has asked for it. Only for the holder of the trainer's lock.
    """
    found = find_set_aside(paths)
    if committed is not None and any(committed < update for update in found.values()):
        return []
    for name in found:
        remove_entry(paths.set_aside / name)
        kill_point("checkpoint:set-aside one deleted")
    if paths.set_aside.is_dir() and not paths.set_aside.is_symlink() and not any(paths.set_aside.iterdir()):
        paths.set_aside.rmdir()
    return sorted(found)
