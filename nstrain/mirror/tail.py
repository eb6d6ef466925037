"""The journal as the mirror reads it: a bounded number of rows at a time, and only of the generation that it copies.

The journal is opened for each look: a line may be made, restored from a copy or moved meanwhile, and no look holds the
trainer's log open for longer than it takes to read a few rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from nstrain.record.journal import Journal
from nstrain.record.journal_reader import JournalReader, Row

BATCH_ROWS = 256
BATCH_READINGS = 40_000
"""A look takes no more rows once it has so many readings: a row that validated has thousands."""


class OtherGeneration(Exception):
    """The journal's newest generation is not the one that was asked about: the line was rolled back."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"the journal's newest generation is {generation}")
        self.generation = generation


@dataclasses.dataclass(frozen=True)
class Look:
    """What a look at the journal found, in one consistent state of it."""

    last_update: int
    """Of the lineage; -1 if it has no row yet."""
    rows: list[Row]
    """The lineage's rows that were asked for, in order, as many as a look takes."""


def newest_generation(journal: Path) -> int | None:
    """The newest generation of a journal, recorded or not; None if there is no journal yet.

    Raises `Refusal` for one that is damaged, as everything here does.
    """
    if not journal.exists():
        return None
    with Journal.open_for_reading(journal) as opened, opened.snapshot():
        return _newest(opened)[0]


def last_update(journal: Path, generation: int) -> int:
    """The lineage's last update, -1 if it has none. Raises what `look` does."""
    with _opened(journal, generation) as (_, last):
        return last


def look(journal: Path, generation: int, first: int, last: int | None = None) -> Look:
    """The lineage's rows from an update on, up to another.

    Raises `OtherGeneration` unless `generation` is the newest, and `Refusal` for a journal that is missing or damaged.
    """
    with _opened(journal, generation) as (opened, last_update):
        rows: list[Row] = []
        readings = 0
        for row in opened.rows(from_update=first):
            if (last is not None and row["update"] > last) or len(rows) >= BATCH_ROWS or readings >= BATCH_READINGS:
                break
            rows.append(row)
            readings += len(row)
        return Look(last_update, rows)


def stream(journal: Path, generation: int, first: int, last: int) -> Iterator[Row]:
    """The lineage's rows of the updates first ... last, look by look. Raises what `look` does."""
    while first <= last and (rows := look(journal, generation, first, last).rows):
        yield from rows
        first += len(rows)


@contextlib.contextmanager
def _opened(journal: Path, generation: int) -> Iterator[tuple[JournalReader, int]]:
    """The journal in one state, and its last update; refused unless its newest generation is this one."""
    with Journal.open_for_reading(journal) as opened, opened.snapshot():
        newest, last = _newest(opened)
        if newest != generation:
            raise OtherGeneration(newest)
        yield opened, last


def _newest(journal: JournalReader) -> tuple[int, int]:
    """The newest generation, and the lineage's last update or -1."""
    found = journal.last_update()
    last = -1 if found is None else found
    return journal.generation_at(last + 1), last  # a generation begins at the next update at the latest
