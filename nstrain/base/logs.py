"""Logs that grow for months: run.log, which several processes append to at once, and their rotation.

One process of a log renames it when it has grown too large (of run.log the supervisor, of its own log a preparer in the
background); those whose standard output is the file that was renamed look now and then whether the name stands for
another file than theirs, and change over. No line is lost or cut: until then they write to the old file's end. One old
log is kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from pathlib import Path

ROTATE_BYTES = 256 << 20
"""A log that is larger is rotated."""

OLD_SUFFIX = ".1"
"""Ends the name of the log before the present one."""

FOLLOW_S = 10.0
"""How often a child looks whether its log was rotated."""


def old_log(log: Path) -> Path:
    """Where the log before this one lies."""
    return log.with_name(log.name + OLD_SUFFIX)


def rotate(log: Path, larger_than: int = ROTATE_BYTES) -> bool:
    """Put a log aside if it has grown too large, replacing the one put aside before; whether it was."""
    with contextlib.suppress(OSError):  # it is looked at again
        if log.stat().st_size > larger_than:
            os.replace(log, old_log(log))
            log.touch()
            return True
    return False


def write_whole_lines() -> None:
    """Have what this process prints come line by line, each with one write, so that no other's line gets into it.

    What the locale cannot show is replaced: a process must not end of it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True, write_through=False)


class FollowedLog:
    """This process's standard output and error, kept on the file that has the log's name."""

    def __init__(self, log: Path) -> None:
        """Does nothing for a process whose output is something else than this log."""
        self._log = log
        self._followed = [fd for fd in (1, 2) if self._same(fd)]

    @classmethod
    def of_output(cls) -> FollowedLog:
        """The log that this process's standard output is now, whatever its name."""
        return cls(Path(os.readlink("/proc/self/fd/1")))

    def _same(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._log.stat())
        except OSError:
            return False

    def look(self) -> bool:
        """Change over to the new file, if the log was rotated; whether it was."""
        if not self._followed or self._same(self._followed[0]):
            return False
        try:
            new = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return False  # no descriptor, no directory: the old file will do
        for fd in self._followed:
            os.dup2(new, fd)
        os.close(new)
        return True

    def follow(self, every_s: float | None = None, rotates: bool = False) -> None:
        """Look every now and then (FOLLOW_S) in a thread, for the process's life.

        With `rotates` this is the process that puts the log aside when it has grown too large.
        """
        if self._followed:
            arguments = (FOLLOW_S if every_s is None else every_s, rotates)
            threading.Thread(target=self._follow, args=arguments, name="log follower", daemon=True).start()

    def _follow(self, every_s: float, rotates: bool) -> None:
        never = threading.Event()
        while not never.wait(every_s):
            if rotates:
                rotate(self._log)
            self.look()
