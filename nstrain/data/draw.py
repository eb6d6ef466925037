"""The token stream of one source for one cycle: whole documents, each from the stratum furthest behind its share.

opening    Before the cycle each stratum opens files, in their pinned order, until those open hold its need plus one
           longest document, and at least `open_files` are open. Needs follow from the shares, shares from what is
           left, and what is left of a file is exact once it is open (before that, its bytes at the source's tokens a
           byte so far); so the two are repeated until no stratum opens another file. It only ever grows: it ends.
shares     A stratum's share in the cycle is what it has left over what the source has left, as whole numbers that
           sum to 2^28; the tail counts with its stratum. They are fixed for the cycle and stored in its manifest;
           deficits restart with each cycle.
documents  The stream begins with the tail that the cycle before left. The next document is always of the stratum
           whose drawn tokens are furthest behind its share of all that was drawn (ties: the lowest index). So every
           stretch of the stream holds every stratum at its share to within about a document.
files      Inside a stratum all but the newest `open_files` files are used up in opening order; these last ones give
           the rest together, always the one furthest behind its part of what they held when the cycle began.
the cut    The stream ends at the cycle's exact number of targets plus one token. That token is also the first of
           the tail, which the next cycle begins with: every token but the source's very first is a target once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.errors import Exhausted
from nstrain.data.opened import FileTokens, OpenedFiles
from nstrain.data.state import OpenFile, SourceState, StratumState, Tail

SHARE_ONE = 1 << 28
"""The sum of a cycle's shares by stratum; small enough that a deficit of 2^33 tokens is exact in 64 bits."""


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


@dataclasses.dataclass
class _Stratum:
    """A stratum while a cycle is drawn."""

    next_file: int
    open: list[OpenFile]
    left: int
    """Tokens in its open files when the drawing begins, and in the tail if that is its."""
    longest: int
    """Tokens of the longest document in them."""
    unopened_bytes: int


