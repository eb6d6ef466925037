"""`nstrain status`: where a line is, from its files alone.

Nothing is asked of the processes, no lock is touched and nothing is written, so a look can never disturb a line. What
the files say counts only while their writer lives: processes are recognised by pid and start time. A supervisor that is
gone without having recorded an outcome was killed, and the line counts as failed, except while the trainer that it left
behind is still saving.

Answers within 0.3 s: the modules that need numpy, pyarrow, pydantic or torch are not imported, and settings that were
validated when they were written are read as plain JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nstrain.base.commands import typed
from nstrain.base.errors import Refusal
from nstrain.base.process import ran_at
from nstrain.line.branches import read_branches
from nstrain.line.listing import Keeping, ListedCheckpoint, keeping_of, list_checkpoints
from nstrain.line.paths import LinePaths, parse_checkpoint_name
from nstrain.line.run_json import read_run_json, refuse_no_line
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    read_heartbeat,
    read_stop,
    read_supervisor,
    stop_requested,
)
from nstrain.ops.status_data import (
    PreparerNow,
    Schedule,
    other_place,
    read_plain,
    read_preparer,
    read_schedule,
    ready_cycles,
)
from nstrain.ops.status_disk import DiskUse, disk_use
from nstrain.ops.status_life import silent_for, stopped_of
from nstrain.ops.status_mirror import TrackerNow, tracker_now
from nstrain.ops.status_record import DEFAULT_LOSS_JUMP, Record, read_record

State = Literal["new", "running", "waiting", "stopped", "failed", "done"]
"""new (never run), running, waiting (for what `waiting_for` says), stopped, failed (see `reason`), done."""


@dataclasses.dataclass(frozen=True)
class Status:
    """A line at one moment."""

    state: State
    update: int
    """The last finished update; of a line that does not run, the last one recorded."""
    tokens: int
    """The position after it."""
    tokens_total: int | None
    """The position at the schedule's end; None: open-ended."""
    loss: float | None
    """The last update's loss in nats a token."""
    tokens_per_s: float | None
    """None while it does not run, and while `silent_s` says that it may hang."""
    cycle: int | None
    """The data cycle in use, or the last one that was."""
    checkpoint: str | None
    """The checkpoint that the line would go on from."""
    eta_s: float | None
    """Seconds to the end at the present speed; None as `tokens_per_s` is."""
    waiting_for: str | None
    """What it waits for."""
    waiting_since: float | None
    """Since when (unix seconds)."""
    reason: str | None
    """How it came to its state, for people."""
    run: str
    """The line's directory."""
    preset: str
    stage: str | None
    """What the trainer does now."""
    heartbeat_at: float | None
    """When the trainer last said so (unix seconds); None: none runs, or it has not begun."""
    budget_s: float | None
    """Seconds from then within which it must say something again, or is ended as one that hangs."""
    silent_s: float | None
    """Seconds since then, if they are more than they should be; else None."""
    stopped_pids: tuple[int, ...]
    """Processes of the line that a signal (SIGSTOP) has stopped, until `kill -CONT`."""
    stopping: bool
    """Whether a stop has been asked for and not happened yet."""
    learning_rate: float | None
    """The last update's."""
    cycle_progress: float | None
    """How much of the cycle is trained, 0 to 1."""
    cycle_count: int | None
    """Cycles of the schedule; None: open-ended."""
    cycles_ready: tuple[int, ...]
    """Cycles that lie on disk, prepared."""
    preparer: str | None
    """What the preparer does now, for people; None if none runs."""
    checkpoints: tuple[str, ...]
    """All that lie on disk, but for those set aside."""
    kept_checkpoints: int
    """How many of them stay for ever."""
    checkpoint_at: float | None
    """When the newest was finished (unix seconds)."""
    losses: tuple[float, ...]
    """The course of the last updates' losses: means of equal stretches, oldest first."""
    loss_trend: float | None
    """By how much the mean loss of the last `trend_updates` updates is above that of as many before."""
    trend_updates: int
    """At most a hundred; 0: too few for a trend."""
    validation: dict[str, float | None]
    """The last validation's losses by name (`nstrain journal` has all readings); None for one that is not finite."""
    validated_update: int | None
    """The update they belong to."""
    validation_before: dict[str, float | None]
    """The same of the regular validation before it; empty if that read rows of another training length. Of another
    mixture `mix` is no measure of the model: compare `mean` or the sources."""
    validated_before: int | None
    """The update of that one."""
    alarms: tuple[str, ...]
    """What a person should look at."""
    differences: int
    """Replayed updates that differed from the row recorded before (0 is right)."""
    pid: int | None
    """The supervisor, while it lives."""
    trainer_pid: int | None
    preparer_pid: int | None
    ahead_tokens: int | None
    """Tokens that are prepared and not trained yet."""
    ahead_s: float | None
    """Seconds that they last at the present speed."""
    stop_at_cycle_end: int | None
    """The data cycle at whose end the line is asked to stop."""
    gpu_others: str | None
    """Other processes on the GPU."""
    slow_saving: str | None
    """For how long and why the line stands still at every checkpoint; None: it does not."""
    failures: int
    """Launches in a row that failed without progress."""
    last_failure: str | None
    preparer_failures: int
    """Ends of its preparer in a row that were failures, no cycle prepared since; it is started again each time."""
    preparer_failure: str | None
    """Why the last of them failed; None if none did."""
    branch_of: str | None
    """The parent's directory, of a branch."""
    branches: tuple[str, ...]
    """Directories of the branches that were made from it."""
    generation: int
    """Of the last recorded update; 1 unless it went back to an earlier one, and on otherwise (0: its parent's)."""
    tracker: TrackerNow | None
    """Its copy on a tracker; None if run.json names none."""
    disk: DiskUse

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, the fields under their own names."""
        return dataclasses.asdict(self)


def status(run: Path) -> Status:
    """Look at a line. Raises `Refusal` if `run` is not one or its files are damaged."""
    paths = LinePaths(run.resolve())
    settings = _read_settings(run, paths)
    now = _look(paths, settings)
    state, reason = now.state_and_reason()
    other = other_place(paths.root, settings.work, settings.id)
    if other is not None and state not in ("running", "waiting"):
        reason = (
            f"it is one line with {other}, which alone can be run, for the data line follows that directory: one of "
            "the two is a copy; remove it, or make a new line"
        )
    waiting_for, waiting_since = now.waiting() if state == "waiting" else (None, None)
    update, tokens = now.position()
    live, last, record = now.beat, now.record.last or {}, now.record
    supervised = now.supervisor if now.supervisor is not None and now.supervisor.running() else None
    own = [item for item in now.checkpoints if not item.set_aside]
    stop = read_stop(paths)
    ahead = None if now.schedule is None else now.schedule.ready_beyond(tokens, now.cycles_ready)
    silent_s = silent_for(live, last.get("time/update_s"))
    moving = live if silent_s is None else None
    speed = record.tokens_per_s if moving else None
    pid = supervised.supervisor.pid if supervised else None
    trainer_pid = live.pid if live else supervised.trainer_pid if supervised else None
    preparer_pid = None if now.preparer is None else now.preparer.pid
    tracker = tracker_now(paths, settings.tracker, record, supervised)
    return Status(
        state=state,
        update=update,
        tokens=tokens,
        tokens_total=now.tokens_total,
        loss=_finite(live.loss if live and live.loss is not None else last.get("train/loss")),
        tokens_per_s=moving.tokens_per_s if moving else None,
        cycle=now.cycle(),
        checkpoint=now.checkpoint,
        eta_s=moving.eta_s if moving else None,
        waiting_for=waiting_for,
        waiting_since=waiting_since,
        reason=reason,
        run=str(paths.root),
        preset=settings.preset,
        stage=live.stage if live else None,
        heartbeat_at=live.time if live else None,
        budget_s=live.budget_s if live else None,
        silent_s=silent_s,
        stopped_pids=stopped_of(pid, trainer_pid, preparer_pid, tracker.pid if tracker else None),
        stopping=state in ("running", "waiting") and (stop_requested(paths) or bool(live and live.stage == "stopping")),
        learning_rate=_finite(live.learning_rate if live and live.learning_rate else last.get("train/learning_rate")),
        cycle_progress=live.cycle_progress if now.trains() and live else None,
        cycle_count=now.cycle_count,
        cycles_ready=now.cycles_ready,
        preparer=None if now.preparer is None else now.preparer.describe(),
        checkpoints=tuple(item.name for item in own),
        kept_checkpoints=sum(1 for item in own if item.kept is not False),
        checkpoint_at=next((item.written_at for item in own if item.latest), None),
        losses=record.losses,
        loss_trend=_finite(record.loss_trend),
        trend_updates=record.trend_updates,
        validation={name: _finite(value) for name, value in record.validation.items()},
        validated_update=record.validated_update,
        validation_before={name: _finite(value) for name, value in record.validation_before.items()},
        validated_before=record.validated_before,
        alarms=record.alarms,
        differences=record.differences,
        pid=pid,
        trainer_pid=trainer_pid,
        preparer_pid=preparer_pid,
        ahead_tokens=ahead,
        ahead_s=None if ahead is None or not speed else ahead / speed,
        stop_at_cycle_end=None if stop is None else stop.at_cycle_end,
        gpu_others=live.gpu_others if live else None,
        slow_saving=live.slow_saving if live else None,
        failures=supervised.failures if supervised else 0,
        last_failure=supervised.last_failure if supervised else None,
        preparer_failures=supervised.preparer_failures if supervised else 0,
        preparer_failure=supervised.preparer_failure if supervised and supervised.preparer_failures else None,
        branch_of=settings.branch_of,
        branches=tuple(branch.run for branch in read_branches(paths)),
        generation=int(last.get("generation", 1)),
        tracker=tracker,
        disk=disk_use(paths, settings.work, settings.keeping, now.checkpoints, now.cycle_count),
    )


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What status needs of run.json."""

    id: str
    work: Path
    """The data line's directory."""
    preset: str
    validate_every: int
    """Updates between validations."""
    keeping: Keeping
    loss_jump: float
    branch_of: str | None
    tracker: Mapping[str, Any] | None


