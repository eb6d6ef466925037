"""The stream of one source, cycle after cycle, against the rules of invariants 2 to 4 written down a second time."""

from __future__ import annotations

from fractions import Fraction

import pytest
from data_helpers import quick, thorough
from drawn_sources import MemoryFiles, Rates, Source, calibrated, draw_cycle, lengths_of_cycles
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted
from nstrain.data.opening import SHARE_ONE
from nstrain.data.state import SourceState


class Reference:
    """Invariants 2 and 3 in plain words: lists of documents, rational numbers, nothing incremental."""

    def __init__(self, source: Source, open_files: int, rates: Rates) -> None:
        self.source, self.open_files, self.rates = source, open_files, rates
        self.next_file = [0] * len(source)
        self.open: list[list[list[int]]] = [[] for _ in source]  # [order, documents taken]
        self.tail: tuple[int, int, int, int] | None = None  # stratum, order, document, offset

    def lengths(self, stratum: int, order: int) -> tuple[int, ...]:
        return self.source[stratum][order].lengths

    def rest(self, stratum: int) -> list[int]:
        """Lengths of the documents left in a stratum's open files."""
        return [n for order, taken in self.open[stratum] for n in self.lengths(stratum, order)[taken:]]

    def left(self, stratum: int) -> int:
        """Tokens left in a stratum's open files, and in the tail if it is of this stratum."""
        tail = 0
        if self.tail is not None and self.tail[0] == stratum:
            tail = self.lengths(*self.tail[:2])[self.tail[2]] - self.tail[3]
        return sum(self.rest(stratum)) + tail

    def shares(self) -> list[int]:
        """What is left, by stratum, where a byte not yet opened counts what the sample's and the opened ones gave."""
        tokens, sizes, weights = [], [], []
        for stratum, files in enumerate(self.source):
            opened = files[: self.next_file[stratum]]
            tokens.append(self.rates[stratum].tokens + sum(sum(file.lengths) for file in opened))
            sizes.append(self.rates[stratum].bytes + sum(file.size for file in opened))
        for stratum, files in enumerate(self.source):
            unopened = sum(file.size for file in files[self.next_file[stratum] :])
            if sizes[stratum]:
                weights.append(self.left(stratum) + unopened * tokens[stratum] / sizes[stratum])
            else:
                weights.append(self.left(stratum) + unopened * sum(tokens) / max(1, sum(sizes)))
        weights = [Fraction(weight) for weight in weights]
        if sum(weights) == 0:
            return [0] * len(weights)
        exact = [weight * SHARE_ONE / sum(weights) for weight in weights]
        shares = [int(x) for x in exact]
        for i in sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))[: SHARE_ONE - sum(shares)]:
            shares[i] += 1
        return shares

    def open_until(self, stratum: int, need: Fraction) -> bool:
        opened = False
        while self.next_file[stratum] < len(self.source[stratum]) and (
            len(self.open[stratum]) < self.open_files or self.left(stratum) < need + max(self.rest(stratum), default=0)
        ):
            order = self.next_file[stratum]
            self.next_file[stratum] += 1
            if self.lengths(stratum, order):
                self.open[stratum].append([order, 0])
            opened = True
        return opened

    def cycle(self, targets: int) -> list[tuple[int, int, int, int]] | None:
        """(stratum, order, document, offset) of every document of the stream; None if the source runs out."""
        need = targets + 1
        for stratum in range(len(self.source)):
            self.open_until(stratum, Fraction(0))
        while True:
            shares = self.shares()
            opened = [self.open_until(i, Fraction(share * need, SHARE_ONE)) for i, share in enumerate(shares)]
            if not any(opened):
                break
        self.used_shares = shares
        newest = [files[-self.open_files :] for files in self.open]
        parts = [[sum(self.lengths(i, o)[t:]) for o, t in files] for i, files in enumerate(newest)]
        given = [[0] * len(files) for files in newest]
        drawn, stream = [0] * len(self.source), []
        if self.tail is not None:
            stratum, order, document, offset = self.tail
            drawn[stratum] = self.lengths(stratum, order)[document] - offset
            stream.append(self.tail)
        while sum(drawn) < need:
            behind = {i: s * sum(drawn) - drawn[i] * SHARE_ONE for i, s in enumerate(shares) if s > 0}
            if not behind:
                return None
            stratum = min(behind, key=lambda i: (-behind[i], i))
            file = self.pick(stratum, newest[stratum], parts[stratum], given[stratum])
            if file is None:
                return None
            length = self.lengths(stratum, file[0])[file[1]]
            if any(file is other for other in newest[stratum]):
                given[stratum][[file is other for other in newest[stratum]].index(True)] += length
            stream.append((stratum, file[0], file[1], 0))
            drawn[stratum] += length
            file[1] += 1
        stratum, order, document, offset = stream[-1]
        not_in_stream = sum(drawn) - need
        self.tail = (stratum, order, document, self.lengths(stratum, order)[document] - not_in_stream - 1)
        self.open = [
            [file for file in files if file[1] < len(self.lengths(i, file[0]))] for i, files in enumerate(self.open)
        ]
        return stream

    def pick(self, stratum: int, newest: list[list[int]], parts: list[int], given: list[int]) -> list[int] | None:
        for file in self.open[stratum][: len(self.open[stratum]) - len(newest)]:
            if file[1] < len(self.lengths(stratum, file[0])):
                return file
        best: tuple[Fraction, int] | None = None
        for place, file in enumerate(newest):
            if file[1] < len(self.lengths(stratum, file[0])):
                behind = Fraction(parts[place] * sum(given), sum(parts)) - given[place]
                if best is None or behind > best[0]:
                    best = (behind, place)
        return None if best is None else newest[best[1]]


def refuse_other_streams(source: Source, rates: Rates, targets: list[int], open_files: int) -> int:
    """Compare cycle after cycle; returns how many there were before the source ran out."""
    files, reference = MemoryFiles(source), Reference(source, open_files, rates)
    state = SourceState.initial(len(source))
    for cycle, count in enumerate(targets, start=1):
        expected = reference.cycle(count)
        if expected is None:
            with pytest.raises(Exhausted, match=f"source web.*runs out in cycle {cycle}"):
                draw_cycle(files, state, count, open_files, cycle, rates)
            return cycle - 1
        made = draw_cycle(files, state, count, open_files, cycle, rates)
        assert [(d.stratum, d.order, d.document, d.offset) for d in made.drawn] == expected
        assert list(made.opening.shares) == reference.used_shares
        assert sum(made.opening.shares) == SHARE_ONE
        assert len(made.stream) == count + 1
        state = SourceState.from_json(made.after.to_json())
        assert state == made.after
        tail = state.tail
        assert tail is not None
        assert (tail.stratum, tail.order, tail.document, tail.offset) == reference.tail
        assert [s.next_file for s in state.strata] == reference.next_file
        assert [[[f.order, f.cursor] for f in s.open] for s in state.strata] == reference.open
    return len(targets)


@quick(150)
@given(calibrated(), lengths_of_cycles, st.integers(1, 3))
def test_streams_are_those_of_the_rules(known: tuple[Source, Rates], targets: list[int], open_files: int) -> None:
    refuse_other_streams(*known, targets, open_files)


@pytest.mark.slow
@thorough(3000)
@given(calibrated(), lengths_of_cycles, st.integers(1, 3))
def test_streams_are_those_of_the_rules_for_many_sources(
    known: tuple[Source, Rates], targets: list[int], open_files: int
) -> None:
    refuse_other_streams(*known, targets, open_files)
