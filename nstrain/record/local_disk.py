"""Whether a path lies on a file system of this machine.

A journal must: SQLite's write-ahead log needs memory shared between its processes, which network file systems do not
give, and there it loses rows or locks up (https://sqlite.org/wal.html, "all processes must be on the same host").
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from nstrain.base.errors import Refusal

NETWORK_FILE_SYSTEMS = frozenset((
    "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "coda", "davfs", "fhgfs", "gfs", "gfs2", "glusterfs",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs",
    "vboxsf", "wekafs",
))  # fmt: skip
"""Types, as /proc/mounts names them, whose files other machines may hold open."""

NETWORK_FUSE = frozenset((
    "beegfs", "blobfuse", "ceph", "ceph-fuse", "curlftpfs", "davfs2", "gcsfuse", "glusterfs", "goofys", "jfs",
    "juicefs", "lustre", "moosefs", "mfs", "objectivefs", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs",
))  # fmt: skip
"""What stands behind `fuse.` for such file systems in user space."""


def _unescape(field: str) -> str:
    """A field of /proc/mounts, where blanks and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def file_system_type(path: Path, mounts: str) -> str | None:
    """The type of the file system that an absolute, resolved path lies on, from the text of /proc/self/mounts.

    The longest mount point that holds the path wins, and of several at one point the last, which lies on top.
    """
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_unescape(fields[1]))
        if (path == point or point in path.parents) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), fields[2])
    return None if best is None else best[1]


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """Raise `Refusal` if a file at `path` would lie on a network file system.

    `mounts` is the text of /proc/self/mounts (read by default; where a system has none, nothing is refused).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        except FileNotFoundError:
            return
    kind = file_system_type(Path(os.path.realpath(path)), mounts) or ""
    if kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind.removeprefix("fuse.") in NETWORK_FUSE):
        raise Refusal(
            f"{path}: a journal must lie on a file system of this machine, found {kind}: SQLite's write-ahead log "
            "does not work on it. Make the line in a directory on a local disk."
        )