def _read_settings(run: Path, paths: LinePaths) -> _Settings:
    refuse_no_line(run)
    settings = read_run_json(paths)
    try:
        return _Settings(
            id=str(settings["id"]),
            work=Path(settings["data"]["work"]),
            preset=str(settings["model"]["preset"]),
            validate_every=int(settings["validation"]["every_updates"]),
            keeping=keeping_of(settings),
            loss_jump=float(settings.get("guards", {}).get("loss_jump", DEFAULT_LOSS_JUMP)),
            branch_of=(settings.get("branch") or {}).get("from"),
            tracker=None if settings.get("tracker") is None else dict(settings["tracker"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"{paths.run_json}: field {error} is missing or wrong; `{typed('nstrain', 'check', run)}` says more"
        ) from None


def _look(paths: LinePaths, settings: _Settings) -> _Now:
    """Read the files that change."""
    supervisor, beat = read_supervisor(paths), read_heartbeat(paths)
    schedule = read_schedule(settings.work)
    seen_total = None if beat is None else beat.tokens_total
    return _Now(
        paths=paths,
        supervisor=supervisor,
        beat=beat if _trainer_alive(supervisor, beat) else None,
        record=read_record(paths, settings.validate_every, settings.loss_jump),
        checkpoint=_latest(paths),
        checkpoints=list_checkpoints(paths),
        schedule=schedule,
        tokens_total=seen_total if schedule is None else schedule.total_tokens,
        preparer=read_preparer(settings.work, supervisor.preparer_pid if supervisor and supervisor.running() else None),
        cycles_ready=ready_cycles(settings.work),
    )


@dataclasses.dataclass(frozen=True)
class _Now:
    """What was read, and the questions whose answers need several of the files."""

    paths: LinePaths
    supervisor: SupervisorState | None
    beat: Heartbeat | None
    """The heartbeat, if its writer lives."""
    record: Record
    checkpoint: str | None
    """The name in checkpoints/latest."""
    checkpoints: list[ListedCheckpoint]
    schedule: Schedule | None
    """The data line's; None if it cannot be read."""
    tokens_total: int | None
    """The position at the schedule's end, as the trainer said it if the schedule cannot be read."""
    preparer: PreparerNow | None
    cycles_ready: tuple[int, ...]

    @property
    def cycle_count(self) -> int | None:
        """Cycles of the schedule; None: open-ended, or it cannot be read."""
        return None if self.schedule is None else self.schedule.cycle_count

    def state_and_reason(self) -> tuple[State, str | None]:
        """The line's state, and how it came to it."""
        state = self.supervisor
        if state is not None and state.running():
            waiting = state.waiting_for is not None or (self.beat is not None and self.beat.stage == "waiting_data")
            return ("waiting" if waiting else "running"), state.reason
        if self.beat is not None:
            return "running", f"without a supervisor: trainer {self.beat.pid} saves a checkpoint and ends"
        if state is None:
            if self.checkpoint is None and self.record.last is None:
                return "new", "it has not been run yet"
            if self.record.is_parents:
                return "new", f"it has not been run yet; {self._goes_on()}"
            return "stopped", f"its trainer was run without a supervisor; {self._goes_on()}"
        if state.outcome is None:
            return "failed", (
                f"its supervisor (process {state.supervisor.pid}) is gone without a word: it was killed, or the "
                f"machine went down; {self._goes_on()}"
            )
        if state.outcome == "done" and self.schedule is not None and not self.schedule.ends_at(self.position()[1]):
            return "stopped", f"its data line has grown since it was done; {self._goes_on()}"
        return state.outcome, state.reason

    def _goes_on(self) -> str:
        number = None if self.checkpoint is None else parse_checkpoint_name(self.checkpoint)
        where = "begins anew" if number is None else f"goes on from update {number}"
        return f"`{typed('nstrain', 'run', self.paths.root)}` {where}"

    def waiting(self) -> tuple[str | None, float | None]:
        """What a waiting line waits for, and since when."""
        if self.beat is not None and self.beat.stage == "waiting_data":
            what = self.beat.waiting_for or "data"
            failures = 0 if self.supervisor is None else self.supervisor.preparer_failures
            if self.preparer is not None:
                what += f" ({self.preparer.describe()})"
            elif failures:
                what += f" (its preparer has failed {failures} time{'s' if failures > 1 else ''} in a row)"
            return what, self.beat.waiting_since
        assert self.supervisor is not None
        return self.supervisor.waiting_for, self.supervisor.waiting_since

    def position(self) -> tuple[int, int]:
        """The last finished update and the tokens after it.

        A trainer's own word while it trains. Before that it may stand at an older checkpoint than the record reaches;
        of a line that does not run, the record counts, or the checkpoint if that is damaged.
        """
        if self.beat is not None and self.beat.stage != "starting":
            return self.beat.update, self.beat.tokens
        if (self.beat is not None or self.record.unreadable) and self.checkpoint is not None:
            state = self._state()
            return int(state.get("update", 0)), int(state.get("tokens", 0))
        last = self.record.last or {}
        return int(last.get("update", 0)), int(last.get("tokens", 0))

    def trains(self) -> bool:
        """Whether its trainer lives and has trained: before its first update the heartbeat has an earlier one's."""
        return self.beat is not None and self.beat.stage != "starting" and self.beat.cycle is not None

    def cycle(self) -> int | None:
        """The data cycle in use, or the last one that was.

        A trainer that has not trained yet stands at its checkpoint, and so does a branch: its record's rows, up to the
        first of its own, are of its parent's cycles.
        """
        if self.trains() and self.beat is not None:
            return self.beat.cycle
        runs = self.beat is not None or (self.supervisor is not None and self.supervisor.running())
        by_checkpoint = runs or self.record.is_parents or self.record.unreadable
        if by_checkpoint and (cycle := (self._state().get("position") or {}).get("cycle")):
            return int(cycle) if self.cycle_count is None else min(int(cycle), self.cycle_count)
        return _whole((self.record.last or {}).get("cycle"))

    def _state(self) -> dict[str, Any]:
        """state.json of the checkpoint that the line goes on from; empty if there is none."""
        if self.checkpoint is None:
            return {}
        return read_plain(self.paths.checkpoints / self.checkpoint / "state.json") or {}


def _trainer_alive(supervisor: SupervisorState | None, beat: Heartbeat | None) -> bool:
    """Whether the process that wrote the heartbeat lives, and is not an earlier supervisor's of a running one."""
    if beat is None or not ran_at(beat.pid, beat.time):
        return False
    if supervisor is None or not supervisor.running():
        return True
    return beat.pid == supervisor.trainer_pid


def _latest(paths: LinePaths) -> str | None:
    """The name in checkpoints/latest (checkpoint.py reads it too, but imports numpy)."""
    try:
        name = paths.latest.read_text(errors="replace").strip()
    except OSError:
        return None
    return None if parse_checkpoint_name(name) is None else name


def _finite(value: float | None) -> float | None:
    """A number as JSON has it: null for what is not finite (the journal has it)."""
    return value if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
