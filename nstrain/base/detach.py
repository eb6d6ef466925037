"""The start in the background: a process that has no terminal, in a session of its own, and a report of how it began.

The process that the person started waits until the one in the background says that nothing can be refused any more
(one byte through a pipe), or ends; so a refusal is seen in the terminal, where it can be acted on. From then on the two
have nothing in common: standard input is /dev/null, what the process prints goes to a file, every other descriptor is
closed, and signals of the terminal do not reach another session. Whether the login's end does is another matter
(nstrain/supervise/login.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nstrain.base.errors import NstrainError
from nstrain.base.logs import rotate

READY = b"R"
LAST_WORDS_BYTES = 8 << 10


@dataclasses.dataclass(frozen=True)
class Begun:
    """How a process in the background began."""

    pid: int
    exit_code: int | None
    """How it ended before it was ready; None if it is."""
    words: str
    """What it printed."""


def start_in_background(command: Sequence[str], output: Path, limit_s: float = 600.0) -> Begun:
    """Start `command --ready-fd N`, and wait until it is ready or has ended. Its output is appended to a file.

    Raises `NstrainError` if it cannot be started, or says neither within `limit_s`, and `OSError` if its output cannot
    be written.
    """
    rotate(output)
    output.open("ab").close()  # one that may not be written is told as that file's error
    ready, ready_end = os.pipe()
    try:
        with output.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [*command, "--ready-fd", str(ready_end)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[ready_end],
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
    except OSError as error:
        os.close(ready)
        raise NstrainError(f"{command[0]} cannot be started in the background: {error}") from error
    finally:
        os.close(ready_end)
    try:
        if not select.select([ready], [], [], limit_s)[0]:
            raise NstrainError(f"process {process.pid} is not ready after {limit_s:.0f} s; {output} may say why")
        said = os.read(ready, 1)
    finally:
        os.close(ready)
    code = None if said == READY else process.wait()
    process.returncode = code if code is not None else 0  # it is not ours to wait for any more
    with output.open("rb") as file:
        file.seek(begin)
        return Begun(process.pid, code, file.read(LAST_WORDS_BYTES).decode(errors="replace").strip())


def say_ready(ready_fd: int | None) -> None:
    """Tell whoever waits for this process that it is ready; it need not be there any more."""
    if ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(ready_fd, READY)
            os.close(ready_fd)
