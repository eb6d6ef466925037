"""What a data line remembers between two cycles: which files are open, how far, and the tail.

It is a value: every manifest holds the complete state after its cycle, and the next cycle is a function of it and the
pinned inputs. Files before `next_file` in a stratum's order were opened; those not among `open` are used up.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class OpenFile:
    """A file that a stratum has opened and not used up."""

    order: int
    """Its place in the stratum's opening order."""
    path: str
    size: int
    sha256: str
    documents: int
    """Trainable documents: those neither held out nor rejected."""
    tokens: int
    """Their tokens, an EOS each included."""
    cursor: int
    """Documents taken so far, in the file's keyed order."""
    left: int
    """Tokens not taken yet."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The rest of the one document that the last cycle's end cut, or the next document as a whole."""

    stratum: int
    order: int
    document: int
    """Its place in its file's keyed order."""
    path: str
    size: int
    sha256: str
    offset: int
    """Tokens of the document before the tail."""
    tokens: int
    """Tokens of the tail, EOS included; its first was the last target of the cycle before."""


@dataclasses.dataclass(frozen=True)
class StratumState:
    """A stratum between two cycles."""

    next_file: int
    open: tuple[OpenFile, ...]
    """In opening order."""
    opened_bytes: int
    """What the files opened so far counted for its share before they were opened (`PinnedFile.text_bytes`)."""
    opened_tokens: int
    """Trainable tokens that were in them."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StratumState:
        """Back from plain JSON values."""
        return cls(**{**value, "open": tuple(OpenFile(**file) for file in value["open"])})


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over every file that the source has opened and every document it has taken."""

    files: int = 0
    """Files opened."""
    rows: int = 0
    """Rows read: documents + held_out + rejected."""
    documents: int = 0
    held_out: int = 0
    """Rows held out for validation."""
    rejected: int = 0
    """Rows that are empty or not valid text."""
    taken_documents: int = 0
    """Documents put into a stream (the tail's is counted once, where it was drawn)."""
    taken_tokens: int = 0
    """Their tokens."""

    def plus(self, **amounts: int) -> Counts:
        """These counts with some amounts added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + n for name, n in amounts.items()})


@dataclasses.dataclass(frozen=True)
class SourceState:
    """A source between two cycles."""

    strata: tuple[StratumState, ...]
    tail: Tail | None
    """None only before the source's first cycle."""
    counts: Counts

    @classmethod
    def initial(cls, strata: int) -> SourceState:
        """Nothing opened, nothing taken."""
        return cls(tuple(StratumState(0, (), 0, 0) for _ in range(strata)), None, Counts())

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SourceState:
        """Back from `to_json`."""
        strata = tuple(StratumState.from_json(stratum) for stratum in value["strata"])
        tail = None if value["tail"] is None else Tail(**value["tail"])
        return cls(strata, tail, Counts(**value["counts"]))
