"""A file system of a few MiB, as only a user who may mount one can have it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[Path]:
    """Mount one on a new directory for the length of a block."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only a user who may mount file systems can have a small one")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path, leave_bytes: int) -> Path:
    """Take the room of a disk but for so many bytes (to the page); the file that takes it."""
    filler = directory / "filler"
    with filler.open("ab") as file:
        while (free := shutil.disk_usage(directory).free) > leave_bytes:
            try:
                file.write(b"\0" * min(1 << 20, free - leave_bytes))
                file.flush()
            except OSError:
                break
    return filler
