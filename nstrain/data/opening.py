"""Which files a source opens before a cycle, and the shares of its strata in it.

opening    Each stratum opens files, in their pinned order, until those open hold its need plus one longest document,
           and at least `open_files` are open. Needs follow from the shares, shares from what is left, and what is left
           of a file is exact once it is open; so the two are repeated until no stratum opens another file. What is
           open only ever grows, so it ends.
shares     A stratum's share in the cycle is what it has left over what the source has left, as whole numbers that sum
           to 2^28. What it has left: the tokens in its open files and in the tail if that is its - exact - and the
           bytes of its unopened files at its tokens a byte, those of the calibration and of all that it has opened so
           far taken together. Shares are fixed for the cycle and stored in its manifest; deficits restart with each.

left out   A file that the line leaves out from this cycle on is passed over: it keeps its place and counts for nothing.

A stratum that has opened everything is known exactly, so strata end together with their source and not before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from nstrain.base.errors import Exhausted
from nstrain.data.opened import OpenedFiles
from nstrain.data.sources import Listing
from nstrain.data.state import Counts, OpenFile, SourceState, StratumState, Tail

SHARE_ONE = 1 << 28
"""The sum of a cycle's shares by stratum; small enough that a deficit of 2^33 tokens is exact in 64 bits."""

GUESSED_FILES = 256
"""Files of a stratum that are opened on a guess at once."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Trainable tokens that so many pinned bytes of a stratum are expected to give, from the line's calibration."""

    tokens: Fraction
    bytes: int


@dataclasses.dataclass(frozen=True)
class Opening:
    """A source as the drawing of a cycle begins."""

    strata: tuple[StratumState, ...]
    """What is open, with the cursors."""
    shares: tuple[int, ...]
    """Of each stratum; they sum to SHARE_ONE (to 0 if nothing is left)."""
    tail: Tail | None
    """What the cycle before left."""
    counts: Counts


@dataclasses.dataclass
class _Stratum:
    """A stratum while files are being opened."""

    state: StratumState
    left: int
    """Tokens in its open files, and in the tail if that is its."""
    longest: int
    """Tokens of the longest document in its open files."""
    unopened_bytes: int


class _Opener:
    """Opens the files that one source's cycle needs."""

    def __init__(self, files: OpenedFiles, listing: Listing, before: SourceState, open_files: int) -> None:
        self.files, self.listing, self.open_files = files, listing, open_files
        self.counts = before.counts
        self.strata = [
            _Stratum(
                state=state,
                left=sum(file.left for file in state.open),
                longest=max((files.get(i, f.order).longest_from(f.cursor) for f in state.open), default=0),
                unopened_bytes=sum(file.text_bytes for file in listing.unopened(i, state.next_file)),
            )
            for i, state in enumerate(before.strata)
        ]
        if before.tail is not None:
            self.strata[before.tail.stratum].left += before.tail.tokens

    @property
    def states(self) -> list[StratumState]:
        """The strata as they are now."""
        return [stratum.state for stratum in self.strata]

    def short(self, index: int, need: int) -> bool:
        """Whether a stratum has to open another file to hold `need` tokens, and has one."""
        stratum = self.strata[index]
        more = len(stratum.state.open) < self.open_files or stratum.left < need + stratum.longest
        return more and next(self.listing.unopened(index, stratum.state.next_file), None) is not None

    def open_all(self, needs: Sequence[int], rates: Sequence[Fraction]) -> bool:
        """Open files until no stratum is short of its need; says whether any was opened."""
        opened = False
        while any(self.short(index, need) for index, need in enumerate(needs)):
            for index, orders in enumerate(self.read_ahead(needs, rates)):
                for _ in orders:
                    if self.short(index, needs[index]):
                        self._open_next(index)
                        opened = True
        return opened

    def read_ahead(self, needs: Sequence[int], rates: Sequence[Fraction]) -> list[list[int]]:
        """Have the pool read, in parallel, the files that each stratum will likely open for its need; returns them.

        It is a guess, which decides nothing: a file that is read too early is read once.
        """
        likely = [self._likely(i, need, rates[i]) for i, need in enumerate(needs)]
        self.files.prefetch([(i, order) for i, orders in enumerate(likely) for order in orders])
        return likely

    def _likely(self, index: int, need: int, rate: Fraction) -> list[int]:
        """The next files that a stratum will open for its need, by their expected tokens; none if it is not short."""
        stratum = self.strata[index]
        if not self.short(index, need):
            return []
        missing = need + stratum.longest - stratum.left
        at_least = self.open_files - len(stratum.state.open)
        likely: list[int] = []
        for file in self.listing.unopened(index, stratum.state.next_file):
            likely.append(file.order)
            missing -= int(file.text_bytes * rate)
            if (missing <= 0 and len(likely) >= at_least) or len(likely) == GUESSED_FILES:
                break
        return likely

    def _open_next(self, index: int) -> None:
        stratum = self.strata[index]
        state = stratum.state
        pinned = next(self.listing.unopened(index, state.next_file))
        file = self.files.get(index, pinned.order)
        tokens = len(file.tokens)
        opened = state.open
        if file.documents:
            stratum.left += tokens
            stratum.longest = max(stratum.longest, file.longest_from(0))
            whole = OpenFile(pinned.order, pinned.path, pinned.size, pinned.sha256, file.documents, tokens, 0, tokens)
            opened = (*opened, whole)
        stratum.unopened_bytes -= pinned.text_bytes
        stratum.state = StratumState(
            pinned.order + 1, opened, state.opened_bytes + pinned.text_bytes, state.opened_tokens + tokens
        )
        self.counts = self.counts.plus(
            files=1, rows=file.rows, documents=file.documents, held_out=file.held_out, rejected=file.rejected
        )

    def shares(self, rates: Sequence[Fraction]) -> tuple[int, ...]:
        """Tokens left by stratum over their sum, rounded to SHARE_ONE-ths by largest remainder (ties: lowest index)."""
        left = [s.left + s.unopened_bytes * rate for s, rate in zip(self.strata, rates, strict=True)]
        total = Fraction(sum(left))
        if total == 0:
            return tuple(0 for _ in left)
        exact = [tokens * SHARE_ONE / total for tokens in left]
        floors = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
        for index in by_remainder[: SHARE_ONE - sum(floors)]:
            floors[index] += 1
        return tuple(floors)


