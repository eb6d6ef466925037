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
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from nstrain.base.disk import read_json
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.process import ran_at
from nstrain.base.units import human_bytes
from nstrain.line.branches import read_branches
from nstrain.line.listing import ListedCheckpoint, forecast_of, list_checkpoints
from nstrain.line.paths import LinePaths, parse_checkpoint_name
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    read_heartbeat,
    read_stop,
    read_supervisor,
    stop_requested,
)
from nstrain.ops.status_record import DEFAULT_LOSS_JUMP, Record, read_record

State = Literal["new", "running", "waiting", "stopped", "failed", "done"]
"""new (never run), running, waiting (for what `waiting_for` says), stopped, failed (see `reason`), done."""


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """Bytes that a line takes, and that are left for it."""

    kept_bytes: int
    """Checkpoints that stay for ever."""
    rolling_bytes: int
    """The other checkpoints."""
    set_aside_bytes: int
    """Checkpoints that rollbacks have set aside."""
    journal_bytes: int
    logs_bytes: int
    """run.log and its older parts."""
    cycles_bytes: int
    """Prepared cycles of its data line (other lines may use them too)."""
    free_bytes: int
    """Free on the file system of the line."""
    end_bytes: int | None
    """What its checkpoints will take at most beyond now, up to the schedule's end; None: open-ended."""


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
    """None while it does not run."""
    cycle: int | None
    """The data cycle in use, or the last one that was."""
    checkpoint: str | None
    """The checkpoint that the line would go on from."""
    eta_s: float | None
    """Seconds to the end at the present speed; None while it does not run."""
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
    """By how much the mean loss of the last hundred updates is above that of the hundred before."""
    validation: dict[str, float | None]
    """The last validation's losses by name (`nstrain journal` has all readings); None for one that is not finite."""
    validated_update: int | None
    """The update they belong to."""
    validation_before: dict[str, float | None]
    """The same of the regular validation before it."""
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
    branch_of: str | None
    """The parent's directory, of a branch."""
    branches: tuple[str, ...]
    """Directories of the branches that were made from it."""
    generation: int
    """Of the last recorded update; 1 unless it was rolled back (0: its parent's)."""
    disk: DiskUse

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, the fields under their own names."""
        return dataclasses.asdict(self)


def status(run: Path) -> Status:
    """Look at a line. Raises `Refusal` if `run` is not one or its files are damaged."""
    paths = LinePaths(run.resolve())
    if not paths.run_json.exists():
        raise Refusal(f"{run} is not a training line (no run.json); make one with `nstrain new`")
    settings = read_json(paths.run_json)
    try:
        work = Path(settings["data"]["work"])
        preset, every = str(settings["model"]["preset"]), int(settings["validation"]["every_updates"])
        keep_last = int(settings["checkpoints"]["keep_last"])
        loss_jump = float(settings.get("guards", {}).get("loss_jump", DEFAULT_LOSS_JUMP))
        branch_of = (settings.get("branch") or {}).get("from")
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{paths.run_json}: field {error} is missing or wrong; `nstrain check {run}` says more") from None
    supervisor, beat = read_supervisor(paths), read_heartbeat(paths)
    trainer_alive = _trainer_alive(supervisor, beat)
    record = read_record(paths, every, loss_jump)
    checkpoint = _latest(paths)
    checkpoints = list_checkpoints(paths)
    schedule = _read_schedule(work)
    preparer = _read_preparer(work)
    now = _Now(paths, supervisor, beat if trainer_alive else None, record, checkpoint, schedule, preparer)
    state, reason = now.state_and_reason()
    waiting_for, waiting_since = now.waiting() if state == "waiting" else (None, None)
    update, tokens = now.position()
    live = now.beat
    last = record.last or {}
    supervised = supervisor is not None and supervisor.running()
    stop = read_stop(paths)
    cycle = live.cycle if live and live.cycle is not None else _whole(last.get("cycle"))
    ready = _ready_cycles(work)
    ahead = None if schedule is None else schedule.ready_beyond(tokens, ready)
    speed = record.tokens_per_s if live else None
    return Status(
        state=state,
        update=update,
        tokens=tokens,
        tokens_total=schedule.total_tokens if schedule is not None else beat.tokens_total if beat else None,
        loss=_finite(live.loss if live and live.loss is not None else last.get("train/loss")),
        tokens_per_s=live.tokens_per_s if live else None,
        cycle=cycle,
        checkpoint=checkpoint,
        eta_s=live.eta_s if live else None,
        waiting_for=waiting_for,
        waiting_since=waiting_since,
        reason=reason,
        run=str(paths.root),
        preset=preset,
        stage=live.stage if live else None,
        stopping=state in ("running", "waiting") and (stop_requested(paths) or bool(live and live.stage == "stopping")),
        learning_rate=_finite(live.learning_rate if live and live.learning_rate else last.get("train/learning_rate")),
        cycle_progress=live.cycle_progress if live else None,
        cycle_count=None if schedule is None else schedule.cycle_count,
        cycles_ready=ready,
        preparer=None if preparer is None else preparer.describe(),
        checkpoints=tuple(item.name for item in checkpoints if not item.set_aside),
        kept_checkpoints=sum(1 for item in checkpoints if not item.set_aside and item.kept is not False),
        checkpoint_at=next((item.written_at for item in checkpoints if item.latest), None),
        losses=record.losses,
        loss_trend=_finite(record.loss_trend),
        validation={name: _finite(value) for name, value in record.validation.items()},
        validated_update=record.validated_update,
        validation_before={name: _finite(value) for name, value in record.validation_before.items()},
        validated_before=record.validated_before,
        alarms=record.alarms,
        differences=record.differences,
        pid=supervisor.supervisor.pid if supervised and supervisor else None,
        trainer_pid=live.pid if live else supervisor.trainer_pid if supervised and supervisor else None,
        preparer_pid=None if preparer is None else preparer.pid,
        ahead_tokens=ahead,
        ahead_s=None if ahead is None or not speed else ahead / speed,
        stop_at_cycle_end=None if stop is None else stop.at_cycle_end,
        gpu_others=live.gpu_others if live else None,
        slow_saving=live.slow_saving if live else None,
        failures=supervisor.failures if supervised and supervisor else 0,
        last_failure=supervisor.last_failure if supervised and supervisor else None,
        branch_of=branch_of,
        branches=tuple(branch.run for branch in read_branches(paths)),
        generation=int(last.get("generation", 1)),
        disk=_disk_use(paths, work, checkpoints, keep_last, schedule),
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
    schedule: _Schedule | None
    preparer: _Preparer | None

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
        return f"`nstrain run {self.paths.root}` {where}"

    def waiting(self) -> tuple[str | None, float | None]:
        """What a waiting line waits for, and since when."""
        if self.beat is not None and self.beat.stage == "waiting_data":
            what = self.beat.waiting_for or "data"
            if self.preparer is not None:
                what += f" ({self.preparer.describe()})"
            return what, self.beat.waiting_since
        assert self.supervisor is not None
        return self.supervisor.waiting_for, self.supervisor.waiting_since

    def position(self) -> tuple[int, int]:
        """The last finished update and the tokens after it.

        A trainer's own word while it trains. Before that it may stand at an older checkpoint than the record reaches;
        of a line that does not run, the record counts.
        """
        if self.beat is not None and self.beat.stage != "starting":
            return self.beat.update, self.beat.tokens
        if self.beat is not None and self.checkpoint is not None:
            state = _read_plain(self.paths.checkpoints / self.checkpoint / "state.json") or {}
            return int(state.get("update", 0)), int(state.get("tokens", 0))
        last = self.record.last or {}
        return int(last.get("update", 0)), int(last.get("tokens", 0))


def _trainer_alive(supervisor: SupervisorState | None, beat: Heartbeat | None) -> bool:
    """Whether the process that wrote the heartbeat lives, and is not an earlier supervisor's of a running one."""
    if beat is None or not ran_at(beat.pid, beat.time):
        return False
    if supervisor is None or not supervisor.running():
        return True
    return beat.pid == supervisor.trainer_pid


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The cycles of a data line."""

    first_token: int
    """The position at which cycle 1 begins: of a branch the fork's."""
    pieces: tuple[tuple[int | None, int], ...]
    """Cycles and tokens of a cycle, piece by piece; the last may have no end (None)."""

    @property
    def cycle_count(self) -> int | None:
        return None if self.pieces[-1][0] is None else sum(cycles or 0 for cycles, _ in self.pieces)

    @property
    def total_tokens(self) -> int | None:
        if self.pieces[-1][0] is None:
            return None
        return self.first_token + sum((cycles or 0) * tokens for cycles, tokens in self.pieces)

    def ends_at(self, tokens: int) -> bool:
        """Whether the schedule, as it is now, ends at this position."""
        return self.total_tokens is not None and tokens >= self.total_tokens

    def ready_beyond(self, position: int, ready: tuple[int, ...]) -> int:
        """Tokens of these cycles that lie beyond a position."""
        return sum(max(0, end - max(position, first)) for first, end in map(self._extent, ready))

    def _extent(self, cycle: int) -> tuple[int, int]:
        first = self.first_token
        for cycles, tokens in self.pieces:
            if cycles is None or cycle <= cycles:
                return first + (cycle - 1) * tokens, first + cycle * tokens
            first, cycle = first + cycles * tokens, cycle - cycles
        return first, first


