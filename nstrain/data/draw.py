"""The token stream of one source for one cycle: whole documents, each from the stratum furthest behind its share.

documents  The stream begins with the tail that the cycle before left. The next document is always of the stratum
           whose drawn tokens are furthest behind its share of all that was drawn (ties: the lowest index). So every
           stretch of the stream holds every stratum at its share to within about a document.
files      Inside a stratum all but the newest `open_files` files are used up in opening order; these last ones give
           the rest together, always the one furthest behind its part of what they held when the cycle began.
the cut    The stream ends at the cycle's exact number of targets plus one token. That token is also the first of
           the tail, which the next cycle begins with: every token but the source's very first is a target once.

What is open and what the shares are has been settled before (opening.py). Given that, nothing here reads a list of
files: a cycle can be drawn again from its manifest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.errors import Exhausted
from nstrain.data.opened import FileTokens, OpenedFiles
from nstrain.data.opening import SHARE_ONE, Opening
from nstrain.data.state import OpenFile, SourceState, Tail


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A document as the stream takes it."""

    stratum: int
    order: int
    """Its file's place in the stratum's opening order."""
    document: int
    """Its place in the file's keyed order."""
    offset: int
    """Tokens of it that are not in this stream because the cycle before took them; 0 but for the tail."""
    tokens: int
    """Tokens of it from the offset on, EOS included (the stream's cut not considered)."""
    is_tail: bool = False
    """Whether the cycle before drew it."""


class SourceDraw:
    """Draws one source's stream of one cycle. Iterate `documents()` to the end, then read `state_after`."""

    def __init__(self, files: OpenedFiles, opening: Opening, targets: int, open_files: int, cycle: int) -> None:
        self._files, self._opening, self._cycle = files, opening, cycle
        self._need = targets + 1
        self._pickers = [_FilePicker(list(stratum.open), open_files) for stratum in opening.strata]
        self._counts = opening.counts
        self.state_after: SourceState | None = None

    def documents(self) -> Iterator[Drawn]:
        """The stream's documents in order, the last one as a whole: the cut is the caller's, the tail ours."""
        shares = np.array(self._opening.shares, dtype=np.int64)
        drawn = np.zeros(len(shares), dtype=np.int64)
        eligible = shares > 0
        total, last, tail = 0, None, self._opening.tail
        if tail is not None:
            last = Drawn(tail.stratum, tail.order, tail.document, tail.offset, tail.tokens, is_tail=True)
            total += last.tokens
            drawn[last.stratum] += last.tokens
            yield last
        while total < self._need:
            deficits = np.where(eligible, shares * total - drawn * SHARE_ONE, np.iinfo(np.int64).min)
            index = int(np.argmax(deficits))
            position = self._pickers[index].pick()
            if position is None and eligible[index] and deficits[index] < total:
                eligible[index] = False  # it has given all, and is behind only by what its share was rounded up by
                if not eligible.any():  # then those give the rest whose shares were rounded to nothing
                    eligible[:] = [picker.pick() is not None for picker in self._pickers]
                continue
            last = self._take(index, position)
            total += last.tokens
            drawn[index] += last.tokens
            yield last
        assert last is not None, "a cycle takes at least one document"
        self.state_after = self._after(last, total)

    def _take(self, index: int, position: int | None) -> Drawn:
        picker = self._pickers[index]
        if position is None:
            raise Exhausted(
                f"source {self._files.source.name}, stratum {self._files.stratum_name(index)!r}, runs out in cycle "
                f"{self._cycle}: all {self._opening.strata[index].next_file} of its files are used up; end the "
                f"schedule after cycle {self._cycle - 1}, or give the source a smaller share"
            )
        file = picker.files[position]
        length = len(self._files.get(index, file.order).document(file.cursor))
        picker.took(position, length)
        self._counts = self._counts.plus(taken_documents=1, taken_tokens=length)
        return Drawn(index, file.order, file.cursor, 0, length)

    def _after(self, last: Drawn, total: int) -> SourceState:
        """The state after the cycle: the tail begins with the stream's last token."""
        rest = total - self._need + 1
        file = self._files.get(last.stratum, last.order).file
        tail = Tail(
            stratum=last.stratum,
            order=last.order,
            document=last.document,
            path=file.path,
            size=file.size,
            sha256=file.sha256,
            offset=last.offset + last.tokens - rest,
            tokens=rest,
        )
        strata = tuple(
            dataclasses.replace(stratum, open=tuple(f for f in picker.files if f.cursor < f.documents))
            for stratum, picker in zip(self._opening.strata, self._pickers, strict=True)
        )
        return SourceState(strata, tail, self._counts)


class _FilePicker:
    """Which of a stratum's open files gives the next document; advances the files in place."""

    def __init__(self, files: list[OpenFile], open_files: int) -> None:
        self.files = files
        self._shared_from = max(0, len(files) - open_files)
        self._first = 0
        self._parts = [file.left for file in files[self._shared_from :]]
        self._drawn = [0] * len(self._parts)

    def pick(self) -> int | None:
        """The position of the file, or None if the stratum has no document left."""
        while self._first < self._shared_from and self._used_up(self._first):
            self._first += 1
        if self._first < self._shared_from:
            return self._first
        whole, drawn = sum(self._parts), sum(self._drawn)
        best, best_deficit = None, 0
        for place, part in enumerate(self._parts):
            deficit = part * drawn - self._drawn[place] * whole
            if not self._used_up(self._shared_from + place) and (best is None or deficit > best_deficit):
                best, best_deficit = self._shared_from + place, deficit
        return best

    def took(self, position: int, tokens: int) -> None:
        """Record that the file gave its next document."""
        file = self.files[position]
        self.files[position] = dataclasses.replace(file, cursor=file.cursor + 1, left=file.left - tokens)
        if position >= self._shared_from:
            self._drawn[position - self._shared_from] += tokens

    def _used_up(self, position: int) -> bool:
        return self.files[position].cursor == self.files[position].documents


def document_tokens(file: FileTokens, drawn: Drawn) -> npt.NDArray[Any]:
    """The ids of a drawn document from its offset on."""
    return file.document(drawn.document)[drawn.offset :]
