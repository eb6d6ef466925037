"""A pinned file is read only if it has the pinned bytes, before and after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nstrain.base.disk import sha256_file
from nstrain.data.readers.errors import ChangedFile, FileRefusal
from nstrain.data.readers.formats import read_rows
from nstrain.data.readers.rows import Row
from nstrain.data.sources import PinnedFile, SourceSettings, resolve_inside


def read_pinned(source: SourceSettings, file: PinnedFile, stratum: str) -> Iterator[Row]:
    """The rows of a pinned file; for strata by column, those of other strata than the named one have no text.

    Raises `ChangedFile` before the first row if the bytes are not the pinned ones (after the last if the file was
    written to in between), `BadUpload` or `MissingColumn` if they are no readable file of the source's format.
    """
    path = resolve_inside(source.root, file.path)
    only = stratum if source.rows.stratum_column is not None else None
    try:
        before = verify_pinned(path, file, source.name)
        yield from read_rows(source.rows, path, f"source {source.name}: {path}", only)
        if _stamp(path.stat()) != before:
            raise ChangedFile(f"source {source.name}: {path} was written to while it was read; {_remedy(file)}")
    except FileRefusal as error:
        error.found_in(source.name, file.path)
        raise


def verify_pinned(path: Path, file: PinnedFile, source: str) -> tuple[int, ...]:
    """Check a file's bytes against its pin, with bounded memory; returns a stamp that changes when it is written to.

    Raises `ChangedFile` if they differ or the file is not there; other errors of the operating system pass.
    """
    try:
        stamp = _stamp(path.stat())
        sha256 = sha256_file(path)
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ChangedFile(f"source {source}: {path} cannot be read ({error.strerror}); {_remedy(file)}") from None
    if size != file.size or sha256 != file.sha256:
        raise ChangedFile(
            f"source {source}: {path} has changed: pinned {file.size:,} bytes, found {size:,} with sha256 {sha256}; "
            f"{_remedy(file)}"
        )
    return stamp


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _remedy(file: PinnedFile) -> str:
    return (
        f"restore the file as it was when the line was made (sha256 {file.sha256}), or make a new line from the source "
        "as it is now"
    )
