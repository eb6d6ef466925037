"""The directories of the service's client: what a session leaves behind goes once nobody needs it.

The client writes all that it is given to a directory of each session, without a bound, and may never remove it. Nobody
needs it once the service has been found to hold what was given, and the session is over. Only directories that a
session was recorded with are ever removed, and only within RUN/wandb.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from nstrain.base.disk import remove_entry
from nstrain.base.process import identify
from nstrain.line.paths import LinePaths
from nstrain.mirror.state import ClientDirectory

Directories = tuple[ClientDirectory, ...]


def with_session(paths: LinePaths, directories: Directories, directory: Path | None) -> Directories:
    """The record with the directory of a session that begins in this process, if the client keeps one."""
    if directory is None:
        return directories
    entry = ClientDirectory(os.path.relpath(directory, paths.root), os.getpid(), clean=False)
    return (*(other for other in directories if other.path != entry.path), entry)


def with_clean(
    paths: LinePaths, directories: Directories, but: Path | None = None, only: Path | None = None
) -> Directories:
    """The record once all that was given to sessions is found on the service: of all `but` one, or of `only` one."""
    left, taken = (None if one is None else os.path.relpath(one, paths.root) for one in (but, only))
    return tuple(
        dataclasses.replace(entry, clean=True) if entry.path != left and taken in (None, entry.path) else entry
        for entry in directories
    )


def without_clean(paths: LinePaths, directories: Directories, tell: Callable[[str], None]) -> Directories:
    """Remove clean directories of processes that are gone, and of this one; returns the record of what is left.

    One that cannot be removed stays in the record, and is told.
    """
    left = []
    for entry in directories:
        if not entry.clean or (entry.pid != os.getpid() and identify(entry.pid) is not None):
            left.append(entry)
            continue
        directory = paths.root / entry.path
        try:
            if not _is_inside(directory, paths.wandb_directory):
                raise OSError(f"not a directory within {paths.wandb_directory}")
            if os.path.lexists(directory):
                remove_entry(directory)
        except OSError as error:
            tell(f"{directory} could not be removed: {error}")
            left.append(entry)
    return tuple(left)


def _is_inside(directory: Path, place: Path) -> bool:
    parent, own = directory.parent.resolve(), place.resolve()
    return directory.name not in ("", ".", "..") and (parent == own or own in parent.parents)
