"""consumers/ID.json: where each training line is, by its newest committed checkpoint.

A cycle stays on disk until every consumer is past it. The first entry is made by `nstrain new`; later ones by the
trainer, after a checkpoint is committed and never before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from nstrain.base.commands import typed
from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import Refusal
from nstrain.settings.model import Settings, dump, load


class Consumer(Settings):
    """A training line's position in a data line: the next row that it will train."""

    format: Literal[1] = 1
    """Version of this file's format."""
    id: str
    """The training line's id."""
    run: str
    """Its directory when this was written."""
    cycle: int = pydantic.Field(ge=1)
    """Cycle of the next row; a line that finished cycle k stands at k + 1, row 0."""
    row: int = pydantic.Field(ge=0)
    """The next row in that cycle's order."""
    tokens: int = pydantic.Field(ge=0)
    """Tokens trained, skipped updates included."""


def consumer_path(work: Path, id: str) -> Path:
    """A training line's entry among the consumers of a data line."""
    return work / "consumers" / f"{id}.json"


def write_consumer(work: Path, id: str, cycle: int, row: int, tokens: int, run: Path) -> None:
    """Record a training line's committed position, replacing its entry as a whole."""
    consumer = Consumer(id=id, run=str(run), cycle=cycle, row=row, tokens=tokens)
    path = consumer_path(work, id)
    path.parent.mkdir(exist_ok=True)
    atomic_write_json(path, dump(consumer))


def read_consumers(work: Path) -> list[Consumer]:
    """Every consumer's entry, by id. Raises `Refusal` for a file that is not one."""
    return [read_consumer(path) for path in sorted((work / "consumers").glob("*.json"))]


def read_consumer(path: Path) -> Consumer:
    """One entry. Raises `Refusal` for a file that is not one."""
    try:
        return load(Consumer, path)
    except Refusal as error:
        raise Refusal(
            f"{error}; remove it with `{typed('rm', path)}`: `nstrain run` of the training line {path.stem!r} writes "
            "it again, from its newest checkpoint. Until then no cycle is kept for that line, but made again"
        ) from None
