"""The lease of a GPU: one process at a time may take its memory as its own.

A `flock` on a file named by the card's UUID (of a MIG slice: the slice's), in a directory of this host that every user
can write to. The kernel gives it back when its holder is gone, even by SIGKILL, and a process that hangs in the driver
rightly keeps it. The file is never removed: two holders could then lock two files. It binds those who ask for it;
containers that share no such directory, and programs that know nothing of it, are seen as other processes on the card
only."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from nstrain.base.disk import FileLock
from nstrain.base.errors import NstrainError, Refusal

LEASES = "nstrain-gpu"
"""The directory of the leases, inside the first usable of LEASE_ROOTS."""

LEASE_ROOTS = (Path("/run/lock"), Path("/tmp"))
"""Local to the host; which one it is must not depend on who asks."""


def lease_directory() -> Path:
    """Where the leases of this host's cards are, whoever asks."""
    open_to_all = (root for root in LEASE_ROOTS if root.is_dir() and root.stat().st_mode & stat.S_IWOTH)
    return next(open_to_all, LEASE_ROOTS[-1]) / LEASES


def lease_key(uuid: str) -> str:
    """The card's key: its UUID without the kind that NVML puts before it and torch does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def gpu_lease(uuid: str, directory: Path | None = None) -> FileLock:
    """The lease of a card, not taken yet: `with gpu_lease(uuid).acquire("GPU ...", wait_s):`.

    Raises `NstrainError` if the directory or the file cannot be made or written.
    """
    if not re.fullmatch(r"[0-9A-Za-z-]+", uuid):
        raise NstrainError(f"expected a GPU's UUID of letters, digits and hyphens, found {uuid!r}")
    directory = directory or lease_directory()
    path = directory / f"{lease_key(uuid)}.lock"
    try:
        # Not sticky: in a sticky directory the kernel may refuse to open a file of another user (fs.protected_regular).
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's, who has opened it to all
            directory.chmod(0o777)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, 0o666)  # whatever the umask is
        finally:
            os.close(fd)
    except OSError as error:
        raise NstrainError(
            f"the lease of GPU {uuid} cannot be opened ({error}); {directory} must be a directory that every user of "
            "this host's GPUs can write to"
        ) from error
    return FileLock(path)


def this_gpu() -> str:
    """The UUID of the card that torch uses in this process; makes CUDA ready in it."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def refuse_other_gpu(leased: str, used: str) -> None:
    """Raise `Refusal` unless the GPU that torch uses is the one that was leased."""
    if lease_key(leased) != lease_key(used):
        raise Refusal(
            f"torch uses GPU {used}, but by CUDA_VISIBLE_DEVICES the lease of {leased} was taken: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPU by its UUID in CUDA_VISIBLE_DEVICES"
        )