def _read_schedule(work: Path) -> _Schedule | None:
    """A data line's schedule; None if it cannot be read."""
    line = _read_plain(work / "line.json")
    try:
        pieces = tuple((piece["cycles"], int(piece["cycle_tokens"])) for piece in line["schedule"]) if line else ()
        if not line or not pieces:
            return None
        return _Schedule(int((line.get("fork") or {}).get("tokens", 0)), pieces)
    except (KeyError, TypeError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class _Preparer:
    """preparer.json of a preparer that lives."""

    pid: int
    stage: str
    cycle: int
    progress: float
    error: str | None
    download: dict[str, Any]

    def describe(self) -> str:
        """What it does, in a few words."""
        fetched = f"{human_bytes(self.download.get('bytes_done', 0))} of {human_bytes(self.download.get('bytes', 0))}"
        words = {
            "downloading": f"fetching {self.download.get('source')} for cycle {self.cycle}, {fetched}"
            + (f" ({self.error})" if self.error else ""),
            "preparing": f"preparing cycle {self.cycle}, {100 * self.progress:.0f} %",
            "waiting_consumer": "enough cycles are ready",
            "waiting_disk": f"waiting for disk space: {self.error}",
        }
        return words.get(self.stage, self.stage)


def _read_preparer(work: Path) -> _Preparer | None:
    value = _read_plain(work / "preparer.json")
    try:
        if not value or not ran_at(int(value["pid"]), float(value["since"])):
            return None
        return _Preparer(
            int(value["pid"]),
            str(value["stage"]),
            int(value["cycle"]),
            float(value["progress"]),
            value["error"],
            dict(value.get("download") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _ready_cycles(work: Path) -> tuple[int, ...]:
    directory = work / "cycles"
    names = [path.parent.name for path in directory.glob("[0-9]*/READY")] if directory.is_dir() else []
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _latest(paths: LinePaths) -> str | None:
    """The name in checkpoints/latest (checkpoint.py reads it too, but imports numpy)."""
    try:
        name = paths.latest.read_text(errors="replace").strip()
    except OSError:
        return None
    return None if parse_checkpoint_name(name) is None else name


def _disk_use(
    paths: LinePaths, work: Path, checkpoints: list[ListedCheckpoint], keep_last: int, schedule: _Schedule | None
) -> DiskUse:
    def bytes_of(files: Iterable[Path]) -> int:
        return sum(path.stat().st_size for path in files if path.is_file())

    free_bytes = shutil.disk_usage(paths.root).free
    count = None if schedule is None else schedule.cycle_count
    own = [item for item in checkpoints if not item.set_aside]
    return DiskUse(
        kept_bytes=sum(item.bytes for item in own if item.kept is not False),
        rolling_bytes=sum(item.bytes for item in own if item.kept is False),
        set_aside_bytes=sum(item.bytes for item in checkpoints if item.set_aside),
        journal_bytes=bytes_of(paths.root.glob(f"{paths.journal.name}*")),
        logs_bytes=bytes_of(paths.root.glob(f"{paths.run_log.name}*")),
        cycles_bytes=_bytes_below(work / "cycles"),
        free_bytes=free_bytes,
        end_bytes=forecast_of(checkpoints, keep_last, count, 0, free_bytes).end_bytes if own else None,
    )


def _bytes_below(directory: Path) -> int:
    """Bytes of the files two levels below a directory; what vanishes meanwhile does not count."""
    total = 0
    for path in directory.glob("*/*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _read_plain(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (NstrainError, OSError):
        return None
    return value if isinstance(value, dict) else None


def _finite(value: float | None) -> float | None:
    """A number as JSON has it: null for what is not finite (the journal has it)."""
    return value if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
