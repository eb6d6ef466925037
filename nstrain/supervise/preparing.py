"""The data line's preparer, kept at work as long as there is something to prepare.

A data line has one preparer, whoever's line or command it belongs to. If another process holds its lock, the
supervisor relies on that one and starts its own only when the lock is free. One that fails is started again after a
wait that grows with the failures in a row; it goes on with the same files, and the trainer with the cycles that are
ready. Whatever stopped it may pass - a source that is away, a token that has expired, a disk - so this goes on without
end, and is notified once a row of failures. Three things do not pass: a source that is used up and a file that cannot
be used (the preparer says so with an exit code of its own), and a preparer that is done although the trainer waits for
a cycle. Then no more data will come, which `failure` says and a notice, and the line ends once the trainer has used up
what is ready; if a person changes line.json before that - leaves the file out, say - the preparer is started again.

A preparer that finished is started again, once, should the trainer wait for a cycle (one that was deleted, say). While
none runs, cycles that every consumer is past are deleted here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nstrain.base.disk import read_json
from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.units import human_seconds
from nstrain.data.consumers import consumer_path
from nstrain.data.cycles import delete_consumed
from nstrain.data.line import DataLine
from nstrain.data.preparer import PreparerStatus, preparer_lock, read_status
from nstrain.line.paths import LinePaths
from nstrain.settings.run import RunSettings
from nstrain.supervise.children import PREPARER_PREFIX, Child, DeathPipe, describe_exit
from nstrain.supervise.failures import Ending
from nstrain.supervise.pace import Pace, step_of
from nstrain.supervise.report import Report

NOTICE_AFTER = 3
"""Failures in a row after which it is notified that the preparer keeps failing."""


class PreparerKeeper:
    """Keeps one data line prepared for one training line."""

    def __init__(
        self,
        paths: LinePaths,
        settings: RunSettings,
        command: Sequence[str],
        pipe: DeathPipe,
        pace: Pace,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` starts a preparer, up to its arguments."""
        self._paths, self._pipe, self._pace, self._report, self._clock = paths, pipe, pace, report, clock
        self._work, self._id = Path(settings.data.work), settings.id
        self._command = [*command, str(self._work), "--ahead", str(settings.data.ahead_cycles)]
        self._silence_s = settings.guards.watchdog_s
        self._preparer: Child | None = None
        self._finished_at = self._next_start = 0.0
        self._seen: tuple[PreparerStatus | None, float] = (None, 0.0)
        self._holder: int | None = None
        self._finished = False
        """Whether it ended well, so that there is no reason to start one."""
        self._fed_again = False
        """Whether it was started because the trainer waited, and the trainer has not gone on since."""
        self._failures = 0
        self._prepared = 0
        """Cycles that were prepared when it last failed."""
        self._consumer_seen: int | None = None
        self._line_seen: tuple[int, int] | None = None
        """What line.json was when the last preparer was started (`_line_stamp`)."""
        self.failure: Ending | None = None
        """Why no more data will come, if none will."""

    def watch(self, hungry: bool, wanted: bool) -> None:
        """Start, or take note of the end of, a preparer. Never waits.

        `hungry`: the trainer has waited for a cycle for some time. `wanted`: the line is not about to end.
        """
        if not hungry:
            self._fed_again = False
        self._forgive()
        if self._preparer is not None:
            code = self._preparer.poll()
            if code is None:
                self._end_silent(self._preparer, hungry)
                return
            self._ended(self._preparer, code, hungry)
        if self.failure is not None and not hungry and self._line_stamp() != self._line_seen:
            self._report.tell(f"{self._work / 'line.json'} was changed: the preparer is started again")
            self._report.update(reason=None)
            self.failure = None
        if self.failure is not None or not wanted:
            return
        if self._finished and self._clock() - self._finished_at < self._pace.fed_s:
            return
        if hungry and self._fed_again:
            self._fail(ExitCode.FAILED, "it is done, but the trainer still waits for a cycle", hungry)
        elif hungry or not self._finished:
            self._start()

    def running(self) -> bool:
        """Whether it runs one itself."""
        return self._preparer is not None

    def status(self) -> PreparerStatus | None:
        """What its preparer does, as it says itself; None if it runs none."""
        found = read_status(self._work) if self._preparer is not None else None
        return found if found is not None and self._preparer is not None and found.pid == self._preparer.pid else None

    def _start(self) -> None:
        """Start a preparer, unless it is too soon or another process is the data line's preparer now."""
        if self._clock() < self._next_start:
            return
        self._next_start = self._clock() + self._pace.preparer_retry_s
        lock = preparer_lock(self._work)
        if lock.held_elsewhere():
            if self._holder != lock.holder():
                self._holder = lock.holder()
                self._report.update(preparer_pid=self._holder)
                self._report.tell(f"{self._work} is prepared by process {self._holder} already; relying on it")
            return
        self._holder, self._line_seen = None, self._line_stamp()
        try:
            self._preparer = Child("preparer", self._command, self._pipe, self._paths.run_log, self._paths.root)
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        self._seen = (None, self._clock())
        self._report.update(preparer_pid=self._preparer.pid)

    def _end_silent(self, preparer: Child, hungry: bool) -> None:
        """Kill a preparer that has said nothing new for long while the trainer waits: it is started again."""
        status = self.status()
        if status != self._seen[0] or not hungry:
            self._seen = (status, self._clock())
        elif self._clock() - self._seen[1] > self._silence_s:
            self._seen = (status, self._clock())
            self._report.tell(f"the preparer has done nothing for {human_seconds(self._silence_s)}: SIGKILL")
            preparer.kill()

    def _ended(self, preparer: Child, code: int, hungry: bool) -> None:
        self._preparer = None
        self._report.update(preparer_pid=None)
        status = read_status(self._work)
        told = status if status is not None and status.pid == preparer.pid else None
        if code == ExitCode.DONE:
            self._finished, self._finished_at = True, self._clock()
            self._fed_again, self._failures = hungry, 0
            self._report.update(preparer_failures=0)
        elif told is None and preparer_lock(self._work).held_elsewhere():
            return  # it found another one at work, between our look and its own
        else:
            words = preparer.last_words(lambda line: line.startswith(PREPARER_PREFIX))
            error = told.error if told is not None and told.stage == "failed" else None
            what = error or f"it {describe_exit(code)}\n{words}".strip()
            if code == ExitCode.NEEDS_OPERATOR:
                self._fail(ExitCode.NEEDS_OPERATOR, what, hungry)
            else:
                self._failed(what)

    def _line_stamp(self) -> tuple[int, int] | None:
        """What tells line.json from what it was before a change."""
        try:
            found = (self._work / "line.json").stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _failed(self, what: str) -> None:
        """Count a failure and set the time of the next start."""
        self._forgive()
        self._prepared = _prepared_cycles(self._work)
        self._failures += 1
        wait_s = step_of(self._pace.preparer_backoff_s, self._failures)
        self._next_start = self._clock() + wait_s
        text = f"the preparer of {self._work} failed ({self._failures} in a row): {what}"
        self._report.tell(f"{text}; it is started again in {human_seconds(wait_s)}")
        self._report.update(preparer_failures=self._failures, preparer_failure=what)
        if self._failures == NOTICE_AFTER:
            self._report.notify("preparer_failing", f"{text}; it is tried again, the trainer waits when its data end")

    def _forgive(self) -> None:
        """Forget failures once a cycle has been prepared since: however long it ran, nothing less is progress."""
        if self._failures and _prepared_cycles(self._work) > self._prepared:
            self._failures = 0
            self._report.update(preparer_failures=0)

    def _fail(self, exit_code: ExitCode, what: str, hungry: bool) -> None:
        """Note that no more data will come, and why; it is notified while there is time, the line's end is anyway."""
        self.failure = Ending("failed", exit_code, f"the preparer of {self._work}: {what}", "failed")
        text = f"{self.failure.reason}; training goes on with the cycles that are ready"
        self._report.tell(text)
        self._report.update(reason=self.failure.reason)
        if not hungry:
            self._report.notify("preparer_failing", text)

    def delete_consumed(self, at_end: bool = False) -> None:
        """Delete cycles that every consumer is past, if it runs no preparer; looks only when our own entry moved."""
        if self._preparer is not None:
            return
        try:
            seen = os.stat(consumer_path(self._work, self._id)).st_mtime_ns
        except OSError:
            seen = None
        if seen == self._consumer_seen and not at_end:
            return
        self._consumer_seen = seen
        lock = preparer_lock(self._work)
        try:
            if not lock.try_acquire():
                return  # another process's preparer does it
            with lock:
                gone = delete_consumed(DataLine.open(self._work))
        except (NstrainError, OSError) as error:
            self._report.tell(f"consumed cycles could not be deleted: {error}")
            return
        if gone:
            self._report.tell(f"deleted consumed cycle{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}")

    def end(self) -> None:
        """End its preparer, which may be killed at any time."""
        if self._preparer is None:
            return
        self._preparer.send(signal.SIGCONT)  # somebody may have stopped it
        if self._preparer.end(self._pace.preparer_grace_s) is None:
            self._report.tell(f"preparer {self._preparer.pid} does not end, not even by SIGKILL; it is left behind")
        self._preparer = None
        self._report.update(preparer_pid=None)


def _prepared_cycles(work: Path) -> int:
    """How many cycles were ever prepared; 0 if that cannot be read."""
    try:
        return int(read_json(work / "state.json").get("prepared_cycles", 0))
    except (NstrainError, AttributeError, TypeError, ValueError):
        return 0