def stratum_rates(states: Sequence[StratumState], calibrated: Sequence[Rate]) -> list[Fraction]:
    """Tokens a byte of each stratum's unopened files: of its own sample and opened files, else of the whole source."""
    known = [
        (rate.tokens + state.opened_tokens, rate.bytes + state.opened_bytes)
        for rate, state in zip(calibrated, states, strict=True)
    ]
    source_bytes = sum(size for _, size in known)
    source_rate = Fraction(sum(tokens for tokens, _ in known)) / source_bytes if source_bytes else Fraction(0)
    return [Fraction(tokens) / size if size else source_rate for tokens, size in known]


def expected_left(listing: Listing, state: SourceState, calibrated: Sequence[Rate]) -> int:
    """Tokens that a source is expected to have left: exact where it is open, by its strata's rates elsewhere."""
    left = Fraction(state.tail.tokens if state.tail else 0)
    for i, (stratum, rate) in enumerate(zip(state.strata, stratum_rates(state.strata, calibrated), strict=True)):
        left += sum(file.left for file in stratum.open)
        left += sum(file.text_bytes for file in listing.unopened(i, stratum.next_file)) * rate
    return int(left)


def expected_opened(
    listing: Listing, state: SourceState, calibrated: Sequence[Rate], targets: int, open_files: int
) -> int:
    """Tokens of the files that a cycle of so many target tokens is expected to open, whole, beside those open before.

    They lie under open/ until the cycle is done: then those that are used up go. Of a document's length no more is
    known than the mean of those opened so far, where the opening goes by the longest: where a file is one document it
    is up to a file a stratum more.
    """
    rates = stratum_rates(state.strata, calibrated)
    left = [Fraction(sum(file.left for file in stratum.open)) for stratum in state.strata]
    if state.tail is not None:
        left[state.tail.stratum] += state.tail.tokens
    unopened = [
        sum(file.text_bytes for file in listing.unopened(i, stratum.next_file)) * rate
        for i, (stratum, rate) in enumerate(zip(state.strata, rates, strict=True))
    ]
    total = sum(left) + sum(unopened)
    opened = Fraction(0)
    document = Fraction(sum(s.opened_tokens for s in state.strata), max(1, state.counts.documents))
    of_strata = zip(state.strata, rates, left, unopened, strict=True)
    for i, (stratum, rate, has, beyond) in enumerate(of_strata):
        need, count = targets * (has + beyond) / total if total else Fraction(0), len(stratum.open)
        for file in listing.unopened(i, stratum.next_file):
            if has >= need + document and count >= open_files:
                break
            tokens = file.text_bytes * rate
            has, count, opened = has + tokens, count + 1, opened + tokens
    return int(opened)


def open_for_cycle(
    files: OpenedFiles,
    listing: Listing,
    before: SourceState,
    calibrated: Sequence[Rate],
    targets: int,
    open_files: int,
    cycle: int,
) -> Opening:
    """Open what a cycle of so many target tokens needs, and settle the shares (see the module's text).

    Raises `Exhausted` if the source, all of it open, holds less than the cycle takes.
    """
    opener = _Opener(files, listing, before, open_files)
    need = targets + 1

    def needs(shares: Sequence[int]) -> list[int]:
        return [-(-share * need // SHARE_ONE) for share in shares]

    rates = stratum_rates(opener.states, calibrated)
    opener.read_ahead(needs(opener.shares(rates)), rates)  # all at once, where what follows goes step by step
    opener.open_all([0] * len(opener.strata), rates)
    while True:
        rates = stratum_rates(opener.states, calibrated)
        shares = opener.shares(rates)
        if not opener.open_all(needs(shares), rates):
            break
    left, counts = sum(stratum.left for stratum in opener.strata), opener.counts
    if left < need and not any(stratum.unopened_bytes for stratum in opener.strata):
        raise Exhausted(
            f"source {files.source.name} runs out in cycle {cycle}: the cycle takes {need:,} tokens of it and {left:,} "
            f"are left (after {counts.held_out:,} held-out and {counts.rejected:,} rejected rows of {counts.files:,} "
            f"files); end the schedule after cycle {cycle - 1}, give the source a smaller share, or add text to a new "
            "line"
        )
    return Opening(tuple(opener.states), shares, before.tail, counts)
