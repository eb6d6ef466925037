"""`nstrain checkpoints`: what checkpoints a line has, and the deliberate removal of kept ones.

A line removes its rolling checkpoints by itself and its kept ones never. They are the points that a branch or a
rollback can begin from, one a data cycle, so a person decides which may go: by number, or all but every n-th cycle's.
What a rollback has set aside goes by itself, but can be removed before the line is as far again.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.line.branches import read_branches
from nstrain.line.checkpoint import newest_good
from nstrain.line.listing import DiskForecast, ListedCheckpoint, forecast_of, keeping_of, list_checkpoints
from nstrain.line.paths import LinePaths, parse_checkpoint_name
from nstrain.line.retention import remove_checkpoints, remove_set_aside
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.ops.rollback import at_rest
from nstrain.settings.model import dump


@dataclasses.dataclass(frozen=True)
class Removed:
    """What was removed."""

    checkpoints: tuple[ListedCheckpoint, ...]
    bytes: int
    """What that freed: nothing of those that are links to a place elsewhere, which keeps its files."""


def checkpoints_of(run: Path) -> list[ListedCheckpoint]:
    """A line's checkpoints. Raises `Refusal` if `run` is not one."""
    return list_checkpoints(_paths(run))


def forecast(run: Path) -> DiskForecast:
    """What a line's checkpoints will take, by its schedule as it is now; of one that has none yet, all sizes are 0."""
    paths = _paths(run)
    settings = load_settings(paths)
    schedule = DataLine.open(Path(settings.data.work)).cycle_count
    free_bytes = shutil.disk_usage(paths.root).free
    return forecast_of(list_checkpoints(paths), keeping_of(dump(settings)), schedule, 0, free_bytes)


def remove(run: Path, updates: Iterable[int], forks: bool = False) -> Removed:
    """Remove checkpoints of a line that does not run.

    Raises `Refusal` before anything is removed: for an update that has none (naming those that have), for the one that
    the line goes on from, and, unless `forks`, for one that a branch began with; and if none is good to go on from.
    """
    paths = _paths(run)
    with at_rest(paths, "thinned"):
        listed = {item.update: item for item in list_checkpoints(paths) if not item.set_aside}
        wanted, goes_on_from = sorted(set(updates)), _goes_on_from(paths)
        for update in wanted:
            if update not in listed:
                found = ", ".join(map(str, listed)) or "none"
                raise Refusal(f"{paths.root} has no checkpoint after update {update}; it has: {found}")
            if listed[update].latest or update == goes_on_from:
                raise Refusal(
                    f"{paths.checkpoint(update)}: the line goes on from it; to remove it, roll back to an earlier one "
                    "or train to a later one first"
                )
        branches = _branches_at(paths)
        if not forks and (bound := [update for update in wanted if update in branches]):
            began = ", ".join(f"update {update} ({branches[update]})" for update in bound)
            raise Refusal(
                f"{paths.root}: branches began with {began}. They have copies of their own; to remove the parent's as "
                "well, add --forks"
            )
        return _remove(paths, [listed[update] for update in wanted])


def thin(run: Path, every: int, forks: bool = False) -> Removed:
    """Of the kept ends of data cycles leave every n-th cycle's, and remove the others.

    What stays in any case: the line's start, changes of the row length, the checkpoint that the line goes on from (of
    one that is done, its end), rolling ones, and, unless `forks`, those that branches began with. Where a schedule
    once ended that has grown since, a cycle ends like any other. The line must not run.
    """
    if every < 1:
        raise Refusal(f"--thin: expected a number from 1, found {every}")
    paths = _paths(run)
    with at_rest(paths, "thinned"):
        branches, goes_on_from = {} if forks else _branches_at(paths), _goes_on_from(paths)
        gone = [
            item
            for item in list_checkpoints(paths)
            if item.reason in ("cycle_end", "end")
            and item.after_cycle is not None
            and item.after_cycle % every
            and not (item.latest or item.set_aside or item.update == goes_on_from or item.update in branches)
        ]
        return _remove(paths, gone)


def remove_aside(run: Path) -> Removed:
    """Remove what rollbacks of a line have set aside; a directory under a name of a person's own stays.

    The line must not run.
    """
    paths = _paths(run)
    with at_rest(paths, "thinned"):
        listed = {item.name: item for item in list_checkpoints(paths) if item.set_aside}
        sizes = {name: _own_bytes(paths.set_aside, item) for name, item in listed.items()}
        gone = [name for name in remove_set_aside(paths, None) if name in listed]
        return Removed(tuple(listed[name] for name in gone), sum(sizes[name] for name in gone))


def _goes_on_from(paths: LinePaths) -> int | None:
    """The update that the line goes on from, by every byte: what `latest` names may be damaged, or `latest` be lost."""
    newest = newest_good(paths, warn=lambda message: None)
    return None if newest is None else parse_checkpoint_name(newest.name)


def _remove(paths: LinePaths, gone: list[ListedCheckpoint]) -> Removed:
    freed = sum(_own_bytes(paths.checkpoints, item) for item in gone)
    remove_checkpoints(paths, [item.update for item in gone])
    return Removed(tuple(gone), freed)


def _own_bytes(directory: Path, item: ListedCheckpoint) -> int:
    return 0 if (directory / item.name).is_symlink() else item.bytes


def _branches_at(paths: LinePaths) -> dict[int, str]:
    """The branches that began with each of the line's updates."""
    found: dict[int, str] = {}
    for branch in read_branches(paths):
        found[branch.update] = f"{found[branch.update]}, {branch.run}" if branch.update in found else branch.run
    return found


def _paths(run: Path) -> LinePaths:
    paths = LinePaths(run.resolve())
    refuse_no_line(run)
    return paths
