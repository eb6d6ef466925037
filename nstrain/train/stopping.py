"""Who may ask the trainer to stop: a signal, the STOP file, and the end of its parent.

Each is looked at between two updates; the trainer then saves and leaves.
"""

from __future__ import annotations

import os
import select
import signal
import time

from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_stop, stop_requested

_LOOK_S = 0.1
"""How long a wait goes on before it looks for a request again."""


class StopRequests:
    """Requests to stop this process. Made first of all in a trainer, so that none is missed while it starts."""

    def __init__(self, paths: LinePaths, parent_fd: int | None) -> None:
        """`parent_fd` is the read end of a pipe whose write end only the parent holds; None without a parent."""
        self._paths = paths
        self._parent_fd = parent_fd
        self._signal: str | None = None

    def catch_signals(self) -> None:
        """Take SIGTERM and SIGINT as requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self._signal = signal.Signals(number).name

    def reason(self) -> str | None:
        """Why the trainer should stop now, or None."""
        if self._signal is not None:
            return self._signal
        if self.parent_gone():
            return "the parent process is gone"
        return "STOP file" if stop_requested(self._paths) else None

    def cycle_end(self) -> int | None:
        """The data cycle at whose end the trainer is asked to stop, or None."""
        request = read_stop(self._paths)
        return None if request is None else request.at_cycle_end

    def reason_at(self, cycle: int) -> str | None:
        """Why the trainer should stop before it trains a row of a cycle, or None."""
        last = self.cycle_end()
        if last is not None and cycle > last:
            return f"cycle {last} is done, at whose end it was asked to stop"
        return self.reason()

    def parent_gone(self) -> bool:
        """Whether the process that started this one has ended."""
        if self._parent_fd is None or not select.select([self._parent_fd], [], [], 0)[0]:
            return False
        return os.read(self._parent_fd, 1) == b""

    def wait(self, seconds: float) -> bool:
        """Sleep, but not past a request; says whether there is one."""
        deadline = time.monotonic() + seconds
        while self.reason() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK_S))
        return True