class SourceDraw:
    """Draws one source's stream of one cycle. Make it, iterate `documents()` to the end, then read `state_after`."""

    def __init__(self, files: OpenedFiles, before: SourceState, targets: int, open_files: int, cycle: int) -> None:
        """Opens the files that the cycle needs. Raises `Exhausted` if the source or a stratum has too little left."""
        self._files, self._listing, self._cycle = files, files.listing, cycle
        self._tail = before.tail
        self._need = targets + 1
        self._open_files = open_files
        self._strata = [
            _Stratum(
                next_file=state.next_file,
                open=list(state.open),
                left=sum(file.left for file in state.open),
                longest=max((files.get(i, f.order).longest_from(f.cursor) for f in state.open), default=0),
                unopened_bytes=sum(file.size for file in files.listing.files[i][state.next_file :]),
            )
            for i, state in enumerate(before.strata)
        ]
        if self._tail is not None:
            self._strata[self._tail.stratum].left += self._tail.tokens
        self.counts = before.counts
        self.shares = self._open_and_share()
        self.opened_state = tuple(StratumState(s.next_file, tuple(s.open)) for s in self._strata)
        """Every stratum as the drawing begins: what is open, with the cursors."""
        self.state_after: SourceState | None = None

    # ---------------------------------------------------------------- opening and shares

    def _open_and_share(self) -> tuple[int, ...]:
        """Open files and settle the shares (see the module's text)."""
        for index in range(len(self._strata)):
            self._open_until(index, 0)
        while True:
            shares = self._shares()
            opened = False
            for index, share in enumerate(shares):
                opened |= self._open_until(index, -(-share * self._need // SHARE_ONE))
            if not opened:
                break
        left = sum(s.left for s in self._strata)
        if left < self._need and not any(s.unopened_bytes for s in self._strata):
            raise Exhausted(
                f"source {self._files.source.name} runs out in cycle {self._cycle}: the cycle takes {self._need:,} "
                f"tokens of it and {left:,} are left (after {self.counts.held_out:,} held-out and "
                f"{self.counts.rejected:,} rejected rows of {self.counts.files:,} files); end the schedule after "
                f"cycle {self._cycle - 1}, give the source a smaller share, or add text to a new line"
            )
        return shares

    def _open_until(self, index: int, need: int) -> bool:
        """Open files of a stratum until it holds `need` and a longest document; says whether any was opened."""
        stratum, files = self._strata[index], self._listing.files[index]
        opened = False
        while stratum.next_file < len(files) and (
            len(stratum.open) < self._open_files or stratum.left < need + stratum.longest
        ):
            self._open_next(index)
            opened = True
        return opened

    def _open_next(self, index: int) -> None:
        stratum = self._strata[index]
        file = self._files.get(index, stratum.next_file)
        tokens = len(file.tokens)
        stratum.next_file += 1
        stratum.unopened_bytes -= file.file.size
        if file.documents:
            stratum.left += tokens
            stratum.longest = max(stratum.longest, file.longest_from(0))
            pinned = file.file
            stratum.open.append(
                OpenFile(pinned.order, pinned.path, pinned.size, pinned.sha256, file.documents, tokens, 0, tokens)
            )
        self.counts = self.counts.plus(
            files=1,
            opened_bytes=file.file.size,
            opened_tokens=tokens,
            rows=file.rows,
            documents=file.documents,
            held_out=file.held_out,
            rejected=file.rejected,
        )

    def _shares(self) -> tuple[int, ...]:
        """Tokens left by stratum - exact where open, pinned bytes at the source's rate elsewhere - over their sum."""
        rate_bytes = max(1, self.counts.opened_bytes)
        weights = [
            stratum.left * rate_bytes + stratum.unopened_bytes * self.counts.opened_tokens for stratum in self._strata
        ]
        total = sum(weights)
        if total == 0:
            return tuple(0 for _ in weights)
        floors = [weight * SHARE_ONE // total for weight in weights]
        by_remainder = sorted(range(len(weights)), key=lambda i: (-(weights[i] * SHARE_ONE % total), i))
        for index in by_remainder[: SHARE_ONE - sum(floors)]:
            floors[index] += 1
        return tuple(floors)

    # ---------------------------------------------------------------- drawing

    def documents(self) -> Iterator[Drawn]:
        """The stream's documents in order, the last one as a whole: the cut is the caller's, the tail ours."""
        drawn = np.zeros(len(self._strata), dtype=np.int64)
        shares = np.array(self.shares, dtype=np.int64)
        eligible = shares > 0
        pickers = [_FilePicker(stratum.open, self._open_files) for stratum in self._strata]
        total, last = 0, None
        if self._tail is not None:
            tail = self._tail
            last = Drawn(tail.stratum, tail.order, tail.document, tail.offset, tail.tokens, is_tail=True)
            total += last.tokens
            drawn[last.stratum] += last.tokens
            yield last
        while total < self._need:
            deficits = np.where(eligible, shares * total - drawn * SHARE_ONE, np.iinfo(np.int64).min)
            index = int(np.argmax(deficits))
            last = self._take(index, pickers[index])
            total += last.tokens
            drawn[index] += last.tokens
            yield last
        assert last is not None, "a cycle takes at least one document"
        self.state_after = self._after(last, total)

    def _take(self, index: int, picker: _FilePicker) -> Drawn:
        position = picker.pick()
        if position is None:
            stratum = self._strata[index]
            name = self._listing.strata[index]
            raise Exhausted(
                f"source {self._files.source.name}, stratum {name!r}, runs out in cycle {self._cycle}: all "
                f"{stratum.next_file} of its files are used up; end the schedule after cycle {self._cycle - 1}, or "
                "give the source a smaller share"
            )
        file = picker.files[position]
        tokens = self._files.get(index, file.order)
        length = len(tokens.document(file.cursor))
        taken = Drawn(index, file.order, file.cursor, 0, length)
        picker.took(position, length)
        self.counts = self.counts.plus(taken_documents=1, taken_tokens=length)
        return taken

    def _after(self, last: Drawn, total: int) -> SourceState:
        """The state after the cycle: the tail begins with the stream's last token."""
        rest = total - self._need + 1
        file = self._listing.files[last.stratum][last.order]
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
            StratumState(s.next_file, tuple(f for f in s.open if f.cursor < f.documents)) for s in self._strata
        )
        return SourceState(strata, tail, self.counts)


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
