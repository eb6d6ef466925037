"""`nstrain branch`: a line that goes on from a trunk's cycle end by itself - to decay its rate, to learn long rows.

It takes over weights, moments, their average and counters as they are at the fork, every setting that a line keeps for
life as the trunk was trained with it there, and the trunk's record up to there (generation 0 of its own journal). What
may be edited freely (shapes, times of saving and validating, guards) is as in the trunk's run.json of now. From the
fork on it has its own data line, forked from the trunk's after the same cycle, and its own schedule. Neither disturbs
the other, and neither reads the other's directory again.

Order of the writes: the data line (whole or absent), then the branch's directory (whole or absent; it appears after
its entry in the parent's branches.json), then its entry among the consumers of its data line (which `nstrain run`
would write too). The same command goes on after a kill: a data line that is there already is taken if it is a fork of
the trunk's after that cycle and its cycles end with the plan.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nstrain.base.disk import directory_by_rename, refuse_existing
from nstrain.base.errors import Refusal
from nstrain.data.branch import fork_line, forked_recipe, planned_fork
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.data.plan import shortages
from nstrain.data.schedule import Piece
from nstrain.data.val import ValidationRows, collect_held_out, held_out_digest
from nstrain.line.abandoned import refuse_abandoned
from nstrain.line.branches import add_branch, new_branch, read_branches
from nstrain.line.checkpoint import read_latest, read_state
from nstrain.line.fork import fork_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings
from nstrain.ops.branch_plan import AskedStage, Stage, StageOptions, branch_settings, place_stages, stage_cycles
from nstrain.ops.branch_trunk import changed_since_fork, settings_at_fork
from nstrain.ops.consumer import enter_consumer
from nstrain.ops.schedule_notes import schedule_notes
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import FIRST_GENERATION
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.settings.changes import Changes
from nstrain.settings.model import dump, validate
from nstrain.settings.run import HELD_OUT, METRICS_VERSION, RunSettings, save_run


@dataclasses.dataclass(frozen=True)
class Branched:
    """A branch that was made."""

    settings: RunSettings
    stages: tuple[Stage, ...]
    data: DataLine
    update: int
    """The parent's update at the fork."""
    made_data: bool
    """Whether its data line was made too, or was there already."""
    changed_since: tuple[str, ...]
    """What the parent's run.json says otherwise by now, which the branch does not take over; for people."""
    notes: tuple[str, ...]
    """What is allowed but hardly meant (`schedule_notes`), whether validations are of other text than before, and
    which sources do not last to its end."""


