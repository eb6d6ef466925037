"""The supervisor's children: how they are started, told that their parent is gone, and what they said last.

Each child holds the read end of one pipe, whose write end the supervisor alone holds: when the supervisor dies, even by
`kill -9`, the kernel closes it and every child reads the end of the file. The write end closes on exec, so no child can
keep it open for another one. Children run in sessions of their own, so that Ctrl-C in a terminal reaches the supervisor
alone; it passes the request on once. A child's session ends with it: what it started and left behind is killed before
its number can be given to another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nstrain.base.logs import old_log
from nstrain.gpu.readings import LINE_VARIABLE

TAIL_LINES = 12
TAIL_BYTES = 64 << 10
"""How much of a log's end is looked at for a child's last words."""

ERROR_BEGINNINGS = (
    *(f"{name}: " for name in ("failed", "bad_configuration", "needs_operator", "disk_full", "gpu_taken")),
    "Traceback (most recent call last)",
)
"""How a child begins to tell why it ends."""

SUPERVISOR_PREFIX, PREPARER_PREFIX, MIRROR_PREFIX = "supervisor: ", "preparer: ", "mirror: "

OTHERS_PREFIXES = (SUPERVISOR_PREFIX, PREPARER_PREFIX, MIRROR_PREFIX)
"""What the lines of run.log begin with that are not the trainer's."""


class DeathPipe:
    """The pipe whose end tells the children that this process is gone."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec; a child is given the read end by number

    def close(self) -> None:
        """Tell the children, as this process's death would."""
        os.close(self.read_fd)
        os.close(self._write_fd)


class Child:
    """A child process whose output goes to the line's run.log."""

    def __init__(self, name: str, command: Sequence[str], pipe: DeathPipe, log: Path, line: Path) -> None:
        """Start `command --parent-fd N` for a line, its output appended to `log`.

        Raises `OSError` if it cannot be started.
        """
        self.name = name
        self.log = log
        # Not unbuffered: then each line would be two writes (the children see to it that it is one).
        environment = {**os.environ, "PYTHONUNBUFFERED": "", LINE_VARIABLE: str(line)}
        with log.open("ab") as output:
            self._log_start, self._log_inode = output.tell(), os.fstat(output.fileno()).st_ino
            self._process = subprocess.Popen(
                [*command, "--parent-fd", str(pipe.read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[pipe.read_fd],
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""
        if self._process.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._kill_session()  # while its number is still its own
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        """Send SIGTERM: a request, after which it saves and ends."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it and to whatever it has started."""
        if self._process.returncode is None:
            self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_s: float) -> int | None:
        """Ask it to stop, and kill it if it has not within `grace_s`; its exit code, or None if it outlives that."""
        self.ask_to_stop()
        if self.wait(grace_s) is None:
            self.kill()
        return self.wait(grace_s)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, if it ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def last_words(self, is_its: Callable[[str], bool]) -> str:
        """The end of what it said, of the log's lines that are its own: from its error on, if it told one."""
        try:
            text = self._said().decode(errors="replace")
        except OSError as error:
            return f"(its log cannot be read: {error})"
        lines = [line.rstrip() for line in text.splitlines() if line.strip() and is_its(line)]
        errors = [number for number, line in enumerate(lines) if line.startswith(ERROR_BEGINNINGS)]
        lines = lines[errors[-1] :] if errors else lines
        return "\n".join(lines[-TAIL_LINES:])

    def _said(self) -> bytes:
        """The end of what the log has gained since it was started; the log may have been rotated since."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            rotated = os.fstat(file.fileno()).st_ino != self._log_inode
            file.seek(max(0 if rotated else self._log_start, end - TAIL_BYTES))
            said = file.read()
        if rotated:
            with contextlib.suppress(OSError), old_log(self.log).open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                said = file.read() + said
        return said


def describe_exit(code: int) -> str:
    """An exit code in words: `ended with exit code 1`, `was killed by SIGKILL (...)`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (sent by a person, or by the kernel for lack of memory: see `dmesg`)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def write_log_line(log: Path, text: str) -> None:
    """Append a line of the supervisor's own to run.log; a full disk must not end a line that still trains."""
    with contextlib.suppress(OSError), log.open("a", errors="replace") as file:
        file.write(f"{SUPERVISOR_PREFIX}{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
