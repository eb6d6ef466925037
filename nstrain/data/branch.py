"""`nstrain data branch`: a line of its own that goes on with a trunk's remaining text.

A branch takes over everything that is pinned - sources, tokenizer, calibration, held-out rows - and the state after one
of the trunk's cycles: what is open and how far, and the tails. From there on it has its own schedule and its own
cycles, numbered from 1; neither reads the other's directory again. Its position counts on from the fork.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from nstrain.base.disk import atomic_write, atomic_write_json, directory_by_rename, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.init import EMPTY_STATE, LINE_DIRECTORIES
from nstrain.data.line import DataLine, Fork
from nstrain.data.manifest import load_manifest, refuse_edited_past
from nstrain.data.schedule import make_piece
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
    """Fork a line from the state after a trunk's cycle; recipe and unit are the trunk's unless given.

    A branch with a longer unit than its trunk's gathers held-out rows of its own (`nstrain data val`); any other has
    the trunk's. Raises `Refusal` if the trunk has not prepared that cycle, if its held-out index was edited, or if the
    schedule does not fit.
    """
    trunk = DataLine.open(trunk_work)
    manifest_path = trunk.manifest_path(at_cycle)
    if not manifest_path.exists():
        raise Refusal(f"{trunk_work}: cycle {at_cycle} has not been prepared; fork after one that has, or prepare it")
    manifest = load_manifest(manifest_path)
    refuse_edited_past(trunk, manifest)
    unit = unit_tokens or trunk.unit_tokens
    piece = make_piece(
        trunk.recipe(recipe) if recipe else trunk.settings.schedule[manifest["piece"]].recipe,
        cycle_tokens,
        unit,
        cycles,
        segment_units,
    )
    data = manifest_path.read_bytes()
    fork = Fork(
        line=trunk.id,
        cycle=at_cycle,
        manifest_sha256=sha256_bytes(data),
        tokens=manifest["first_token"] + manifest["cycle_tokens"],
    )
    settings = trunk.settings.model_copy(update={"unit_tokens": unit, "schedule": (piece,), "fork": fork})
    settings = settings.model_copy(update={"id": settings.fixed_id()})
    with directory_by_rename(work) as directory:
        shutil.copytree(trunk_work / "sources", directory / "sources")
        shutil.copyfile(trunk_work / "tokenizer.json", directory / "tokenizer.json")
        for name in LINE_DIRECTORIES:
            (directory / name).mkdir()
        atomic_write(directory / "parent.json", data)
        state = {**EMPTY_STATE, "calibration": dump(trunk.calibration())}
        atomic_write_json(directory / "state.json", state)
        if (trunk_work / "val").exists() and unit <= trunk.unit_tokens:
            shutil.copytree(trunk_work / "val", directory / "val")
            index = {**load_index(trunk), "line": settings.id}
            atomic_write(directory / "val" / "index.json", sealed_index(index))
        atomic_write_json(directory / "line.json", dump(settings))
    return DataLine.open(work)
