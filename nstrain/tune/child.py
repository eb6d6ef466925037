"""Running one trial's process (trial.py) from outside: its job in, its report out, and an end of it whatever happens.

A trial may run out of memory, crash or hang in a kernel; nothing of that may end the tuner, so each gets a process of
its own, in a session of its own, that is killed with all it started when its time is up or the tuner is interrupted.
If the tuner itself is killed, the trial reads the end of its parent pipe and leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.logs import rotate
from nstrain.base.units import human_seconds
from nstrain.supervise.children import DeathPipe, describe_exit

TRIAL_COMMAND = (sys.executable, "-m", "nstrain.tune.trial")

LAST_BYTES = 8192
"""Of a dead trial's output this much of the end is searched for its last line."""

END_S = 30.0
"""How long a killed process may take to be gone: one that hangs in the driver never is."""

LEAVE_S = 10.0
"""How long a process that has reported may take to end by itself before it is killed."""

LOOK_S = 0.5
"""How often the time is looked at."""

_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
"""How a traceback's last part begins."""


class TrialFailed(NstrainError):
    """A trial that gave no measurement; the message says why."""

    def __init__(self, reason: str, out_of_memory: bool) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


def kernel_cache() -> str:
    """The directory of compiled Triton kernels that trials and trainer share: $TRITON_CACHE_DIR, or Triton's own."""
    own = Path(os.environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache"
    return os.environ.get("TRITON_CACHE_DIR") or str(own)


def run_trial(
    job: Mapping[str, Any],
    log: Path,
    limit_s: float,
    on_stage: Callable[[str], None] = lambda stage: None,
    command: Sequence[str] = TRIAL_COMMAND,
) -> dict[str, Any]:
    """Have a process do a job; its answer. What it prints is appended to `log`; `on_stage` is told what it does.

    Raises `TrialFailed` if it failed, died or took longer than `limit_s`, `Refusal` for settings that it refuses, and
    `NstrainError` if it cannot be started or killed.
    """
    with _Process(job, log, command) as process:
        return process.answer(limit_s, on_stage)


class _Process:
    def __init__(self, job: Mapping[str, Any], log: Path, command: Sequence[str]) -> None:
        self._parent = DeathPipe()
        self._report, report_end = os.pipe()
        self._log = log
        rotate(log)  # a trial's life has a limit, so it need not be done while it prints
        with log.open("ab") as output:
            self._log_start = output.tell()
            try:
                self._process = subprocess.Popen(
                    [*command, "--report-fd", str(report_end), "--parent-fd", str(self._parent.read_fd)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[report_end, self._parent.read_fd],
                    start_new_session=True,
                    env={**os.environ, "TRITON_CACHE_DIR": kernel_cache(), "PYTHONUNBUFFERED": "1"},
                )
            except OSError as error:
                self._parent.close()
                os.close(self._report)
                raise NstrainError(f"a trial's process cannot be started: {error}") from error
            finally:
                os.close(report_end)
        assert self._process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            self._process.stdin as stdin,
        ):  # then it has died, which is seen below
            stdin.write(json.dumps(job).encode())

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing of it is left running."""
        try:
            self._kill()
        finally:
            os.close(self._report)
            self._parent.close()

    def _kill(self) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise NstrainError(
                f"process {self._process.pid} of a trial was killed {END_S:.0f} s ago and is still there: it hangs in "
                "a driver and keeps its memory; it can be ended by a reset of the device or of the machine only"
            ) from None

    def answer(self, limit_s: float, on_stage: Callable[[str], None]) -> dict[str, Any]:
        """What it found; see `run_trial`."""
        deadline = time.monotonic() + limit_s
        found: dict[str, Any] = {}
        stage = "starting"
        for message in self._messages(deadline):
            if "stage" in message:
                stage = str(message["stage"])
                on_stage(stage)
            else:
                found = message
                break  # nothing follows: one that hangs on its way out keeps nobody until its time is up
        if found:  # a device's memory is free again only when the process has left it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        if "refused" in found:
            raise Refusal(found["refused"])
        if "failed" in found:
            raise TrialFailed(found["failed"], bool(found["out_of_memory"]))
        if found:
            return found
        try:  # the pipe has ended, or the time is up
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"not done after {human_seconds(limit_s)}, while {stage}", False) from None
        # The kernel kills a process that takes too much of a machine's memory; nobody else is expected to.
        raise TrialFailed(f"{describe_exit(code)}, while {stage}{self._last_line()}", code == -signal.SIGKILL)

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What the report pipe says until it ends or the time is up."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if not selector.select(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
                    continue
                data = os.read(self._report, 1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    def _last_line(self) -> str:
        """What it died of: the last error that it printed, else its last line, if it printed any.

        CUDA's errors go on after their own line, with hints that are the same for all of them.
        """
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - LAST_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR_LINE.match(line)]
        return f": {(errors or lines)[-1].strip()}" if lines else ""
