"""Notices: what a person who looks after a line should know now, given to the program that host.json names.

Each is one JSON object on the program's standard input (docs/reference/notices.md). The program runs beside the line,
in a session of its own and for a bounded time; whether it is there, fails, hangs or prints is told in run.log and
changes nothing else. Nothing here waits for it, except `finish` at the very end of a process, bounded too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from nstrain.base.disk import pretty_json
from nstrain.settings.model import Settings, dump

Event = Literal[
    "finished",
    "failed",
    "stuck",
    "watchdog_restart",
    "signal_restart",
    "disk_full",
    "waiting_data",
    "waiting_gpu",
    "preparer_failing",
    "mirror_failing",
    "supervisor_failed",
    "alarm",
]
"""What can be told."""

LIMIT_S = 60.0
"""How long the program may run before it is killed."""

LONGEST_TEXT = 8_000
"""Characters of a notice's text (its end is kept)."""

LONGEST_COMPLAINT = 500
"""Bytes of what a program printed last that are told when it fails."""


class Notice(Settings):
    """One event of one line, as the program of host.json's `notify` is given it."""

    format: Literal[1] = 1
    """Version of this form."""
    event: Event
    """What happened."""
    time: float
    """When, in unix seconds."""
    host: str
    """The machine's name."""
    line: str
    """The line's id (run.json); empty where that cannot be read."""
    run: str
    """The line's directory."""
    text: str
    """What happened and what is needed, for people."""
    update: int | None = None
    """The last update known to be finished."""
    tokens: int | None = None
    """The position after it."""
    checkpoint: str | None = None
    """The checkpoint that the line would go on from."""
    launches: int | None = None
    """Trainers launched since the supervisor started."""
    failures: int | None = None
    """Launches in a row that failed without progress."""


def notice(event: Event, line: str, run: Path, text: str, **known: int | str | None) -> Notice:
    """A notice of now; `known` are the fields that need not be known."""
    fields = {"event": event, "time": time.time(), "host": socket.gethostname(), "line": line, "run": str(run)}
    return Notice.model_validate(fields | {"text": text[-LONGEST_TEXT:]} | known)


@dataclasses.dataclass
class _Running:
    """A program that was given a notice."""

    process: subprocess.Popen[bytes]
    event: str
    kill_at: float
    output_fd: int
    said: bytes = b""

    def listen(self) -> None:
        """Take what it printed, so that it never waits for us; only the end is kept."""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self.output_fd, 1 << 16):
                self.said = (self.said + block)[-LONGEST_COMPLAINT:]


class Notifier:
    """Gives notices to the program; `look` must be called now and then, and `finish` once."""

    def __init__(self, program: str | None, tell: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        """`program` is a path, or None to tell nobody; `tell` gets a sentence when it fails."""
        self._program = None if program is None else os.path.expanduser(program)
        self._tell, self._limit_s = tell, limit_s
        self._running: list[_Running] = []

    def send(self, told: Notice) -> None:
        """Start the program on a notice. Never raises and never waits."""
        if self._program is None:
            return
        try:
            self._running.append(self._started(self._program, told))
        except Exception as error:  # a program that is missing or may not be run, no processes or no memory left
            self._tell(f"the notice {told.event!r} could not be given to {self._program}: {error}")

    def _started(self, program: str, told: Notice) -> _Running:
        # In memory, and not a pipe that a program which does not read would leave full, nor a file: a disk may be full.
        memory = os.memfd_create("notice")
        read_end, write_end = os.pipe()
        try:
            os.pwrite(memory, pretty_json(dump(told)), 0)
            process = subprocess.Popen(
                [program], stdin=memory, stdout=write_end, stderr=subprocess.STDOUT, start_new_session=True
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(memory)
            os.close(write_end)
        os.set_blocking(read_end, False)
        return _Running(process, told.event, time.monotonic() + self._limit_s, read_end)

    def look(self) -> None:
        """Take note of programs that have ended, and kill those that take too long."""
        for running in list(self._running):
            code = running.process.poll()
            running.listen()
            if code is not None or time.monotonic() >= running.kill_at:
                self._end(running, code)

    def _end(self, running: _Running, code: int | None) -> None:
        """Let go of a program that has ended with a code, or that is to be killed (None)."""
        self._running.remove(running)
        os.close(running.output_fd)
        what = f"the notice {running.event!r}: {self._program}"
        said = running.said.decode(errors="replace").strip()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(1.0)
            self._tell(f"{what} took longer than {self._limit_s:.0f} s and was killed")
        elif code != 0:
            self._tell(f"{what} ended with exit code {code}" + (f": {said}" if said else ""))

    def finish(self, wait_s: float = LIMIT_S) -> None:
        """Wait, bounded, until every program has ended; what has not by then is killed."""
        deadline = time.monotonic() + wait_s
        while self._running and time.monotonic() < deadline:
            self.look()
            time.sleep(0.02)
        for running in list(self._running):
            self._end(running, None)
