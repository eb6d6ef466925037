"""`nstrain data extend`: more cycles at the end of a line's schedule. What the schedule already says never changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.data.budget import refuse_too_small
from nstrain.data.line import DataLine, LineSettings
from nstrain.data.manifest import refuse_edited_pasts
from nstrain.data.schedule import make_piece
from nstrain.settings.model import dump, validate


def extend_line(
    work: Path, cycles: int | None, cycle_tokens: int | None = None, recipe: dict[str, int] | None = None
) -> DataLine:
    """Append a piece of `cycles` cycles (None: until the sources are used up).

    Cycle size and recipe are those of the last piece unless given. Raises `Refusal` if the schedule is open-ended, a
    prepared cycle was edited, a recipe names an unknown source, the shares do not fit the cycle, or the sources' bytes
    cannot give the tokens.
    """
    line = DataLine.open(work)
    refuse_edited_pasts(line)
    last = line.settings.schedule[-1]
    if last.cycles is None:
        raise Refusal(f"{work}: its schedule is open-ended already; it goes on until a source is used up")
    same_size = cycle_tokens is None and recipe is None
    piece = make_piece(
        line.recipe(recipe) if recipe else last.recipe,
        cycle_tokens or last.cycle_tokens,
        line.unit_tokens,
        cycles,
        last.segment_units if same_size else None,
    )
    pieces = (*line.settings.schedule, piece)
    schedule = dataclasses.replace(line.schedule, pieces=pieces)
    refuse_too_small(schedule, line.settings.sources, line.encoder())
    changed = {**dump(line.settings), "schedule": [dump(p) for p in pieces]}
    line.grow(validate(LineSettings, changed, str(work / "line.json")))
    return DataLine.open(work)
