"""How far a line's copy on its tracker is (see status.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nstrain.base.errors import Refusal
from nstrain.base.process import ran_at
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import SupervisorState
from nstrain.mirror.state import MirrorState, read_state
from nstrain.ops.status_record import Record


@dataclasses.dataclass(frozen=True)
class TrackerNow:
    """A line's copy on its tracker."""

    service: str
    """The kind of service."""
    url: str | None
    """Where people see the run; None until the service has said so."""
    run_id: str | None
    """The run's id there; None before it is begun."""
    pushed_through: int | None
    """The last update that was handed over; None: none of this run."""
    behind_updates: int | None
    """Recorded updates after that one; None if the journal cannot be read."""
    differences: int
    """Updates of which the service has another row than the journal (0 is right)."""
    failing_since: float | None
    """Since when nothing was found to arrive (unix seconds); None: all is well, or its process fails."""
    error: str | None
    """What is wrong; None: nothing."""
    pid: int | None
    """The mirror, while it lives."""


def tracker_now(
    paths: LinePaths, tracker: Mapping[str, Any] | None, record: Record, supervisor: SupervisorState | None
) -> TrackerNow | None:
    """The copy of a line whose run.json has that `tracker`; None without one. `supervisor` is the one that lives."""
    if tracker is None:
        return None
    damage = None
    try:
        state = read_state(paths)
    except Refusal as error:
        state, damage = None, str(error)
    pid = _pid(state, supervisor)
    crashes = None
    if supervisor is not None and supervisor.mirror_failures:
        crashes = (
            f"its process failed {supervisor.mirror_failures} times in a row, the last: {supervisor.mirror_failure}"
        )
    current = state if state is not None and _is_of(state, tracker, record) else None
    return TrackerNow(
        service=str(tracker.get("service")),
        url=current.url if current else None,
        run_id=current.run_id if current else None,
        pushed_through=current.pushed_through if current else None,
        behind_updates=_behind(current, record),
        differences=current.differences if current else 0,
        failing_since=state.failing_since if state else None,
        error=damage or crashes or (state.error if state else None),
        pid=pid,
    )


def _pid(state: MirrorState | None, supervisor: SupervisorState | None) -> int | None:
    """The mirror's process, whoever started it."""
    if supervisor is not None and supervisor.mirror_pid is not None:
        return supervisor.mirror_pid
    if state is None or state.pid is None:
        return None
    return state.pid if ran_at(state.pid, state.updated_at) else None


def _is_of(state: MirrorState, tracker: Mapping[str, Any], record: Record) -> bool:
    """Whether a run is the copy of the line as it stands: in the project of now, of the newest recorded generation."""
    places = [(getattr(state, name), tracker.get(name)) for name in ("service", "project", "entity", "base_url")]
    generation = 0 if record.last is None else record.last["generation"]
    return all(then == now for then, now in places) and state.generation >= generation


def _behind(state: MirrorState | None, record: Record) -> int | None:
    if record.unreadable:
        return None
    last = -1 if record.last is None else int(record.last["update"])
    pushed = -1 if state is None or state.pushed_through is None else state.pushed_through
    return max(0, last - pushed)
