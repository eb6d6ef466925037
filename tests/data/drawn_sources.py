"""Sources in memory, files of documents of any length, and cycles drawn from them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from nstrain.data.draw import Drawn, SourceDraw, document_tokens
from nstrain.data.opened import DOCUMENT, FileTokens
from nstrain.data.opening import Opening, Rate, open_for_cycle
from nstrain.data.sources import Listing, PinnedFile
from nstrain.data.state import SourceState


@dataclasses.dataclass(frozen=True)
class MemoryFile:
    """A file: its pinned bytes and its trainable documents' lengths in tokens."""

    size: int
    lengths: tuple[int, ...]
    held_out: int = 0
    rejected: int = 0


Source = tuple[tuple[MemoryFile, ...], ...]
"""source[stratum][order]"""


class MemoryFiles:
    """Stands for OpenedFiles; every token of the source has a number of its own."""

    def __init__(self, source: Source) -> None:
        class Named:
            name = "web"

        self.source = Named()
        self.listing = Listing(
            tuple(f"stratum{i}" for i in range(len(source))),
            tuple(
                tuple(PinnedFile(f"{i}/{j}", file.size, f"sha{i}.{j}", i, j, file.size) for j, file in enumerate(files))
                for i, files in enumerate(source)
            ),
        )
        self.opened: dict[tuple[int, int], FileTokens] = {}
        first = 0
        for i, files in enumerate(source):
            for j, file in enumerate(files):
                table = np.zeros(len(file.lengths), DOCUMENT)
                table["end"] = np.cumsum(file.lengths, dtype=np.uint64) if file.lengths else []
                tokens = np.arange(first, first + sum(file.lengths))
                first += sum(file.lengths)
                rows = len(file.lengths) + file.held_out + file.rejected
                pinned = self.listing.files[i][j]
                self.opened[i, j] = FileTokens(pinned, rows, file.held_out, file.rejected, table, tokens)

    def get(self, stratum: int, order: int) -> FileTokens:
        return self.opened[stratum, order]

    def prefetch(self, pairs: list[tuple[int, int]]) -> None:
        """What is guessed to be needed is only files that are there, each once; it changes nothing."""
        assert len(set(pairs)) == len(pairs)
        assert set(pairs) <= set(self.opened)

    def stratum_name(self, stratum: int) -> str:
        return self.listing.strata[stratum]


@st.composite
def sources(draw: st.DrawFn, longest: int = 20) -> Source:
    """1 ... 5 strata of 0 ... 6 files of 0 ... 5 documents; bytes are only loosely in proportion to tokens."""
    lengths = st.lists(st.integers(1, draw(st.sampled_from([1, 4, longest]))), max_size=5)
    file = st.builds(
        lambda lengths, noise, held_out, rejected: MemoryFile(
            sum(lengths) * 4 + noise, tuple(lengths), held_out, rejected
        ),
        lengths,
        st.integers(0, 30),
        st.integers(0, 2),
        st.integers(0, 1),
    )
    return tuple(tuple(draw(st.lists(file, min_size=1, max_size=6))) for _ in range(draw(st.integers(1, 5))))


Rates = tuple[Rate, ...]
UNKNOWN = Rate(Fraction(0), 0)

lengths_of_cycles = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@st.composite
def calibrated(draw: st.DrawFn) -> tuple[Source, Rates]:
    """A source with a calibration of it: none, nearly right, far off, or of a sample without any token."""
    source = draw(sources())
    rate = st.one_of(
        st.just(UNKNOWN),
        st.builds(lambda n: Rate(Fraction(n), 4 * n), st.integers(1, 50)),
        st.builds(Rate, st.fractions(0, 500, max_denominator=100), st.integers(1, 500)),
    )
    return source, tuple(draw(st.lists(rate, min_size=len(source), max_size=len(source))))


def tokens_in(source: Source) -> int:
    return sum(sum(file.lengths) for files in source for file in files)


@dataclasses.dataclass(frozen=True)
class Cycle:
    """A cycle's stream: how it began, its documents, its tokens (the cycle's targets plus one), the state after it."""

    opening: Opening
    drawn: list[Drawn]
    stream: list[int]
    after: SourceState


def draw_cycle(
    files: MemoryFiles, before: SourceState, targets: int, open_files: int, cycle: int, rates: Rates | None = None
) -> Cycle:
    """One cycle; without rates nothing was calibrated."""
    known = rates or (UNKNOWN,) * len(files.listing.strata)
    opening = open_for_cycle(files, files.listing, before, known, targets, open_files, cycle)  # type: ignore[arg-type]
    draw = SourceDraw(files, opening, targets, open_files, cycle)  # type: ignore[arg-type]
    drawn = list(draw.documents())
    stream = [t for d in drawn for t in document_tokens(files.get(d.stratum, d.order), d).tolist()]
    assert draw.state_after is not None
    return Cycle(opening, drawn, stream[: targets + 1], draw.state_after)


def run_through(source: Source, targets: list[int], open_files: int, rates: Rates | None = None) -> SourceState:
    """Draw cycles of so many targets from the beginning; the state after them."""
    files, state = MemoryFiles(source), SourceState.initial(len(source))
    for cycle, count in enumerate(targets, start=1):
        state = draw_cycle(files, state, count, open_files, cycle, rates).after
    return state


def uniform(files: int, documents: int = 10, length: int = 10) -> tuple[MemoryFile, ...]:
    """A stratum of so many files alike."""
    return tuple(MemoryFile(documents * length * 4, (length,) * documents) for _ in range(files))
