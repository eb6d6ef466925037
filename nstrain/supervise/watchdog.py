"""The watchdog: when a trainer hangs, and how it is ended.

A trainer beats its heartbeat from work that is completed - an update whose loss has come back from the device, a row
validated, a checkpoint on disk - and says with each beat within how many seconds the next one comes. What is counted
against that is this process's own time, a look at a time: a machine that was asleep, a clock that was set and a
supervisor that was itself stopped for a while make nobody late.

One that is late is asked for its stacks (SIGUSR1: faulthandler prints them to run.log without the interpreter's help),
then to end (SIGTERM, and SIGCONT should somebody have stopped it), then killed. Any beat in between is life: then it is
left to save and end, under the same budgets. A process that outlives its SIGKILL hangs in the kernel, most often in a
driver, and keeps its memory and its lease; nothing must be started beside it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from nstrain.base.process import state_of
from nstrain.base.units import human_seconds
from nstrain.line.state_files import Heartbeat
from nstrain.supervise.children import Child
from nstrain.supervise.pace import Pace

DUMP_SIGNAL = signal.SIGUSR1
"""A trainer prints the stacks of all its threads when it gets this one."""

LONGEST_LOOK_S = 5.0
"""What lies between two looks counts no longer than this."""


class Watchdog:
    """Watches one trainer's heartbeat."""

    def __init__(self, pid: int, start_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`start_s` is how long the trainer may take to its first beat."""
        self._pid, self._clock = pid, clock
        self._beat: Heartbeat | None = None
        self._budget_s = start_s
        self._silent_s = 0.0
        self._looked_at = clock()

    def look(self, beat: Heartbeat | None) -> str | None:
        """Take in the heartbeat as it is now; what is late, in words, or None."""
        now = self._clock()
        self._silent_s += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        if beat is not None and beat.pid == self._pid and beat != self._beat:
            self._beat, self._silent_s = beat, 0.0
            if beat.budget_s is not None:
                self._budget_s = beat.budget_s
        if self._silent_s <= self._budget_s:
            return None
        where = "since it was started" if self._beat is None else f"in stage {self._beat.stage}"
        return f"the trainer hangs: no heartbeat for {human_seconds(self._silent_s)} {where}"


class PutDown:
    """The steps that end a trainer which hangs; `step` takes the next one when it is due and never waits."""

    def __init__(self, trainer: Child, pace: Pace, tell: Callable[[str], None]) -> None:
        """Asks for the stacks at once."""
        self._trainer, self._pace, self._tell = trainer, pace, tell
        self._next: str = "term"
        self._due = time.monotonic() + pace.dump_s
        trainer.send(DUMP_SIGNAL)

    @property
    def asked(self) -> bool:
        """Whether it has been asked to end."""
        return self._next != "term"

    def step(self) -> str | None:
        """Go on, if the next step is due; once all have failed, what became of the trainer, in words."""
        if time.monotonic() < self._due:
            return None
        pid = self._trainer.pid
        if self._next == "term":
            self._tell(f"SIGTERM to trainer {pid}, which hangs; its stacks are in run.log")
            self._trainer.send(signal.SIGTERM)
            self._trainer.send(signal.SIGCONT)
            self._next, self._due = "kill", time.monotonic() + self._pace.term_grace_s
        elif self._next == "kill":
            self._tell(f"SIGKILL to trainer {pid}: SIGTERM did not end it in {human_seconds(self._pace.term_grace_s)}")
            self._trainer.kill()
            self._next, self._due = "stuck", time.monotonic() + self._pace.kill_wait_s
        elif self._next == "stuck":
            return (
                f"trainer {pid} is still there {human_seconds(self._pace.kill_wait_s)} after SIGKILL "
                f"({state_of(pid)}): it hangs in the kernel, most likely in a driver, and keeps what it holds. Nothing "
                "is launched beside it; reset the device or restart the machine, then run the same command again"
            )
        return None
