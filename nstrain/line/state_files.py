"""The small files through which a line's processes see each other: heartbeat, STOP, supervisor.json.

Each is replaced as a whole and has one writer: the trainer writes the heartbeat, the supervisor supervisor.json, and
whoever wants the line to stop creates STOP, which the supervisor removes. Readers that only show things get None for a
heartbeat that is missing or that they do not understand, and go on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from typing import Any, Literal, get_args

from nstrain.base.disk import (
    PARTIAL_SUFFIX,
    atomic_write_json,
    fsync_dir,
    pretty_json,
    read_json,
    remove_entry,
    write_durable,
)
from nstrain.base.errors import Refusal
from nstrain.base.process import ProcessId, alive
from nstrain.line.paths import LinePaths

Stage = Literal["starting", "capturing", "training", "validating", "saving", "waiting_data", "stopping", "done"]
"""What a trainer can be doing. capturing: its first update of a row length, with all that is compiled for that."""

Outcome = Literal["done", "stopped", "failed"]
"""How a line's supervision can end."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What the trainer is doing; written at every update and at every change of stage."""

    time: float
    """When it was written (unix seconds)."""
    pid: int
    """The trainer."""
    stage: Stage
    update: int
    """The last finished update."""
    tokens: int
    """The position after it."""
    tokens_total: int | None = None
    """The position at the line's end; None: open-ended."""
    loss: float | None = None
    """The last update's loss in nats a token; None before the first, and when it is not finite."""
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    """The last update's."""
    cycle: int | None = None
    """The data cycle in use."""
    cycle_progress: float | None = None
    """How much of it is trained, 0 to 1."""
    eta_s: float | None = None
    """Seconds to the line's end at the present speed."""
    checkpoint: str | None = None
    """The newest committed checkpoint's name."""
    waiting_for: str | None = None
    """What a waiting trainer waits for, for people."""
    waiting_since: float | None = None
    """Since when (unix seconds)."""
    budget_s: float | None = None
    """Seconds within which the next beat must come; without it the trainer is taken to hang."""
    gpu_others: str | None = None
    """Other processes on the GPU when the trainer last looked, for people; None: nobody, or no GPU."""
    slow_saving: str | None = None
    """For how long and why the line stands still at every checkpoint, for people; None: it does not."""


_HEARTBEAT_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
    "Stage": (str,),
}


def write_heartbeat(paths: LinePaths, heartbeat: Heartbeat) -> None:
    """Replace the heartbeat. Numbers that are not finite become null (the journal has them). Raises `DiskFull`."""
    fields = dataclasses.asdict(heartbeat)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = None
    atomic_write_json(paths.heartbeat, fields, durable=False)


def read_heartbeat(paths: LinePaths) -> Heartbeat | None:
    """The heartbeat, or None if there is none or it is not one that this version understands."""
    try:
        value = json.loads(paths.heartbeat.read_bytes())
    except (OSError, ValueError):
        return None
    fields = {field.name: str(field.type) for field in dataclasses.fields(Heartbeat)}
    if not isinstance(value, dict) or value.keys() != fields.keys() or value["stage"] not in get_args(Stage):
        return None
    for name, kind in fields.items():
        if not isinstance(value[name], _HEARTBEAT_KINDS[kind]) or isinstance(value[name], bool):
            return None
    return Heartbeat(**value)


@dataclasses.dataclass(frozen=True)
class StopRequest:
    """Who asked the line to stop, and when. All are None for a STOP file made by hand (`touch STOP`): at once."""

    requested_at: float | None
    """Unix seconds."""
    by_pid: int | None
    at_cycle_end: int | None = None
    """The data cycle at whose end to stop; None: at the next update boundary."""


def request_stop(paths: LinePaths, at_cycle_end: int | None = None) -> None:
    """Ask the line to stop at its next update boundary, or at the end of a data cycle.

    A request to stop at once that stands already is left as it is; one for a cycle's end is replaced.
    """
    standing = read_stop(paths)
    if standing is not None and standing.at_cycle_end is None:
        return
    pid = os.getpid()
    # Its own temporary name: two people may ask at the same moment.
    temporary = paths.stop.with_name(f"{paths.stop.name}.{pid}{PARTIAL_SUFFIX}")
    write_durable(temporary, pretty_json(dataclasses.asdict(StopRequest(time.time(), pid, at_cycle_end))))
    os.replace(temporary, paths.stop)
    fsync_dir(paths.root)


