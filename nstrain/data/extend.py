"""`nstrain data extend`: more cycles at the end of a line's schedule, or others than it says of what is not prepared.

What is prepared never changes: a schedule grows at its end or, with `after`, behind a cycle of which no later one is
prepared. So an open-ended schedule can be given another mixture or an end, and one of which a source runs out can go on
without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.errors import Exhausted, Refusal
from nstrain.data.budget import refuse_too_small
from nstrain.data.line import DataLine, LineSettings
from nstrain.data.manifest import last_prepared, refuse_edited_pasts
from nstrain.data.schedule import Piece, make_piece
from nstrain.settings.model import dump, validate


def extend_line(
    work: Path,
    cycles: int | None,
    cycle_tokens: int | None = None,
    recipe: dict[str, int] | None = None,
    after: int | None = None,
) -> DataLine:
    """Append a piece of `cycles` cycles (None: until the sources are used up; 0: none, so that it ends there).

    It comes after cycle `after`, in the place of what the schedule says of later ones, or at the schedule's end. Cycle
    size and recipe are those of the piece before it unless given. With `after` nobody may be at work on the line, since
    a trainer has the schedule as it was when it started.

    Raises `Refusal` if the schedule is open-ended and no cycle is named, if one after `after` is prepared or `after` is
    beyond the schedule, if a prepared cycle was edited, a recipe names an unknown source, the shares do not fit the
    cycle, or the sources' bytes cannot give the tokens.
    """
    line = DataLine.open(work)
    refuse_edited_pasts(line)
    kept = line.settings.schedule if after is None else _up_to(line, after)
    if kept and kept[-1].cycles is None:
        prepared = last_prepared(line)
        raise Refusal(
            f"{work}: its schedule is open-ended already; it goes on until a source is used up. Name the cycle after "
            f"which it is to be another one: --after {prepared} or later ({prepared} are prepared)"
        )
    before = kept[-1] if kept else line.settings.schedule[0]
    if cycles == 0:
        if not kept or after is None or cycle_tokens is not None or recipe is not None:
            raise Refusal(
                "no more cycles (--cycles 0) ends a schedule after a cycle of it: name that alone, with --after"
            )
        pieces = kept
    else:
        same_size = cycle_tokens is None and recipe is None
        piece = make_piece(
            line.recipe(recipe) if recipe else before.recipe,
            cycle_tokens or before.cycle_tokens,
            line.unit_tokens,
            cycles,
            before.segment_units if same_size else None,
        )
        pieces = (*kept, piece)
    schedule = dataclasses.replace(line.schedule, pieces=pieces)
    refuse_too_small(schedule, line.settings.sources, line.encoder())
    changed = {**dump(line.settings), "schedule": [dump(p) for p in pieces]}
    line.grow(validate(LineSettings, changed, str(work / "line.json")))
    return DataLine.open(work)


def _up_to(line: DataLine, after: int) -> tuple[Piece, ...]:
    """The schedule's pieces up to the end of a cycle. Raises `Refusal` if what comes later cannot be changed."""
    prepared, count = last_prepared(line), line.cycle_count
    if after < prepared:
        raise Refusal(
            f"{line.work}: cycle {after + 1} is prepared, and what is prepared never changes; {prepared} is the first "
            f"cycle after which the schedule can be another one (--after {prepared})"
        )
    if count is not None and after > count:
        raise Refusal(f"{line.work}: its schedule has {count} cycles; --after {count} goes on at its end")
    kept: list[Piece] = []
    for piece in line.settings.schedule:
        if after:
            taken = after if piece.cycles is None else min(piece.cycles, after)
            kept.append(piece.model_copy(update={"cycles": taken}))
            after -= taken
    return tuple(kept)


@contextlib.contextmanager
def another_schedule_is_offered(line: DataLine, cycle: int) -> Iterator[None]:
    """Where a line's cycle is drawn: say of a source that is used up how the line ends before, or goes on otherwise."""
    try:
        yield
    except Exhausted as error:
        if cycle == 1 or cycle <= last_prepared(line):
            raise
        words = ("nstrain", "data", "extend", "--work", line.work, "--after", cycle - 1)
        raise Exhausted(
            f"{error}. Once no line is run on it, `{typed(*words, '--cycles', 0)}` ends it there; with other --cycles "
            "and --share (NAME=SHARE of each source that is to go on) it goes on with another mixture"
        ) from None