def make_branch(
    run: Path,
    parent_run: Path,
    at_cycle: int,
    asked: tuple[AskedStage, ...],
    plan: str,
    work: Path,
    *,
    recipe: dict[str, int] | None = None,
    options: StageOptions | None = None,
    on_held_out: Callable[[str, float], None] = lambda source, share: None,
) -> Branched:
    """Make the line `run` as a branch of `parent_run` after its data cycle `at_cycle`, with its data line in `work`.

    `plan` is what was typed for `asked`, for the parent's list. `recipe` is the mixture of the branch's data line (the
    trunk's unless given). Long rows are the longest that the model reads and the trunk's unit allows, unless `options`
    say another length; a unit longer than the trunk's has held-out rows of its own gathered (`on_held_out`).

    Raises `Refusal` before anything is written: a directory that exists, a cycle that the parent has not finished or
    whose checkpoint is gone, stages, rates or lengths that do not fit. Raises `DiskFull` if the copy of the parent's
    checkpoint has no room.
    """
    options = options or StageOptions()
    refuse_existing(run)
    paths = LinePaths(parent_run.resolve())
    now = load_settings(paths)
    if now.metrics != METRICS_VERSION:
        raise Refusal(f"{paths.run_json}: records metrics version {now.metrics}, this nstrain {METRICS_VERSION}")
    refuse_network_file_system(LinePaths(run).journal)
    read_branches(paths)  # a damaged list is refused before the data line is made
    state = _state_at_cycle_end(paths, at_cycle)
    with Journal.open_for_reading(paths.journal) as record:
        refuse_abandoned(paths, state, record.generation_at)
    parent = settings_at_fork(state, now, str(paths.checkpoint(state["update"])))
    trunk = DataLine.open(Path(parent.data.work))
    row_tokens = options.long_row_tokens or _longest_row(parent, trunk.unit_tokens)
    unit_tokens = _unit(trunk, [row_tokens] if any(stage.kind == "long" for stage in asked) else [])
    made_data = not (work / "line.json").exists()
    data, made_for = _planned(trunk, work, at_cycle, asked, recipe, unit_tokens, made_data)
    _refuse_other_fork(data, trunk, at_cycle, state)
    stages = place_stages(asked, data, parent, at_cycle, options, row_tokens, made_for)
    settings = _settings(run, paths, parent, state, at_cycle, stages, options, work)
    _refuse_unfit(settings, data, row_tokens, stages)
    if made_data:
        data = fork_line(work, trunk, at_cycle, data.settings.schedule, unit_tokens)
    if not (work / "val").exists():
        collect_held_out(data, progress=on_held_out)
    for piece in settings.rows:
        ValidationRows.open(data, piece.row_tokens, settings.validation.rows_per_source)
    _write(run, paths, settings, state, plan, held_out_digest(data))
    return Branched(
        settings=settings,
        stages=stages,
        data=data,
        update=state["update"],
        made_data=made_data,
        changed_since=changed_since_fork(parent, now, state["tokens"]),
        notes=(*_held_out_notes(data, trunk), *schedule_notes(settings, data.schedule), *shortages(data)),
    )


def _held_out_notes(data: DataLine, trunk: DataLine) -> tuple[str, ...]:
    if data.unit_tokens == trunk.unit_tokens:
        return ()
    return (
        f"its held-out text is for rows of {data.unit_tokens:,} tokens, its trunk's for {trunk.unit_tokens:,}: "
        "validation losses before the fork and after it are of different text, and not to be compared",
    )


def _state_at_cycle_end(paths: LinePaths, cycle: int) -> dict[str, Any]:
    """state.json of the parent's checkpoint at a cycle's end. Raises `Refusal` naming the cycles that have one."""
    latest, ends = read_latest(paths), {}
    for update in paths.checkpoint_updates():
        if latest is None or update <= latest:  # without it the line goes on from the highest number
            state = read_state(paths.checkpoint(update))
            position = state["position"]
            if position["row"] == 0 and position["cycle"] > 1 and position["previous"] is not None:
                ends[position["cycle"] - 1] = state
    if cycle not in ends:
        has = f"those of cycles {', '.join(map(str, sorted(ends)))}" if ends else "none at the end of any cycle"
        raise Refusal(f"{paths.root} has no checkpoint at the end of data cycle {cycle}; it has {has}")
    return ends[cycle]


def _longest_row(settings: RunSettings, unit_tokens: int) -> int:
    """The longest row that the model reads and the data line's unit can be cut into."""
    from nstrain.train.model import longest_row  # torch stands behind it

    longest = min(longest_row(settings) or unit_tokens, unit_tokens)
    return next(length for length in range(longest, 0, -1) if unit_tokens % length == 0)


def _unit(trunk: DataLine, lengths: list[int]) -> int:
    """The branch's unit: the trunk's, or the length of its long rows if that is a multiple of it."""
    for length in lengths:
        if length > trunk.unit_tokens and length % trunk.unit_tokens == 0:
            return length
        refuse_row_length(length, trunk.unit_tokens)
    return trunk.unit_tokens


def _planned(
    trunk: DataLine,
    work: Path,
    at_cycle: int,
    asked: tuple[AskedStage, ...],
    recipe: dict[str, int] | None,
    unit_tokens: int,
    is_new: bool,
) -> tuple[DataLine, tuple[tuple[Piece, ...], ...] | None]:
    """The branch's data line as it is on disk or, in memory alone, as it will be, with the pieces of each stage."""
    if not is_new:
        if recipe is not None:
            raise Refusal(f"{work}: is a data line already, with a recipe of its own; leave the shares out")
        return DataLine.open(work), None
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise Refusal(f"{work}: exists already and is no data line; name a new directory, or remove this one first")
    shares = forked_recipe(trunk, at_cycle, recipe)
    longest_cycle = max(piece.cycle_tokens for piece in trunk.settings.schedule)
    made_for = stage_cycles(asked, shares, longest_cycle, unit_tokens)
    pieces = tuple(piece for of_stage in made_for for piece in of_stage)
    return planned_fork(work, trunk, at_cycle, pieces, unit_tokens), made_for


