"""What is wrong with a journal, in words: SQLite's errors, damaged rows, and what to do about each.

A damaged row is none of the line's any more once the line was rolled back to before it; its updates are then trained
again. What lies deeper (SQLite's own pages, the head, the parent's rows in a branch) only a copy mends.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.disk import PARTIAL_SUFFIX, disk_full_is_named
from nstrain.base.errors import NstrainError, Refusal
from nstrain.line.paths import LinePaths, parse_checkpoint_name

BUSY_TIMEOUT_S = 10.0
"""How long a statement waits for a lock of another process (held for moments, during recovery and checkpoints)."""

FROM_A_COPY = "put the journal back from a copy"

_FROM_OUTSIDE = frozenset(
    {
        "access permission denied", "attempt to write a readonly database", "interrupted",
        "large file support is disabled", "locking protocol", "unable to open database file",
    }
)  # fmt: skip
"""SQLite's errors of operation that say nothing of the file's content."""


class NotSqlite(Refusal):
    """SQLite cannot make sense of what it read; `reason` has its words."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: expected a journal, found something else ({reason}); {FROM_A_COPY}")
        self.reason = reason


class RowDamage(Exception):
    """What of a row is damaged; whoever knows its update makes a refusal of it."""


@contextlib.contextmanager
def unreadable_named() -> Iterator[None]:
    """What names and readings without checksums may come to. Raises `RowDamage`."""
    try:
        yield
    except (struct.error, ValueError, TypeError, OverflowError):
        raise RowDamage("cannot be read") from None


def log_of(path: Path) -> Path:
    """SQLite's write-ahead log of a journal."""
    return path.with_name(path.name + "-wal")


def damaged(path: Path, what: str, back_to_before: int | None = None) -> Refusal:
    """The refusal of a journal of which `what` is damaged.

    `back_to_before` is given if the line as it stands is sound up to that update: the remedy is then a rollback to the
    newest checkpoint before it, if there is one.
    """
    remedy = FROM_A_COPY
    if back_to_before is not None:
        checkpoint = _checkpoint_before(path, back_to_before)
        if checkpoint is not None:
            command = typed("nstrain", "rollback", os.path.abspath(path.parent), "--to", checkpoint)
            remedy += f", or train from update {checkpoint} on again: `{command}`"
        else:
            remedy += " (no checkpoint is left from before it to go back to)"
    return Refusal(f"{path}: {what}: damaged on the disk or in memory; {remedy}")


def _checkpoint_before(path: Path, update: int) -> int | None:
    """The newest checkpoint before an update that a journal's line can be rolled back to."""
    paths = LinePaths(path.parent)
    try:
        latest = parse_checkpoint_name(paths.latest.read_text(errors="replace").strip())
        updates = paths.checkpoint_updates()
    except OSError:
        return None
    return max((found for found in updates if found < update and (latest is None or found <= latest)), default=None)


@contextlib.contextmanager
def sqlite_errors_named(path: Path, writing: bool) -> Iterator[None]:
    """Say what SQLite's errors mean for the journal at `path`."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
        raise  # a bug
    except UnicodeDecodeError as error:  # in a name that SQLite quotes
        raise NotSqlite(path, "names that are no text") from error
    except MemoryError as error:  # SQLite asked for what a damaged length says
        raise NotSqlite(path, "a length beyond this machine's memory") from error
    except sqlite3.DatabaseError as error:
        text = str(error)
        if text in ("database or disk is full", "disk I/O error"):
            if writing:
                with disk_full_is_named(path):
                    _try_to_write_beside(path)
            raise NstrainError(f"{path}: {text}; look into the system's log for the state of the disk") from error
        if text == "database is locked":
            raise NstrainError(
                f"{path}: locked by another process for more than {BUSY_TIMEOUT_S:.0f} s; end what writes it "
                "(only the line's trainer may) and run the same command again"
            ) from error
        if isinstance(error, sqlite3.OperationalError) and text in _FROM_OUTSIDE:
            raise NstrainError(f"{path}: {text}") from error
        raise NotSqlite(path, text) from error


def _try_to_write_beside(path: Path) -> None:
    """Raise the system's own error if no room, a quota or a size limit keeps the journal from growing.

    SQLite reports a quota and a size limit as "disk I/O error", as it does for a broken disk.
    """
    probe = path.with_name(path.name + ".probe" + PARTIAL_SUFFIX)
    end = max((file.stat().st_size for file in (path, log_of(path)) if file.exists()), default=0)
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        block = memoryview(bytes(1 << 16))
        while block:
            written = os.pwrite(fd, block, end + (1 << 16) - len(block))
            block = block[written:]
        os.fsync(fd)
    finally:
        os.close(fd)
        probe.unlink()
