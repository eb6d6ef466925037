"""The journal's mirror, kept at work beside a line that names a tracker.

The mirror (nstrain.mirror) copies the journal to a service that may be away for days, through a client that may hang or
die. So it is a process that nothing waits for: one that ends is started again after a wait that grows with the failures
in a row, and one that gives no sign of life for guards.watchdog_s (`Pace.mirror_silence_s` at least) is killed first,
which may happen at any instant. A service that does not answer, or refuses, it bears by itself and tells in
wandb_run.json. Neither ends a line or holds it up; what lasts for `Pace.mirror_notice_s` is notified once, whichever of
the two it is.

If another process holds the mirror's lock - `nstrain mirror RUN` in a terminal, or one that a killed supervisor left
behind and that is about to end - this one relies on it, and starts its own when the lock is free.

At the line's end the mirror gets some time to send the last rows. What it has not sent by then is in the journal:
`nstrain mirror RUN` sends it, or the next `nstrain run`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from nstrain.base.commands import typed
from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.units import human_seconds
from nstrain.line.paths import LinePaths
from nstrain.mirror.state import MirrorState, read_state
from nstrain.settings.run import RunSettings
from nstrain.supervise.children import MIRROR_PREFIX, Child, DeathPipe, describe_exit
from nstrain.supervise.pace import Pace, step_of
from nstrain.supervise.report import Report


class MirrorKeeper:
    """Keeps one line's journal copied; does nothing for a line without a tracker."""

    def __init__(
        self,
        paths: LinePaths,
        settings: RunSettings,
        command: Sequence[str],
        pipe: DeathPipe,
        pace: Pace,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`command` starts a mirror, up to its arguments; `wall` are unix seconds, by which the mirror tells times."""
        self._paths, self._pipe, self._pace, self._report = paths, pipe, pace, report
        self._clock, self._wall = clock, wall
        self._tracker = settings.tracker
        self._silence_s = max(settings.guards.watchdog_s, pace.mirror_silence_s)
        self._command = [*command, str(paths.root)]
        self._mirror: Child | None = None
        self._started_at = self._next_start = self._next_look = 0.0
        self._holder: int | None = None
        self._failures = 0
        self._failing_since: float | None = None
        """Unix time of the first failure of the row."""
        self._failure = ""
        """What the last one was, in words."""
        self._seen: MirrorState | None = None
        self._looked_at = self._silent_s = 0.0
        self._notified = False
        """Whether the present trouble has been notified."""

    def watch(self) -> None:
        """Start, or take note of the end of, a mirror, and look how it gets on. Never waits and never raises."""
        if self._tracker is None:
            return
        if self._mirror is not None and (code := self._mirror.poll()) is not None:
            self._ended(self._mirror, code)
        if self._mirror is None:
            self._start()
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + self._pace.mirror_look_s
            self._look(now)

    def running(self) -> bool:
        """Whether it runs one itself."""
        return self._mirror is not None

    def _start(self) -> None:
        """Start a mirror, unless it is too soon, nothing is recorded yet, or another process is the mirror now."""
        now = self._clock()
        if now < self._next_start:
            return
        self._next_start = now + self._pace.mirror_look_s
        try:
            if not self._paths.journal.exists():
                return
            lock = FileLock(self._paths.mirror_lock)
            if lock.held_elsewhere():
                if self._holder != lock.holder():
                    self._holder = lock.holder()
                    self._report.tell(f"process {self._holder} copies the journal already; relying on it")
                return
            self._holder = None
            self._mirror = Child("mirror", self._command, self._pipe, self._paths.run_log, self._paths.root)
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        self._started_at = self._looked_at = now
        self._seen, self._silent_s = None, 0.0
        self._report.update(mirror_pid=self._mirror.pid)

    def _ended(self, mirror: Child, code: int) -> None:
        """Take note of an end that nobody here asked for."""
        self._mirror = None
        self._report.update(mirror_pid=None)
        said = mirror.last_words(lambda line: line.startswith(MIRROR_PREFIX)) if code > 0 else ""
        last = said.rpartition("\n")[2].removeprefix(MIRROR_PREFIX)
        self._failed(f"it {describe_exit(code)}" + (f" ({last})" if last else ""))

    def _failed(self, what: str) -> None:
        """Count a failure and set the time of the next start; the same again is not told again."""
        self._failures += 1
        self._failing_since = self._wall() if self._failing_since is None else self._failing_since
        wait_s = step_of(self._pace.mirror_backoff_s, self._failures)
        self._next_start = self._clock() + wait_s
        self._report.update(mirror_failures=self._failures, mirror_failure=what)
        if what != self._failure:
            self._failure = what
            row = f" ({self._failures} in a row)" if self._failures > 1 else ""
            again = f"it is started again in {human_seconds(wait_s)}, the line goes on"
            self._report.tell(f"the journal's mirror failed{row}: {what}; {again}")

    def _look(self, now: float) -> None:
        """Look at how the mirror gets on: whether it lives, and for how long nothing has arrived."""
        state = self._state()
        if self._mirror is not None:
            self._hear(self._mirror, state, now)
        troubles = []
        if state is not None and state.failing_since is not None:
            troubles.append((state.failing_since, state.error or "it does not say why"))
        if self._failing_since is not None:
            troubles.append(
                (self._failing_since, f"its process failed {self._failures} times, the last: {self._failure}")
            )
        if not troubles:
            self._notified = False
            return
        since, what = min(troubles)
        if not self._notified and self._wall() - since >= self._pace.mirror_notice_s:
            self._notified = True
            self._report.notify(
                "mirror_failing",
                f"for {human_seconds(self._wall() - since)} nothing has been found to arrive on the line's tracker: "
                f"{what}. It is tried again without end; the line goes on, and nothing is lost",
            )

    def _state(self) -> MirrorState | None:
        """What its own mirror says of itself; None if it says nothing, or nothing that can be read."""
        if self._mirror is None:
            return None
        try:
            state = read_state(self._paths)
        except (NstrainError, OSError):  # the mirror refuses it as well, and says how to mend it
            return None
        return state if state is not None and state.pid == self._mirror.pid else None

    def _hear(self, mirror: Child, state: MirrorState | None, now: float) -> None:
        """Take in what a mirror says. One that says nothing new for long is killed; that a machine slept is no reason.

        Failures are forgotten once one still gives a sign of life longer after its start than any wait between two.
        """
        self._silent_s += min(now - self._looked_at, 2 * self._pace.mirror_look_s)
        self._looked_at = now
        if state is not None and state != self._seen:
            self._seen, self._silent_s = state, 0.0
            if self._failures and now - self._started_at > self._pace.mirror_backoff_s[-1]:
                self._failures, self._failing_since, self._failure = 0, None, ""
                self._report.update(mirror_failures=0)
        elif self._silent_s > self._silence_s:
            self._silent_s = 0.0
            self._report.tell(f"the journal's mirror has done nothing for {human_seconds(self._silence_s)}: SIGKILL")
            mirror.kill()

    def end(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Have its mirror send what is there and end; killed if that takes long, or once somebody is `hurried`."""
        if self._mirror is None:
            return
        mirror, self._mirror = self._mirror, None
        self._report.update(waiting_for="the tracker to take the last rows", waiting_since=self._wall())
        mirror.ask_to_stop()
        mirror.send(signal.SIGCONT)  # somebody may have stopped it
        deadline = self._clock() + self._pace.mirror_grace_s
        while (code := mirror.wait(self._pace.tick_s)) is None and not hurried() and self._clock() < deadline:
            pass
        rest = f"nothing is lost: `{typed('nstrain', 'mirror', self._paths.root)}` sends the rest, or the next run"
        if code is None:
            why = "a signal came" if hurried() else f"it took longer than {human_seconds(self._pace.mirror_grace_s)}"
            self._report.tell(f"the journal's mirror was still sending when {why}: SIGKILL; {rest}")
            mirror.kill()
            if mirror.wait(self._pace.kill_wait_s) is None:
                self._report.tell(f"mirror {mirror.pid} does not end, not even by SIGKILL; it is left behind")
        elif code not in (ExitCode.DONE, ExitCode.STOPPED):
            self._report.tell(f"the journal's mirror {describe_exit(code)} at the end; {rest}")
        self._report.update(mirror_pid=None, waiting_for=None, waiting_since=None)
