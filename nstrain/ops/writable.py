"""Whether this user may write what a line's processes write, asked before they are started."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from nstrain.base.disk import not_allowed
from nstrain.base.errors import Refusal
from nstrain.data.preparer import preparer_lock
from nstrain.line.paths import LinePaths


def refuse_unwritable(paths: LinePaths, work: Path) -> str:
    """Refuse a line whose directory, or whose data line's, may not be written; returns what was looked at.

    A data line that another process prepares need only let us say among its consumers where we are.
    """
    ours = [paths.root, paths.supervisor_lock.parent, paths.checkpoints, paths.journal, paths.run_log]
    prepared = [work / name for name in ("", "cycles", "manifests", "open", "downloads")]
    elsewhere = preparer_lock(work).held_elsewhere()
    for place in (*ours, work / "consumers", *([] if elsewhere else prepared)):
        if place.exists() and not _may_write(place):
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
            raise Refusal(not_allowed(place, errno.EROFS if read_only else errno.EACCES))
    return f"{paths.root} and {work} may be written"


def _may_write(place: Path) -> bool:
    mode = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
    return os.access(place, mode, effective_ids=os.access in os.supports_effective_ids)
