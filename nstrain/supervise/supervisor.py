"""The supervisor: one process that runs a training line's children, from the start to an outcome that is recorded.

    lock (a second supervisor is refused) -> quick start checks -> STOP of the last run cleared, supervisor.json
    -> wait for a trainer that a killed supervisor left behind -> preparer and trainer -> watch -> outcome

It never touches the line's numbers: what is trained, recorded and saved is the trainer's, and both children may lose
their supervisor at any instant (children.py). Its own work is small:

Stopping. SIGINT, SIGTERM, SIGHUP or a STOP file end the line after a checkpoint. Signals are passed to the trainer as
one SIGTERM, the STOP file it sees itself. Further signals change nothing, and are answered: impatience cannot lose an
update, short of `kill -9`.

The preparer. A data line has one, whoever's line or command it belongs to. If another process holds the preparer's
lock, the supervisor relies on it and starts its own only when the lock is free. When its preparer fails, the trainer
goes on with the cycles that are ready; once it waits for one that will not come, it is stopped with a checkpoint, and
the line has failed for the preparer's reason. A preparer that finished is started again, once, should the trainer wait
for a cycle (one that was deleted, say). While none runs, cycles that every consumer is past are deleted here.

The end. Trainer done, stopped, or failed: the preparer is ended (it may be killed at any time), consumed cycles are
deleted, the outcome and its reason are written to supervisor.json. A trainer that was killed has failed; the same
command goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, NstrainError, Refusal
from nstrain.base.process import this_process
from nstrain.data.cycles import delete_consumed
from nstrain.data.line import DataLine
from nstrain.data.preparer import preparer_lock, read_status
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import (
    Outcome,
    SupervisorState,
    clear_stop,
    read_heartbeat,
    read_stop,
    write_supervisor,
)
from nstrain.ops.check import check_line, refuse_failed
from nstrain.ops.consumer import consumer_path, enter_consumer
from nstrain.settings.run import load_run
from nstrain.supervise.children import (
    PREPARER_PREFIX,
    SUPERVISOR_PREFIX,
    Child,
    DeathPipe,
    describe_exit,
    write_log_line,
)
from nstrain.supervise.display import Display

ORPHAN_WAIT_S = 60.0
"""How long a trainer that a killed supervisor left behind may take to save and end."""

TICK_S = 0.1
"""How often the children, signals and files are looked at."""

HUNGER_S = 2.0
"""A trainer that waits for data for longer than this, while no preparer runs, waits for what nobody prepares."""

PREPARER_RETRY_S = 2.0
"""At least this long between two looks at another process's preparer lock, or two starts of a preparer."""

PREPARER_GRACE_S = 10.0
"""How long a preparer may take to end before it is killed."""

TRAINER_COMMAND = (sys.executable, "-m", "nstrain.train")
PREPARER_COMMAND = (sys.executable, "-m", "nstrain.data.preparer")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a line's supervision ended."""

    outcome: Outcome
    exit_code: ExitCode
    reason: str | None
    """Why, for people; None if there is nothing to add."""


def run_foreground(run: Path, console: Console | None = None) -> ExitCode:
    """Run a line in this process with its children, shown on a console (default: standard output), to its end.

    Raises `Refusal` before anything is started or shown if the line cannot run; how it ended is in supervisor.json.
    """
    with Display(run, console or Console()) as display:
        return Supervisor(run, on_event=display.event).run().exit_code


