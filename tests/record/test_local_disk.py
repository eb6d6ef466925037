"""Where a journal may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from nstrain.base.errors import Refusal
from nstrain.record.local_disk import file_system_type, refuse_network_file_system

MOUNTS = r"""sysfs /sys sysfs rw 0 0
/dev/vda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/me/scratch xfs rw 0 0
server:/data /mnt/lab\040data nfs rw 0 0
//nas/share /mnt/nas cifs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
/dev/vdc /mnt/ntfs fuse.ntfs-3g rw 0 0
server:/old /mnt/covered nfs rw 0 0
tmpfs /mnt/covered tmpfs rw 0 0
C:\134 /mnt/c 9p rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/line", "ext4"),
        ("/", "ext4"),
        ("/home/me/line", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/line", "ext4"),
        ("/home/me/scratch/line", "xfs"),
        ("/mnt/lab data/line", "nfs"),
        ("/mnt/lab", "ext4"),
        ("/mnt/nas/line", "cifs"),
        ("/mnt/ssh/line", "fuse.sshfs"),
        ("/mnt/ntfs/line", "fuse.ntfs-3g"),
        ("/mnt/covered/line", "tmpfs"),
        ("/mnt/c/line", "9p"),
    ],
)
def test_the_longest_and_last_mount_decides(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind
    journal = Path(path) / "journal.db"
    if kind in ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p"):
        with pytest.raises(Refusal, match=f"found {kind}.*local disk"):
            refuse_network_file_system(journal, MOUNTS)
    else:
        refuse_network_file_system(journal, MOUNTS)


@pytest.mark.parametrize("kind", ["lustre", "beegfs", "ceph", "smb3", "fuse.glusterfs", "fuse.rclone"])
def test_other_network_file_systems_are_refused(kind: str) -> None:
    with pytest.raises(Refusal, match=kind):
        refuse_network_file_system(Path("/line/journal.db"), f"x / {kind} rw 0 0\n")


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    mounts = f"x / ext4 rw 0 0\nserver:/ {tmp_path.resolve() / 'real'} nfs rw 0 0\n"
    with pytest.raises(Refusal, match="nfs"):
        refuse_network_file_system(tmp_path / "link" / "journal.db", mounts)
    refuse_network_file_system(tmp_path / "journal.db", mounts)


def test_this_machines_mounts_are_understood(tmp_path: Path) -> None:
    assert file_system_type(tmp_path.resolve(), Path("/proc/self/mounts").read_text()) is not None
