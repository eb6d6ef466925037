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
from pathlib import Path
from typing import Any, Literal

from nstrain.base.disk import read_json
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.process import ran_at
from nstrain.base.units import human_bytes
from nstrain.line.paths import LinePaths, parse_checkpoint_name
from nstrain.line.state_files import Heartbeat, SupervisorState, read_heartbeat, read_supervisor, stop_requested
from nstrain.record.journal import Journal, Row

State = Literal["new", "running", "waiting", "stopped", "failed", "done"]
"""new (never run), running, waiting (for what `waiting_for` says), stopped, failed (see `reason`), done."""


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """Bytes that a line takes, and that are left for it."""

    checkpoints_bytes: int
    journal_bytes: int
    cycles_bytes: int
    """Prepared cycles of its data line (other lines may use them too)."""
    free_bytes: int
    """Free on the file system of the line."""


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
    """All that lie on disk."""
    validation: dict[str, float | None]
    """The last validation's readings by name; None for one that is not finite."""
    validated_update: int | None
    """The update they belong to."""
    differences: int
    """Replayed updates that differed from the row recorded before (0 is right)."""
    pid: int | None
    """The supervisor, while it lives."""
    trainer_pid: int | None
    preparer_pid: int | None
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
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{paths.run_json}: field {error} is missing or wrong; `nstrain check {run}` says more") from None
    supervisor, beat = read_supervisor(paths), read_heartbeat(paths)
    trainer_alive = _trainer_alive(supervisor, beat)
    record = _read_record(paths, every)
    checkpoint = _latest(paths)
    schedule = _read_schedule(work)
    preparer = _read_preparer(work)
    now = _Now(paths, supervisor, beat if trainer_alive else None, record, checkpoint, schedule, preparer)
    state, reason = now.state_and_reason()
    waiting_for, waiting_since = now.waiting() if state == "waiting" else (None, None)
    update, tokens = now.position()
    live = now.beat
    last = record.last or {}
    supervised = supervisor is not None and supervisor.running()
    return Status(
        state=state,
        update=update,
        tokens=tokens,
        tokens_total=schedule.total_tokens if schedule is not None else beat.tokens_total if beat else None,
        loss=_finite(live.loss if live and live.loss is not None else last.get("train/loss")),
        tokens_per_s=live.tokens_per_s if live else None,
        cycle=live.cycle if live and live.cycle is not None else _whole(last.get("cycle")),
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
        cycles_ready=_ready_cycles(work),
        preparer=None if preparer is None else preparer.describe(),
        checkpoints=tuple(paths.checkpoint(number).name for number in paths.checkpoint_updates()),
        validation={name: _finite(value) for name, value in record.validation.items()},
        validated_update=record.validated_update,
        differences=record.differences,
        pid=supervisor.supervisor.pid if supervised and supervisor else None,
        trainer_pid=live.pid if live else supervisor.trainer_pid if supervised and supervisor else None,
        preparer_pid=None if preparer is None else preparer.pid,
        disk=_disk_use(paths, work),
    )


@dataclasses.dataclass(frozen=True)
class _Now:
    """What was read, and the questions whose answers need several of the files."""

    paths: LinePaths
    supervisor: SupervisorState | None
    beat: Heartbeat | None
    """The heartbeat, if its writer lives."""
    record: _Record
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
class _Record:
    """What the journal holds of interest."""

    last: Row | None
    validation: dict[str, float]
    validated_update: int | None
    differences: int


def _read_record(paths: LinePaths, validation_every: int) -> _Record:
    """The last row, the last validation (searched as far back as one must be), and the differences."""
    if not paths.journal.exists():
        return _Record(None, {}, None, 0)
    with Journal.open_for_reading(paths.journal) as journal, journal.snapshot():
        last = journal.last_row()
        validation: dict[str, float] = {}
        validated_update = None
        if last is not None:
            update = int(last["update"])
            for row in journal.rows(from_update=update - update % validation_every):
                readings = {name: value for name, value in row.items() if name.startswith("val_")}
                if readings:
                    validation, validated_update = readings, int(row["update"])
        return _Record(last, validation, validated_update, journal.differences())


@dataclasses.dataclass(frozen=True)
class _Schedule:
    cycle_count: int | None
    total_tokens: int | None

    def ends_at(self, tokens: int) -> bool:
        """Whether the schedule, as it is now, ends at this position."""
        return self.total_tokens is not None and tokens >= self.total_tokens


def _read_schedule(work: Path) -> _Schedule | None:
    """The size of a data line's schedule; None if it cannot be read."""
    line = _read_plain(work / "line.json")
    try:
        pieces = [(piece["cycles"], piece["cycle_tokens"]) for piece in line["schedule"]] if line else []
        if not pieces:
            return None
        if pieces[-1][0] is None:
            return _Schedule(None, None)
        return _Schedule(sum(cycles for cycles, _ in pieces), sum(cycles * tokens for cycles, tokens in pieces))
    except (KeyError, TypeError):
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


def _disk_use(paths: LinePaths, work: Path) -> DiskUse:
    journals = [path for path in paths.root.glob(f"{paths.journal.name}*") if path.is_file()]
    return DiskUse(
        checkpoints_bytes=_bytes_below(paths.checkpoints) + _bytes_below(paths.set_aside),
        journal_bytes=sum(path.stat().st_size for path in journals),
        cycles_bytes=_bytes_below(work / "cycles"),
        free_bytes=shutil.disk_usage(paths.root).free,
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