class Supervisor:
    """Supervises one line once. `run` may be called in the main thread only, since it takes over signals."""

    def __init__(
        self,
        run: Path,
        on_event: Callable[[str], None] = lambda text: None,
        trainer_command: Sequence[str] = TRAINER_COMMAND,
        preparer_command: Sequence[str] = PREPARER_COMMAND,
    ) -> None:
        """`on_event` gets what happens, a line each; the commands are those of the children up to their arguments."""
        self.paths = LinePaths(run.resolve())
        self._on_event = on_event
        self._trainer_command, self._preparer_command = trainer_command, preparer_command
        self._signals: list[int] = []
        self._signals_answered = 0
        self._pipe: DeathPipe
        self._trainer: Child | None = None
        self._preparer: Child | None = None
        self._preparer_finished = False
        """Whether our preparer ended well, so that there is no reason to start one."""
        self._fed_again = False
        """Whether that was one started because the trainer waited, and the trainer has not gone on since."""
        self._preparer_failure: Ending | None = None
        self._starved = False
        """Whether the trainer was stopped because of that failure."""
        self._next_preparer_look = 0.0
        self._hungry_since: float | None = None
        self._consumer_seen: int | None = None
        self._state: SupervisorState

    # ---- the whole life --------------------------------------------------------------------------------------------

    def run(self) -> Ending:
        """Run the line until it is done, stopped or failed.

        Raises `Refusal` before anything is started if the line cannot run: it is none, another supervisor runs it, or
        a quick check fails. Whatever happens later is an `Ending`.
        """
        if not self.paths.run_json.exists():
            raise Refusal(f"{self.paths.root} is not a training line (no run.json); make one with `nstrain new`")
        lock = FileLock(self.paths.supervisor_lock)
        if not lock.try_acquire():
            raise Refusal(
                f"{self.paths.root} is run by process {lock.holder()} already; "
                f"`nstrain status {self.paths.root}` shows it, `nstrain stop {self.paths.root}` ends it"
            )
        with lock, self._signals_taken():
            refuse_failed(check_line(self.paths.root, quick=True))
            self.settings = load_run(self.paths.run_json)
            self.work = Path(self.settings.data.work)
            clear_stop(self.paths)
            self._state = SupervisorState(this_process(), time.time())
            write_supervisor(self.paths, self._state)
            self._pipe = DeathPipe()
            try:
                ending = self._supervise()
            except (NstrainError, OSError) as error:
                self._end_children()
                code = error.exit_code if isinstance(error, NstrainError) else ExitCode.FAILED
                ending = Ending("failed", code, str(error))
            except BaseException as error:
                self._end_children()
                self._record(Ending("failed", ExitCode.FAILED, f"the supervisor itself failed: {error!r}"))
                raise
            self._record(ending)
        return ending

    def _supervise(self) -> Ending:
        if enter_consumer(self.paths, self.settings):
            self._tell(f"the line's missing entry in {self.work / 'consumers'} was written")
        if ending := self._wait_for_orphan():
            return ending
        if self._signals:
            return Ending("stopped", ExitCode.STOPPED, self._who_stopped())
        self._watch_preparer()
        command = [*self._trainer_command, str(self.paths.root)]
        self._trainer = Child("trainer", command, self._pipe, self.paths.run_log)
        self._update(launches=self._state.launches + 1, trainer_pid=self._trainer.pid)
        self._tell(f"trainer started as process {self._trainer.pid}")
        while (code := self._trainer.poll()) is None:
            self._answer_signals(self._trainer)
            self._watch_preparer()
            self._delete_consumed()
            time.sleep(TICK_S)
        ending = self._ending(self._trainer, code)
        self._trainer = None
        self._end_children()
        self._delete_consumed(at_end=True)
        return ending

    def _wait_for_orphan(self) -> Ending | None:
        """Wait until no trainer holds the line; an ending if that takes too long or a stop is asked for."""
        lock = FileLock(self.paths.trainer_lock)
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while lock.held_elsewhere():
            if self._state.waiting_for is None:
                who = f"trainer {lock.holder()}, left behind by an earlier supervisor, to save and end"
                self._update(waiting_for=who, waiting_since=time.time())
                self._tell(f"waiting up to {ORPHAN_WAIT_S:.0f} s for {who}")
            if self._signals or read_stop(self.paths) is not None:
                return Ending("stopped", ExitCode.STOPPED, f"{self._who_stopped()}, waiting for an earlier trainer")
            if time.monotonic() >= deadline:
                return Ending(
                    "failed",
                    ExitCode.FAILED,
                    f"trainer {lock.holder()} of an earlier supervisor still runs after {ORPHAN_WAIT_S:.0f} s; see "
                    "what it does, or end it (`kill -9` loses no more than the updates since its newest checkpoint)",
                )
            time.sleep(TICK_S)
        if self._state.waiting_for is not None:
            self._update(waiting_for=None, waiting_since=None)
        return None

    # ---- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        """Take signals as requests to stop; one that was ignored when we were started (nohup) stays ignored."""
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        taken = [number for number in STOP_SIGNALS if before[number] is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, lambda found, _: self._signals.append(found))
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _answer_signals(self, trainer: Child) -> None:
        """Pass the first signal on to the trainer; say of the others that it is on its way."""
        while self._signals_answered < len(self._signals):
            name = signal.Signals(self._signals[self._signals_answered]).name
            self._signals_answered += 1
            if self._signals_answered == 1:
                self._tell(f"{name}: stopping with a checkpoint at the next update boundary")
                trainer.ask_to_stop()
            else:
                self._tell(
                    f"{name}: still waiting for the trainer to save and end (`kill -9 {trainer.pid}` would lose the "
                    "updates since its newest checkpoint)"
                )

    def _who_stopped(self) -> str:
        if self._signals:
            return f"stopped by {signal.Signals(self._signals[0]).name}"
        request = read_stop(self.paths)
        if request is None:
            return "stopped by a signal to the trainer that did not come from its supervisor"
        return "stopped by the file STOP" if request.by_pid is None else f"stopped by process {request.by_pid}"

    # ---- the preparer ----------------------------------------------------------------------------------------------

    def _watch_preparer(self) -> None:
        """Have a preparer at work as long as there is something to prepare; stop a trainer that will get no more."""
        if self._preparer is not None:
            code = self._preparer.poll()
            if code is None:
                return
            self._preparer_ended(self._preparer, code)
        hungry = self._trainer_hungry()
        if self._preparer_failure is not None:
            if hungry:
                self._stop_starving_trainer()
        elif hungry and self._fed_again:
            self._fail_preparer(ExitCode.FAILED, "it is done, but the trainer still waits for a cycle")
        elif (hungry or not self._preparer_finished) and not self._signals:
            self._start_preparer()

    def _start_preparer(self) -> None:
        """Start a preparer, unless another process is the data line's preparer now."""
        if time.monotonic() < self._next_preparer_look:
            return
        self._next_preparer_look = time.monotonic() + PREPARER_RETRY_S
        lock = preparer_lock(self.work)
        if lock.held_elsewhere():
            if self._state.preparer_pid != lock.holder():
                self._update(preparer_pid=lock.holder())
                self._tell(f"{self.work} is prepared by process {lock.holder()} already; relying on it")
            return
        command = [*self._preparer_command, str(self.work), "--ahead", str(self.settings.data.ahead_cycles)]
        self._preparer = Child("preparer", command, self._pipe, self.paths.run_log)
        self._update(preparer_pid=self._preparer.pid)

    def _preparer_ended(self, preparer: Child, code: int) -> None:
        self._preparer = None
        self._update(preparer_pid=None)
        status = read_status(self.work)
        told = status if status is not None and status.pid == preparer.pid else None
        if code == ExitCode.DONE:
            self._preparer_finished, self._fed_again = True, self._hungry_since is not None
            self._hungry_since = None
        elif told is None and preparer_lock(self.work).held_elsewhere():
            return  # it found another one at work, between our look and its own
        else:
            words = preparer.last_words(lambda line: line.startswith(PREPARER_PREFIX))
            error = told.error if told is not None else None
            self._fail_preparer(_failure_code(code), error or f"it {describe_exit(code)}\n{words}".strip())

    def _fail_preparer(self, exit_code: ExitCode, what: str) -> None:
        """Note that no more data will come, and why; the line ends once the trainer has used up what is ready."""
        self._preparer_failure = Ending("failed", exit_code, f"the preparer of {self.work}: {what}")
        self._tell(f"{self._preparer_failure.reason}; training goes on with the cycles that are ready")
        self._update(reason=self._preparer_failure.reason)

    def _stop_starving_trainer(self) -> None:
        if not self._starved and self._trainer is not None:
            self._starved = True
            self._tell("the trainer waits for a cycle that will not be prepared: stopping with a checkpoint")
            self._trainer.ask_to_stop()

    def _trainer_hungry(self) -> bool:
        """Whether the trainer has been waiting for data for some time, while we run no preparer."""
        beat = read_heartbeat(self.paths)
        if self._trainer is None or beat is None or beat.pid != self._trainer.pid or beat.stage != "waiting_data":
            self._hungry_since, self._fed_again = None, False
            return False
        if self._hungry_since is None:
            self._hungry_since = time.monotonic()
        return time.monotonic() - self._hungry_since >= HUNGER_S

    def _delete_consumed(self, at_end: bool = False) -> None:
        """Delete cycles that every consumer is past, if we run no preparer; looks only when our own entry moved."""
        if self._preparer is not None:
            return
        try:
            seen = os.stat(consumer_path(self.work, self.settings.id)).st_mtime_ns
        except OSError:
            seen = None
        if seen == self._consumer_seen and not at_end:
            return
        self._consumer_seen = seen
        lock = preparer_lock(self.work)
        try:
            if not lock.try_acquire():
                return  # another process's preparer does it
            with lock:
                gone = delete_consumed(DataLine.open(self.work))
        except (NstrainError, OSError) as error:
            self._tell(f"consumed cycles could not be deleted: {error}")
            return
        if gone:
            self._tell(f"deleted consumed cycle{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}")

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _ending(self, trainer: Child, code: int) -> Ending:
        """What the trainer's exit means for the line."""
        asked = bool(self._signals) or self._starved
        if code == ExitCode.DONE:
            return Ending("done", ExitCode.DONE, None)
        if code == ExitCode.STOPPED or (code == -signal.SIGTERM and asked):  # the latter while it was starting
            if self._starved and self._preparer_failure is not None:
                return self._preparer_failure
            return Ending("stopped", ExitCode.STOPPED, self._who_stopped())
        if code < 0:
            return Ending("failed", ExitCode.FAILED, f"the trainer {describe_exit(code)}; the same command goes on")
        words = trainer.last_words(lambda line: not line.startswith((PREPARER_PREFIX, SUPERVISOR_PREFIX)))
        return Ending("failed", _failure_code(code), words or f"the trainer {describe_exit(code)} and said nothing")

    def _end_children(self) -> None:
        """End what still runs: the preparer soon, the trainer after its checkpoint."""
        if self._trainer is not None:
            self._trainer.ask_to_stop()
            self._trainer.wait()
            self._trainer = None
        if self._preparer is not None:
            self._preparer.end(PREPARER_GRACE_S)
            self._preparer = None

    def _record(self, ending: Ending) -> None:
        """Write the outcome, then take the request to stop away: who asked for it waits for the outcome."""
        self._update(
            outcome=ending.outcome,
            reason=ending.reason,
            trainer_pid=None,
            preparer_pid=None,
            waiting_for=None,
            waiting_since=None,
        )
        with contextlib.suppress(OSError):
            clear_stop(self.paths)
        self._tell(ending.outcome + (f": {ending.reason}" if ending.reason else ""))
        self._pipe.close()

    def _update(self, **fields: object) -> None:
        """Change supervisor.json. A full disk must not end a line that still trains: it is told and survived."""
        self._state = dataclasses.replace(self._state, **fields)  # type: ignore[arg-type]
        try:
            write_supervisor(self.paths, self._state)
        except (NstrainError, OSError) as error:
            self._tell(f"{self.paths.supervisor_json} could not be written: {error}")

    def _tell(self, text: str) -> None:
        write_log_line(self.paths.run_log, text)
        self._on_event(text)


def _failure_code(code: int) -> ExitCode:
    """A line's exit code for a child's: what the child refused, the line refuses."""
    return ExitCode.BAD_CONFIGURATION if code == ExitCode.BAD_CONFIGURATION else ExitCode.FAILED