def _refuse_other_fork(data: DataLine, trunk: DataLine, at_cycle: int, state: dict[str, Any]) -> None:
    """Refuse a data line that does not begin where the parent's checkpoint was written."""
    fork = data.settings.fork
    if fork is None or (fork.line, fork.cycle) != (trunk.id, at_cycle):
        raise Refusal(f"{data.work}: is a data line, but not a fork of {trunk.work} after cycle {at_cycle}")
    trained = state["position"]["previous"]["manifest_sha256"]
    if fork.manifest_sha256 != trained:
        raise Refusal(
            f"{trunk.manifest_path(at_cycle)}: has sha256 {fork.manifest_sha256}, the parent's checkpoint was trained "
            f"on {trained}; put the data line back as it was"
        )


def _settings(
    run: Path,
    paths: LinePaths,
    parent: RunSettings,
    state: dict[str, Any],
    at_cycle: int,
    stages: tuple[Stage, ...],
    options: StageOptions,
    work: Path,
) -> RunSettings:
    """The branch's run.json."""
    fork = {"from": str(paths.root), "line": parent.id, "at_cycle": at_cycle}
    fields = {
        **dump(parent),
        **branch_settings(parent, stages, options.decay_shape or "linear", options.tokens_per_update),
        "id": secrets.token_hex(8),
        "data": {**dump(parent)["data"], "work": str(work.resolve())},
        "branch": {**fork, "update": state["update"], "tokens": state["tokens"]},
        "allow_changes": [],
    }
    return validate(RunSettings, fields, f"{run}: the branch's settings")


def _refuse_unfit(settings: RunSettings, data: DataLine, row_tokens: int, stages: tuple[Stage, ...]) -> None:
    from nstrain.train.model import refuse_long_rows

    refuse_long_rows(settings)
    for stage in stages:
        refuse_row_length(stage.row_tokens, data.unit_tokens)
        shortest = settings.row_tokens_at(1)
        if stage.kind == "long" and stage.row_tokens <= shortest and len(stages) > 1:
            raise Refusal(
                f"long rows of {row_tokens:,} tokens are no longer than the trunk's of {shortest:,}: the data line's "
                f"unit is {data.unit_tokens:,}; ask for a multiple of it (--long-row-tokens), which the model must read"
            )


def _write(
    run: Path, parent: LinePaths, settings: RunSettings, state: dict[str, Any], plan: str, held_out: str
) -> None:
    """The branch's directory, whole or absent, with its checkpoint and its parent's record."""
    assert settings.branch is not None
    changes = {
        "id": settings.id,
        "generation": FIRST_GENERATION,
        "position": {
            "cycle": 1,
            "row": 0,
            "row_tokens": settings.row_tokens_at(1),
            "manifest_sha256": None,
            "order_digest": None,
            "previous": None,
        },
        "reason": "start",
        "kept": True,
        "settings": dump(settings),
        "changes": Changes().to_json(),
        HELD_OUT: held_out,
    }
    with directory_by_rename(run) as directory:
        paths = LinePaths(directory)
        paths.checkpoints.mkdir()
        paths.supervisor_lock.parent.mkdir()
        save_run(paths.run_json, settings)
        with Journal.open_for_reading(parent.journal) as record:
            Journal.make_branch(paths.journal, record, state["update"])
        fork_checkpoint(parent, state["update"], paths, changes)
        fork = settings.branch
        add_branch(parent, new_branch(run.resolve(), settings.id, fork.at_cycle, fork.update, fork.tokens, plan))
    enter_consumer(LinePaths(run.resolve()), settings)
