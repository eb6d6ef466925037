"""The supervisor: one process that keeps a training line alive, for weeks, to an outcome that is recorded.

    lock (a second supervisor is refused) -> quick start checks -> supervisor.json; a STOP of the last run is cleared,
       but for one at a cycle's end: there the trainer stops, at once if the line was there when its supervisor died
    -> wait for a trainer that a killed supervisor left behind
    -> launch: wait out a back-off and for a free GPU, start the trainer, watch it to its end
    -> what its end means (failures.py): launch again, or the outcome

It never touches the line's numbers: what is trained, recorded and saved is the trainer's, and all children may lose
their supervisor at any instant (children.py). Each idea has a file: what a trainer's end means (failures.py), when one
hangs and how it is ended (watchdog.py), the preparer (preparing.py), the mirror (mirroring.py), long waits and the GPU
(waits.py), requests to stop (stopping.py), notices (nstrain/line/notices.py), logins that end with a session
(login.py), the start in the background (__main__.py and nstrain/base/detach.py).

Stopping. SIGINT, SIGTERM, SIGHUP or a STOP file end the line after a checkpoint, and any wait at once. Signals are
passed to the trainer as one SIGTERM, the STOP file it sees itself. Further signals change nothing, and are answered:
impatience cannot lose an update, short of `kill -9`. The watchdog bounds how long the last save may take. Only the wait
for the mirror at the very end is cut short by a further one: what it has not sent is in the journal.

Every wait of the line is seen here in the same place (`_look_after`): signals, children, notices and the log are looked
at between any two steps, whether a trainer runs or not. Only while an earlier supervisor's trainer still holds the line
nothing is looked at but requests to stop: nothing has been started yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from nstrain.base.commands import typed
from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, NstrainError, Refusal
from nstrain.base.logs import rotate
from nstrain.base.process import this_process
from nstrain.base.units import human_seconds
from nstrain.gpu.readings import GpuSource, gpu_of
from nstrain.line.checkpoint import read_latest
from nstrain.line.notices import Event, Notifier, notice
from nstrain.line.paths import LinePaths, checkpoint_name
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    clear_stop,
    read_heartbeat,
    read_stop,
    write_supervisor,
)
from nstrain.ops.check import check_line, refuse_failed
from nstrain.ops.consumer import enter_consumer
from nstrain.settings.host import load_host
from nstrain.settings.run import RunSettings
from nstrain.supervise.children import OTHERS_PREFIXES, Child, DeathPipe, describe_exit, write_log_line
from nstrain.supervise.display import Display
from nstrain.supervise.failures import Counts, Ended, Ending, Relaunch, judge
from nstrain.supervise.mirroring import MirrorKeeper
from nstrain.supervise.pace import Pace
from nstrain.supervise.preparing import PreparerKeeper
from nstrain.supervise.stopping import StopRequests
from nstrain.supervise.waits import GpuGate, Stalls, others_now
from nstrain.supervise.watchdog import PutDown, Watchdog

TRAINER_COMMAND = (sys.executable, "-m", "nstrain.train")
PREPARER_COMMAND = (sys.executable, "-m", "nstrain.data.preparer")
MIRROR_COMMAND = (sys.executable, "-m", "nstrain.mirror")


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
        pace: Pace | None = None,
        gpu: Callable[[RunSettings], GpuSource | None] = gpu_of,
        on_ready: Callable[[], None] = lambda: None,
        mirror_command: Sequence[str] = MIRROR_COMMAND,
    ) -> None:
        """`on_event` gets what happens, a line each; the commands are those of the children up to their arguments.

        `gpu` says how the line's GPU is read; `on_ready` is called once nothing can be refused any more.
        """
        self.paths = LinePaths(run.resolve())
        self._on_event, self._on_ready = on_event, on_ready
        self._trainer_command, self._preparer_command = trainer_command, preparer_command
        self._mirror_command = mirror_command
        self._pace, self._gpu = pace or Pace(), gpu
        self._stops = StopRequests(self.paths, self.tell)
        self._trainer: Child | None = None
        self._hungry_since: float | None = None
        self._starved = False
        """Whether the trainer was stopped because no more data will come."""
        self._next_log_look = 0.0
        self._keeper: PreparerKeeper
        self._mirror: MirrorKeeper
        self._stalls: Stalls
        self._notifier: Notifier
        self._pipe: DeathPipe
        self._state: SupervisorState
        self.settings: RunSettings

    # ---- the whole life --------------------------------------------------------------------------------------------

    def run(self) -> Ending:
        """Run the line until it is done, stopped or failed.

        Raises `Refusal` before anything is started if the line cannot run: it is none, another supervisor runs it, or
        a quick check fails. Whatever happens later is an `Ending`.
        """
        refuse_no_line(self.paths.root)
        lock = FileLock(self.paths.supervisor_lock)
        if not lock.try_acquire():
            raise Refusal(
                f"{self.paths.root} is run by process {lock.holder()} already; "
                f"`{typed('nstrain', 'status', self.paths.root)}` shows it, "
                f"`{typed('nstrain', 'stop', self.paths.root)}` ends it"
            )
        with lock, self._stops.taken():
            refuse_failed(check_line(self.paths.root, quick=True))
            self.settings = load_settings(self.paths)
            self._notifier = Notifier(load_host().notify, self.tell, self._pace.notice_limit_s)
            standing = read_stop(self.paths)
            if standing is not None and standing.at_cycle_end is None:
                clear_stop(self.paths)  # of the last run: this one is wanted
            self._state = SupervisorState(this_process(), time.time())
            write_supervisor(self.paths, self._state)
            self._pipe = DeathPipe()
            self._keeper = PreparerKeeper(
                self.paths, self.settings, self._preparer_command, self._pipe, self._pace, self
            )
            self._mirror = MirrorKeeper(self.paths, self.settings, self._mirror_command, self._pipe, self._pace, self)
            self._stalls = Stalls(self.settings.guards.watchdog_s, self.notify)
            self._on_ready()
            try:
                ending = self._supervise()
            except (NstrainError, OSError) as error:
                self._end_children()
                code = error.exit_code if isinstance(error, NstrainError) else ExitCode.FAILED
                ending = Ending("failed", code, str(error), "supervisor_failed")
            except BaseException as error:
                self._end_children()
                reason = f"the supervisor itself failed: {error!r}"
                self._record(Ending("failed", ExitCode.FAILED, reason, "supervisor_failed"))
                raise
            self._record(ending)
        return ending

    def _supervise(self) -> Ending:
        request = read_stop(self.paths)
        if request is not None and request.at_cycle_end is not None:
            self.tell(
                f"it is asked to stop at the end of cycle {request.at_cycle_end}, since before this start; "
                f"`{typed('rm', self.paths.stop)}` takes that back"
            )
        if enter_consumer(self.paths, self.settings):
            self.tell(f"the line's missing entry among {self.settings.data.work}'s consumers was written")
        ending = self._wait_for_orphan()
        next_launch, counts = Relaunch("", 0.0), Counts()
        while ending is None:
            ending = self._wait_to_launch(next_launch)
            if ending is not None:
                break
            ended = self._run_trainer()
            if isinstance(ended, Ending):
                ending = ended
                break
            verdict, counts = judge(ended, counts, self._pace, self._stops.by_whom())
            self._count(counts, verdict)
            if isinstance(verdict, Ending):
                ending = verdict
            else:
                next_launch = verdict
        if self._starved and ending.outcome == "stopped" and self._keeper.failure is not None:
            ending = self._keeper.failure
        self._keeper.end()
        self._keeper.delete_consumed(at_end=True)
        self._end_mirror()
        return ending

    def _count(self, counts: Counts, verdict: Ending | Relaunch) -> None:
        """Take counts and verdict into supervisor.json, and tell of a relaunch."""
        failed = counts.failures_total > self._state.failures_total
        self._update(
            trainer_pid=None,
            failures=counts.failures,
            failures_total=counts.failures_total,
            crashes_beside_others=counts.beside_others,
            **({"last_failure": verdict.reason} if failed else {}),
        )
        if isinstance(verdict, Relaunch):
            row = f" ({counts.failures} in a row without progress)" if failed else ""
            when = " once the GPU is free" if verdict.clean_looks > 1 else ""
            self.tell(f"{verdict.reason}{row}; it is launched again{when}")
            if verdict.event is not None:
                self.notify(verdict.event, f"{verdict.reason}; the line goes on from its newest checkpoint")

    def _look_after(self, hungry: bool = False) -> None:
        """What is due between any two steps, whatever the line does: preparer, consumed cycles, notices, the log."""
        self._keeper.watch(hungry, wanted=not self._stops.signals)
        self._keeper.delete_consumed()
        self._mirror.watch()
        preparer = self._keeper.status()
        if preparer is None or preparer.disk_full_since is None:
            self._stalls.see("disk_full", None)
        elif preparer.stage == "waiting_disk":  # else it tries again, which does not end the wait
            self._stalls.see("disk_full", f"the preparer waits for space: {preparer.error}")
        self._notifier.look()
        if time.monotonic() >= self._next_log_look:
            self._next_log_look = time.monotonic() + self._pace.log_look_s
            if rotate(self.paths.run_log):
                self.tell("run.log had grown too large; what was in it is in run.log.1")
        time.sleep(self._pace.tick_s)

    # ---- before a launch -------------------------------------------------------------------------------------------

    def _wait_for_orphan(self) -> Ending | None:
        """Wait until no trainer holds the line; an ending if that one is silent too long or a stop is asked for."""
        lock = FileLock(self.paths.trainer_lock)
        watchdog: Watchdog | None = None
        while lock.held_elsewhere():
            if watchdog is None:
                watchdog = Watchdog(lock.holder() or 0, self._pace.orphan_wait_s)
                who = f"trainer {lock.holder()}, left behind by an earlier supervisor, to save and end"
                self._wait_for(who)
                self.tell(f"waiting for {who}")
            if self._stops.asked():
                return Ending("stopped", ExitCode.STOPPED, f"{self._stops.by_whom()}, waiting for an earlier trainer")
            if (late := watchdog.look(read_heartbeat(self.paths))) is not None:
                return Ending(
                    "failed",
                    ExitCode.FAILED,
                    f"trainer {lock.holder()} of an earlier supervisor still runs ({late}); see what it does, or end "
                    "it (`kill -9` loses no more than the updates since its newest checkpoint)",
                    "failed",
                )
            time.sleep(self._pace.tick_s)
        self._wait_for(None)
        return None

    def _wait_to_launch(self, launch: Relaunch) -> Ending | None:
        """Wait out the back-off, and until the GPU is free; an ending if a stop is asked for meanwhile."""
        source = self._gpu(self.settings)
        before = self._state.launches > 0
        gate = None if source is None else GpuGate(self.paths.root, source, self._pace, launch.clean_looks, before)
        until = time.monotonic() + launch.wait_s
        try:
            while True:
                if self._stops.asked():
                    return Ending("stopped", ExitCode.STOPPED, self._stops.by_whom())
                if time.monotonic() < until:
                    self._wait_for(f"{human_seconds(launch.wait_s)} to pass after a failure")
                elif gate is None or gate.free():
                    return None
                else:
                    self._wait_for(None if gate.taken is None else f"a free GPU: {gate.taken}")
                    self._stalls.see("waiting_gpu", None if gate.taken is None else f"waiting for {gate.taken}")
                self._look_after()
        finally:
            self._wait_for(None)
            self._stalls.see("waiting_gpu", None)
            if gate is not None:
                gate.close()

    def _wait_for(self, what: str | None) -> None:
        """Show what the supervisor itself waits for; None: nothing."""
        if what != self._state.waiting_for:
            since = None if what is None else self._state.waiting_since or time.time()
            self._update(waiting_for=what, waiting_since=since)

    # ---- one trainer -----------------------------------------------------------------------------------------------

    def _run_trainer(self) -> Ended | Ending:
        """Start a trainer and watch it to its end, or to where it cannot be ended."""
        with contextlib.suppress(Refusal):  # a run.json edited into nonsense: the trainer says what is wrong
            self.settings = load_settings(self.paths)
        newest = self._latest()
        command = [*self._trainer_command, str(self.paths.root)]
        self._trainer = trainer = Child("trainer", command, self._pipe, self.paths.run_log, self.paths.root)
        self._update(launches=self._state.launches + 1, trainer_pid=trainer.pid)
        self.tell(f"trainer started as process {trainer.pid}")
        watchdog = Watchdog(trainer.pid, self.settings.guards.start_s)
        put_down: PutDown | None = None
        hung: str | None = None
        while (code := trainer.poll()) is None:
            self._stops.answer(trainer)
            beat = self._beat(trainer)
            late = watchdog.look(beat)
            if late is None and put_down is not None:
                self.tell("the trainer's heart beats again")
                hung = hung if put_down.asked else None
                put_down = None
            elif late is not None and put_down is None:
                self.tell(late)
                hung, put_down = late, PutDown(trainer, self._pace, self.tell)
            if put_down is not None and (stuck := put_down.step()) is not None:
                return Ending("failed", ExitCode.STUCK, stuck, "stuck")
            self._feed(trainer, beat)
        self._trainer = None
        self._stalls.see("waiting_data", None)
        return self._ended(trainer, code, hung, newest)

    def _ended(self, trainer: Child, code: int, hung: str | None, newest_before: int | None) -> Ended:
        newest = self._latest()
        words = hung or f"the trainer {describe_exit(code)}"
        if hung is None and code > 0:
            said = trainer.last_words(lambda line: not line.startswith(OTHERS_PREFIXES))
            words = said or f"{words} and said nothing"
        return Ended(
            code=code,
            words=words,
            asked=bool(self._stops.signals) or self._starved or self._stops.asked_by_file(code),
            hung=hung is not None,
            progressed=newest is not None and newest != newest_before,
            others=self._others(trainer, code),
        )

    def _others(self, trainer: Child, code: int) -> str | None:
        """Who was on the GPU beside a trainer that did not end by itself."""
        source = self._gpu(self.settings)
        if source is None or (code >= 0 and code != ExitCode.FAILED):
            return None
        beat = read_heartbeat(self.paths)
        seen = beat.gpu_others if beat is not None and beat.pid == trainer.pid else None
        return seen or others_now(self.paths.root, source)

    def _beat(self, trainer: Child) -> Heartbeat | None:
        """The trainer's heartbeat; None before its first."""
        beat = read_heartbeat(self.paths)
        return beat if beat is not None and beat.pid == trainer.pid else None

    def _feed(self, trainer: Child, beat: Heartbeat | None) -> None:
        """See to the data that the trainer waits for; stop one that will get no more."""
        waits = beat is not None and beat.stage == "waiting_data"
        self._hungry_since = (self._hungry_since or time.monotonic()) if waits else None
        hungry = self._hungry_since is not None and time.monotonic() - self._hungry_since >= self._pace.hunger_s
        self._stalls.see("waiting_data", f"the trainer waits for {beat.waiting_for}" if beat and waits else None)
        if hungry and self._keeper.failure is not None and not self._starved:
            self._starved = True
            self.tell("the trainer waits for a cycle that will not be prepared: stopping with a checkpoint")
            trainer.ask_to_stop()
        self._look_after(hungry)

    def _latest(self) -> int | None:
        """The update of the newest committed checkpoint; None if there is none or that cannot be told."""
        try:
            return read_latest(self.paths)
        except (NstrainError, OSError):
            return None

    # ---- the end, and being seen -----------------------------------------------------------------------------------

    def _end_children(self) -> None:
        """End what still runs: the trainer after its checkpoint, the preparer soon, the mirror when it has sent all."""
        if self._trainer is not None:
            self._trainer.ask_to_stop()
            guards = self.settings.guards
            if self._trainer.wait(guards.watchdog_s + guards.save_s) is None:
                self._trainer.kill()
            self._trainer = None
        self._keeper.end()
        self._end_mirror()

    def _end_mirror(self) -> None:
        """Have it send what is there; whoever sends another signal does not want to wait for that."""
        before = self._stops.signals
        self._mirror.end(hurried=lambda: self._stops.signals > before)

    def _record(self, ending: Ending) -> None:
        """Write the outcome, then take the request to stop away: who asked for it waits for the outcome.

        One for a cycle's end that is still to come stands: whatever ended the line now, the next run ends there.
        """
        self._update(
            outcome=ending.outcome,
            reason=ending.reason,
            trainer_pid=None,
            preparer_pid=None,
            mirror_pid=None,
            waiting_for=None,
            waiting_since=None,
        )
        with contextlib.suppress(NstrainError, OSError):
            if ending.outcome == "done" or not self._stops.cycle_end_to_come():
                clear_stop(self.paths)
        if ending.event is not None:
            self.notify(ending.event, ending.reason or "the line has reached the end of its schedule")
        self.tell(ending.outcome + (f": {ending.reason}" if ending.reason else ""))
        self._notifier.finish(self._pace.notice_limit_s)
        self._pipe.close()

    def tell(self, text: str) -> None:
        """Write a line of what happened, to run.log, supervisor.json and whoever looks on."""
        write_log_line(self.paths.run_log, text)
        self._on_event(text)
        self._update(last_event=text, last_event_at=time.time())

    def notify(self, event: Event, text: str) -> None:
        """Give a notice of the line as it stands."""
        beat = read_heartbeat(self.paths)
        newest = self._latest()
        self._notifier.send(
            notice(
                event,
                self.settings.id,
                self.paths.root,
                text,
                update=None if beat is None else beat.update,
                tokens=None if beat is None else beat.tokens,
                checkpoint=None if newest is None else checkpoint_name(newest),
                launches=self._state.launches,
                failures=self._state.failures,
            )
        )

    def update(self, **fields: object) -> None:
        """Change supervisor.json, for the keeper of the preparer."""
        self._update(**fields)

    def _update(self, **fields: object) -> None:
        """Change supervisor.json. A full disk must not end a line that still trains: it is told and survived."""
        self._state = dataclasses.replace(self._state, **fields)  # type: ignore[arg-type]
        try:
            write_supervisor(self.paths, self._state)
        except (NstrainError, OSError) as error:
            text = f"{self.paths.supervisor_json} could not be written: {error}"
            write_log_line(self.paths.run_log, text)
            self._on_event(text)
