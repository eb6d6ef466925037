"""Requests to stop a line: signals to its supervisor, and the STOP file.

Signals are taken note of and answered later, between two steps: the first is passed to the trainer as one SIGTERM,
further ones change nothing. A STOP file the trainer sees itself; here it ends waits, and tells what the trainer's end
means. One that names a data cycle asks for nothing before that cycle's end.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from nstrain.base.errors import ExitCode
from nstrain.line.checkpoint import newest_state
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_stop
from nstrain.supervise.children import Child

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """What a line has been asked for since its supervisor started."""

    def __init__(self, paths: LinePaths, tell: Callable[[str], None]) -> None:
        self._paths, self._tell = paths, tell
        self._signals: list[int] = []
        self._answered = 0

    @property
    def signals(self) -> int:
        """How many signals have come."""
        return len(self._signals)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take signals as requests to stop; one that was ignored when we were started (nohup) stays ignored.

        In the main thread only.
        """
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        taken = [number for number in STOP_SIGNALS if before[number] is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, lambda found, _: self._signals.append(found))
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def answer(self, trainer: Child) -> None:
        """Pass the first signal on to the trainer; say of the others that it is on its way."""
        while self._answered < len(self._signals):
            name = signal.Signals(self._signals[self._answered]).name
            self._answered += 1
            if self._answered == 1:
                self._tell(f"{name}: stopping with a checkpoint at the next update boundary")
                trainer.ask_to_stop()
            else:
                self._tell(
                    f"{name}: still waiting for the trainer to save and end (`kill -9 {trainer.pid}` would lose the "
                    "updates since its newest checkpoint)"
                )

    def asked(self) -> bool:
        """Whether the line is to stop now, while no trainer of it runs."""
        return bool(self._signals) or self.asked_by_file(None)

    def asked_by_file(self, code: int | None) -> bool:
        """Whether the STOP file asks the line to end, of whose trainer this is the exit code (None: none runs)."""
        request = read_stop(self._paths)
        if request is None or request.at_cycle_end is None:
            return request is not None
        return code == ExitCode.STOPPED and not self.cycle_end_to_come()

    def cycle_end_to_come(self) -> bool:
        """Whether the line is asked to stop at the end of a cycle that is to come, by the checkpoint to go on from."""
        request = read_stop(self._paths)
        if request is None or request.at_cycle_end is None:
            return False
        newest = newest_state(self._paths, warn=lambda message: None)
        return newest is None or int(newest[1]["position"]["cycle"]) <= request.at_cycle_end

    def by_whom(self) -> str:
        """Who asked the line to stop, for people."""
        if self._signals:
            return f"stopped by {signal.Signals(self._signals[0]).name}"
        request = read_stop(self._paths)
        if request is None:
            return "stopped by a signal to the trainer that did not come from its supervisor"
        if request.at_cycle_end is not None:
            return f"stopped at the end of cycle {request.at_cycle_end}, as asked"
        return "stopped by the file STOP" if request.by_pid is None else f"stopped by process {request.by_pid}"