def stop_requested(paths: LinePaths) -> bool:
    """Whether the line is asked to stop at once (mostly one look at the directory: cheap enough for every update)."""
    request = read_stop(paths)
    return request is not None and request.at_cycle_end is None


def read_stop(paths: LinePaths) -> StopRequest | None:
    """The request to stop, or None if there is none. One that we may not read (another user's) is to stop at once."""
    try:
        text = paths.stop.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        return StopRequest(None, None)
    try:
        value = json.loads(text)
        cycle = value["at_cycle_end"]
        return StopRequest(float(value["requested_at"]), int(value["by_pid"]), None if cycle is None else int(cycle))
    except (ValueError, KeyError, TypeError):
        return StopRequest(None, None)


def clear_stop(paths: LinePaths) -> None:
    """Take the request to stop away, if there is one."""
    if os.path.lexists(paths.stop):
        remove_entry(paths.stop)
    fsync_dir(paths.root)


@dataclasses.dataclass(frozen=True)
class SupervisorState:
    """supervisor.json: who supervises the line, its children, and how it ended.

    The file also holds the supervisor's pid as `pid`, for people and scripts.
    """

    supervisor: ProcessId
    """The supervisor, recognisable after its pid is reused."""
    started_at: float
    """When it started (unix seconds)."""
    launches: int = 0
    """Trainers it has launched."""
    trainer_pid: int | None = None
    """The trainer; None while none runs."""
    preparer_pid: int | None = None
    """The preparer; None while none runs."""
    outcome: Outcome | None = None
    """How it ended; None while it supervises, and for one that was killed."""
    reason: str | None = None
    """Why it ended so, for people."""
    waiting_for: str | None = None
    """What the supervisor itself waits for before it can launch the trainer, for people."""
    waiting_since: float | None = None
    """Since when (unix seconds)."""
    failures: int = 0
    """Launches in a row that failed without a checkpoint committed since (five end the line)."""
    failures_total: int = 0
    """Launches that failed since the supervisor started."""
    last_failure: str | None = None
    """What the last one of them died of, for people."""
    crashes_beside_others: int = 0
    """Crashes in a row while other processes were on the GPU; they do not count as failures."""
    preparer_failures: int = 0
    """Failures of the preparer in a row, without a cycle prepared since."""
    preparer_failure: str | None = None
    """What its last failure was of, for people."""
    mirror_pid: int | None = None
    """The journal's mirror; None while none runs."""
    mirror_failures: int = 0
    """Ends of the mirror in a row that nobody asked for."""
    mirror_failure: str | None = None
    """What the last of them was, for people."""
    last_event: str | None = None
    """The last thing that happened, as in run.log."""
    last_event_at: float | None = None
    """When (unix seconds)."""

    def running(self) -> bool:
        """Whether that very process is alive."""
        return self.outcome is None and alive(self.supervisor)


def write_supervisor(paths: LinePaths, state: SupervisorState) -> None:
    """Replace supervisor.json. Raises `DiskFull`."""
    fields = dataclasses.asdict(state)
    atomic_write_json(paths.supervisor_json, {"pid": state.supervisor.pid, **fields})


def read_supervisor(paths: LinePaths) -> SupervisorState | None:
    """supervisor.json, or None if the line never had a supervisor.

    Raises `Refusal` if the file is damaged: whether a line is supervised must not be guessed.
    """
    if not paths.supervisor_json.exists():
        return None
    value: Any = read_json(paths.supervisor_json)
    try:
        names = {field.name for field in dataclasses.fields(SupervisorState)}
        fields = {name: value[name] for name in value if name in names}  # one of an older version may lack some
        fields["supervisor"] = ProcessId.from_json(fields["supervisor"])
        return SupervisorState(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"{paths.supervisor_json}: expected a supervisor's state, found something else ({error!r}); "
            "remove the file if no `nstrain run` of this line is running"
        ) from None
