"""`nstrain data branch`: a line of its own that goes on with a trunk's remaining text.

A branch takes over everything that is pinned - sources, tokenizer, calibration, held-out rows - and the state after one
of the trunk's cycles: what is open and how far, and the tails. What the trunk leaves out it leaves out from its first
cycle on: no cycle of the trunk can have opened that. From there on it has its own schedule and its own
cycles, numbered from 1; neither reads the other's directory again. Its position counts on from the fork.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from nstrain.base.disk import atomic_write, atomic_write_json, directory_by_rename, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.budget import refuse_too_small
from nstrain.data.init import EMPTY_STATE, LINE_DIRECTORIES
from nstrain.data.line import DataLine, Fork
from nstrain.data.manifest import cycle_manifest, last_prepared, refuse_edited_past
from nstrain.data.schedule import Piece, Schedule, make_piece
from nstrain.data.val import load_index, sealed_index
from nstrain.settings.model import dump


def branch_line(
    work: Path,
    trunk_work: Path,
    at_cycle: int,
    cycle_tokens: int,
    cycles: int | None = None,
    recipe: dict[str, int] | None = None,
    unit_tokens: int | None = None,
    segment_units: int | None = None,
) -> DataLine:
    """Fork a line of equal cycles from the state after a trunk's cycle; recipe and unit are the trunk's unless given.

    Raises `Refusal` like `fork_line`, or if the schedule does not fit.
    """
    trunk = DataLine.open(trunk_work)
    unit = unit_tokens or trunk.unit_tokens
    piece = make_piece(forked_recipe(trunk, at_cycle, recipe), cycle_tokens, unit, cycles, segment_units)
    return fork_line(work, trunk, at_cycle, (piece,), unit)


def forked_recipe(trunk: DataLine, at_cycle: int, recipe: dict[str, int] | None = None) -> dict[str, int]:
    """The recipe of a branch: the one given, in the trunk's order of sources, or that of the cycle it forks after.

    Raises `Refusal` if the trunk has not prepared that cycle, or has no such source.
    """
    if recipe:
        return trunk.recipe(recipe)
    piece: int = _forked_manifest(trunk, at_cycle)["piece"]
    return trunk.settings.schedule[piece].recipe


def fork_line(work: Path, trunk: DataLine, at_cycle: int, schedule: tuple[Piece, ...], unit_tokens: int) -> DataLine:
    """Fork a line from the state after a trunk's cycle, with a schedule and a unit of its own.

    A branch with a longer unit than its trunk's gathers held-out rows of its own (`nstrain data val`); any other has
    the trunk's. Raises `Refusal` if the trunk has not prepared that cycle, if its held-out index was edited, if the
    sources' bytes cannot give the tokens, or if `work` exists.
    """
    refuse_edited_past(trunk, _forked_manifest(trunk, at_cycle))
    data = trunk.manifest_path(at_cycle).read_bytes()
    settings = planned_fork(work, trunk, at_cycle, schedule, unit_tokens).settings
    with directory_by_rename(work) as directory:
        shutil.copytree(trunk.work / "sources", directory / "sources")
        shutil.copyfile(trunk.work / "tokenizer.json", directory / "tokenizer.json")
        for name in LINE_DIRECTORIES:
            (directory / name).mkdir()
        atomic_write(directory / "parent.json", data)
        state = {**EMPTY_STATE, "calibration": dump(trunk.calibration())}
        atomic_write_json(directory / "state.json", state)
        if (trunk.work / "val").exists() and unit_tokens <= trunk.unit_tokens:
            shutil.copytree(trunk.work / "val", directory / "val")
            index = {**load_index(trunk), "line": settings.id}
            atomic_write(directory / "val" / "index.json", sealed_index(index))
        atomic_write_json(directory / "line.json", dump(settings))
    return DataLine.open(work)


def planned_fork(work: Path, trunk: DataLine, at_cycle: int, schedule: tuple[Piece, ...], unit_tokens: int) -> DataLine:
    """The line that `fork_line` will make, of which nothing is on disk: to look at its cycles.

    Raises `Refusal` if the sources' bytes cannot give the tokens.
    """
    manifest = _forked_manifest(trunk, at_cycle)
    fork = Fork(
        line=trunk.id,
        cycle=at_cycle,
        manifest_sha256=sha256_bytes(trunk.manifest_path(at_cycle).read_bytes()),
        tokens=manifest["first_token"] + manifest["cycle_tokens"],
    )
    left_out = tuple(file.model_copy(update={"from_cycle": 1}) for file in trunk.settings.excluded)
    settings = trunk.settings.model_copy(
        update={"unit_tokens": unit_tokens, "schedule": schedule, "fork": fork, "excluded": left_out}
    )
    settings = settings.model_copy(update={"id": settings.fixed_id()})
    pieces = Schedule(schedule, unit_tokens, fork.tokens)
    refuse_too_small(pieces, settings.sources, trunk.encoder())
    return DataLine(work, settings, pieces)


def _forked_manifest(trunk: DataLine, at_cycle: int) -> dict[str, Any]:
    path = trunk.manifest_path(at_cycle)
    if not path.exists() and at_cycle > last_prepared(trunk):
        raise Refusal(f"{trunk.work}: cycle {at_cycle} has not been prepared; fork after one that has, or prepare it")
    return cycle_manifest(trunk, at_cycle)
