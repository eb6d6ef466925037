"""`nstrain rollback`: a line goes on from one of its earlier checkpoints.

Five steps, each durable, in an order in which a kill between any two leaves a line that can be run and rolled back
again: the consumer's entry goes back (cycles that were deleted since are made again by the preparer, to the same
bytes); `latest` names the earlier checkpoint; the later ones are set aside; supervisor.json says so instead of how the
line ended before; the journal opens the next generation. A line killed before the last step trains on from the earlier
checkpoint as after any restart, comparing each update with its row. What was set aside stays until the line has
committed a checkpoint as far as all of it, or at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.disk import FileLock
from nstrain.base.errors import NstrainError, Refusal
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.data.manifest import last_manifest
from nstrain.line.abandoned import refuse_abandoned
from nstrain.line.checkpoint import read_latest, read_state, verify_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.line.retention import find_set_aside, refuse_other_disk, set_aside_later
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.line.state_files import SupervisorState, read_supervisor, write_supervisor
from nstrain.ops.consumer import refuse_shared_entry
from nstrain.record.journal import Journal


@dataclasses.dataclass(frozen=True)
class RolledBack:
    """What a rollback did."""

    update: int
    """The update that the line now stands after."""
    tokens: int
    """The position there."""
    generation: int
    """The generation that begins with its next update."""
    set_aside: tuple[str, ...]
    """Checkpoints that were moved to set-aside/, by their names there."""
    to_prepare: tuple[int, ...]
    """Data cycles from the line's position on that it had already trained and that are deleted: they are made again."""


def roll_back(run: Path, update: int) -> RolledBack:
    """Make a line that does not run stand where its checkpoint after `update` was written.

    Raises `Refusal` if the line runs, if it has no such checkpoint (naming those that it has) or that one is damaged,
    if supervisor.json is damaged, and if its data line is not there.
    """
    paths = LinePaths(run.resolve())
    refuse_no_line(run)
    with at_rest(paths, "rolled back"):
        settings = load_settings(paths)
        data = DataLine.open(Path(settings.data.work))
        refuse_shared_entry(paths, settings)
        _refuse_missing(paths, update)
        refuse_other_disk(paths)
        verify_checkpoint(paths.checkpoint(update))
        state = read_state(paths.checkpoint(update))
        cycle, row = state["position"]["cycle"], state["position"]["row"]
        ended = read_supervisor(paths)
        with Journal.open(paths.journal, settings.metrics) as journal:
            refuse_abandoned(paths, state, journal.generation_at)
            write_consumer(data.work, settings.id, cycle, row, state["tokens"], paths.root)
            set_aside = set_aside_later(paths, update)
            if ended is not None:
                write_supervisor(paths, _rolled_back(ended, update))
            generation = journal.begin_generation(update + 1)
    prepared = [number for number in range(cycle, last_manifest(data) + 1) if not data.is_ready(number)]
    return RolledBack(update, state["tokens"], generation, tuple(set_aside), tuple(prepared))


@contextmanager
def at_rest(paths: LinePaths, what: str) -> Iterator[None]:
    """Hold a line's locks, so that nobody runs it meanwhile. Raises `Refusal` if somebody does."""
    paths.supervisor_lock.parent.mkdir(exist_ok=True)
    try:
        supervisor = FileLock(paths.supervisor_lock).acquire(f"the supervisor of {paths.root}")
    except NstrainError as error:
        stop = typed("nstrain", "stop", paths.root)
        raise Refusal(f"{paths.root} runs and cannot be {what} ({error}); `{stop}` first") from None
    with supervisor:
        try:
            trainer = FileLock(paths.trainer_lock).acquire(f"the trainer of {paths.root}")
        except NstrainError as error:
            raise Refusal(f"{paths.root} cannot be {what} yet ({error}); its trainer saves and ends") from None
        with trainer:
            yield


def _rolled_back(ended: SupervisorState, update: int) -> SupervisorState:
    """What supervisor.json says until the next launch: how the line ended before is no longer where it stands."""
    return dataclasses.replace(
        ended,
        outcome="stopped",
        reason=f"rolled back to update {update}, not run since",
        trainer_pid=None,
        preparer_pid=None,
        waiting_for=None,
        waiting_since=None,
    )


def _refuse_missing(paths: LinePaths, update: int) -> None:
    updates = paths.checkpoint_updates()
    latest = read_latest(paths)
    if update not in updates:
        found = ", ".join(map(str, updates)) or "none"
        aside = [name for name, of in find_set_aside(paths).items() if of == update]
        gone = (
            f". That in {', '.join(str(paths.set_aside / name) for name in aside)} was set aside by a rollback and is "
            "not taken back: run again from an earlier one with the settings of then, the line comes to the same bits"
        )
        raise Refusal(
            f"{paths.root} has no checkpoint after update {update}; it has: {found}" + (gone if aside else "")
        )
    if latest is not None and update > latest:
        raise Refusal(
            f"{paths.checkpoint(update)} is beyond the line's newest checkpoint, u{latest:08d}: it belongs to a "
            "continuation that was abandoned"
        )
