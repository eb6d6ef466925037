"""branches.json: the branches that were made from a line, for people and for whoever thins its checkpoints.

A branch needs nothing of its parent once it is made; the list only says where it went. It grows at its end, under a
lock, and is replaced as a whole. An entry is written just before the branch's directory appears: of a command that was
killed in between there may be one whose directory does not exist, and making that branch again replaces it.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.disk import FileLock, atomic_write_json, read_json
from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths

LOCK_WAIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a line."""

    run: str
    """Its directory."""
    id: str
    """Its line's id."""
    at_cycle: int
    """The parent's data cycle at whose end it begins."""
    update: int
    """The parent's update there."""
    tokens: int
    """The position there."""
    plan: str
    """What was asked for: decay:10e9,long:2e9"""
    made_at: float
    """Unix seconds."""


def read_branches(paths: LinePaths) -> list[Branch]:
    """A line's branches in the order in which they were made. Raises `Refusal` for a file that is damaged."""
    if not paths.branches.exists():
        return []
    remedy = f"remove it with `{typed('rm', paths.branches)}`: it only tells where the branches are, which need it not"
    try:
        value = read_json(paths.branches)
        return [Branch(**entry) for entry in value["branches"]]
    except Refusal as error:
        raise Refusal(f"{error}; {remedy}") from None
    except (KeyError, TypeError) as error:
        raise Refusal(
            f"{paths.branches}: expected a list of branches, found something else ({error!r}); {remedy}"
        ) from None


def add_branch(paths: LinePaths, branch: Branch) -> None:
    """Add a branch to its parent's list, in the place of an earlier one of the same directory. Raises `DiskFull`."""
    with FileLock(paths.branches_lock).acquire(f"the list of branches of {paths.root}", LOCK_WAIT_S):
        others = [entry for entry in read_branches(paths) if entry.run != branch.run]
        entries = [dataclasses.asdict(entry) for entry in (*others, branch)]
        atomic_write_json(paths.branches, {"branches": entries})


def new_branch(run: Path, line_id: str, at_cycle: int, update: int, tokens: int, plan: str) -> Branch:
    """An entry of now."""
    return Branch(str(run), line_id, at_cycle, update, tokens, plan, time.time())
