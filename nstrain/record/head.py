"""The journal's head: which rows it holds, in one record with a checksum.

SQLite has no checksum of its pages. Every row and key set carries one (`row_checksum`, `text_checksum`); the head says
which of them there must be: of each generation the first and the last update, without a gap between, and how many
replays differed. So a row that was lost, or that turns up elsewhere, is found as surely as one that was changed.
"""

from __future__ import annotations

import dataclasses
import json
import zlib


@dataclasses.dataclass(frozen=True)
class Generation:
    """The updates of one generation that are recorded."""

    number: int
    first_update: int
    last_update: int | None
    """None if nothing of it is recorded yet; otherwise all from the first to this one are."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows of one generation that follow each other."""

    generation: int
    first_update: int
    last_update: int


@dataclasses.dataclass(frozen=True)
class Head:
    """What a journal holds."""

    metrics_version: int
    generations: tuple[Generation, ...]
    """In the order of their numbers."""
    differences: int = 0
    """Replayed updates that differed from their row, numbered from 1."""

    def lineage(self) -> list[Span]:
        """The line as it stands: of each generation the rows before the first update of any later one."""
        spans: list[Span] = []
        until: int | None = None
        for generation in reversed(self.generations):
            if until is not None and generation.first_update >= until:
                continue
            if generation.last_update is not None:
                last = generation.last_update if until is None else min(generation.last_update, until - 1)
                spans.append(Span(generation.number, generation.first_update, last))
            until = generation.first_update
        return spans[::-1]

    def recorded(self) -> list[Span]:
        """All rows, those of abandoned generations too, in order of generation and update."""
        return [
            Span(generation.number, generation.first_update, generation.last_update)
            for generation in self.generations
            if generation.last_update is not None
        ]

    @property
    def last_update(self) -> int | None:
        """The last update of the lineage; None if it has none."""
        lineage = self.lineage()
        return lineage[-1].last_update if lineage else None

    def generation_at(self, update: int) -> Generation:
        """The generation that an update of the line as it stands belongs to, recorded or not."""
        begun = [generation for generation in self.generations if generation.first_update <= max(0, update)]
        return begun[-1]

    def with_generation(self, number: int, first_update: int) -> Head:
        """This head when a generation is opened."""
        return dataclasses.replace(self, generations=(*self.generations, Generation(number, first_update, None)))

    def with_row(self, number: int, update: int) -> Head:
        """This head when the next update of a generation is recorded."""
        generations = tuple(
            dataclasses.replace(generation, last_update=update) if generation.number == number else generation
            for generation in self.generations
        )
        return dataclasses.replace(self, generations=generations)

    def with_difference(self) -> Head:
        """This head when another replay differed."""
        return dataclasses.replace(self, differences=self.differences + 1)

    def to_json(self) -> str:
        """The head as the journal stores it."""
        return json.dumps(
            {
                "metrics_version": self.metrics_version,
                "generations": [dataclasses.astuple(generation) for generation in self.generations],
                "differences": self.differences,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Head:
        """The head that `to_json` made `text` of."""
        value = json.loads(text)
        generations = tuple(Generation(*generation) for generation in value["generations"])
        return cls(value["metrics_version"], generations, value["differences"])


def text_checksum(text: str) -> int:
    """CRC-32 of a key set's names, or of the head."""
    return zlib.crc32(text.encode())


def row_checksum(generation: int, update: int, names_checksum: int, readings: bytes) -> int:
    """CRC-32 of a row: its key, the checksum of its key set's names, its packed readings."""
    return zlib.crc32(readings, zlib.crc32(f"{generation} {update} {names_checksum}".encode()))
