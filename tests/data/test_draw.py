"""The stream of one source, cycle after cycle, against the rules of invariants 2 to 4 written down a second time."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from data_helpers import quick, thorough
from hypothesis import assume, given
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted
from nstrain.data.draw import Drawn, SourceDraw, document_tokens
from nstrain.data.opened import DOCUMENT, FileTokens
from nstrain.data.opening import SHARE_ONE, Opening, Rate, open_for_cycle, stratum_rates
from nstrain.data.sources import Listing, PinnedFile
from nstrain.data.state import SourceState

# ------------------------------------------------------------------ sources in memory: files of documents of any length


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


# ------------------------------------------------------------------ the rules, a second time


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


lengths_of_cycles = st.lists(st.integers(1, 60), min_size=1, max_size=6)


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


@quick(60)
@given(calibrated(), lengths_of_cycles, st.integers(1, 3))
def test_a_cycle_is_drawn_again_from_its_opening_alone(
    known: tuple[Source, Rates], targets: list[int], open_files: int
) -> None:
    """What a manifest keeps: neither the calibration nor the files that stay closed are asked again."""
    (source, rates), state = known, SourceState.initial(len(known[0]))
    files = MemoryFiles(source)
    for cycle, count in enumerate(targets, start=1):
        try:
            made = draw_cycle(files, state, count, open_files, cycle, rates)
        except Exhausted:
            return
        again = MemoryFiles(source)
        opened = {(i, f.order) for i, s in enumerate(made.opening.strata) for f in s.open}
        if state.tail is not None:
            opened.add((state.tail.stratum, state.tail.order))
        again.opened = {key: file for key, file in again.opened.items() if key in opened}
        draw = SourceDraw(again, made.opening, count, open_files, cycle)  # type: ignore[arg-type]
        assert list(draw.documents()) == made.drawn
        assert draw.state_after == made.after
        state = made.after


# ------------------------------------------------------------------ what the rules promise


@quick(150)
@given(calibrated(), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 3))
def test_no_token_is_lost_or_doubled(known: tuple[Source, Rates], targets: list[int], open_files: int) -> None:
    source, rates = known
    files, state = MemoryFiles(source), SourceState.initial(len(source))
    whole: list[int] = []  # the cycles' streams, each without the token that the next one begins with
    documents: list[tuple[int, int, int]] = []
    last = -1
    for cycle, count in enumerate(targets, start=1):
        try:
            made = draw_cycle(files, state, count, open_files, cycle, rates)
        except Exhausted:
            break
        drawn, stream, state = made.drawn, made.stream, made.after
        assert cycle == 1 or stream[0] == last
        assert [d.is_tail for d in drawn] == [cycle > 1] + [False] * (len(drawn) - 1)
        documents += [(d.stratum, d.order, d.document) for d in drawn if not d.is_tail]
        whole += stream[:-1]
        last = stream[-1]
    else:
        cycle += 1
    if cycle == 1:
        return
    whole.append(last)
    assert len(whole) == 1 + sum(targets[: cycle - 1])  # the very first token is never a target
    assert len(set(whole)) == len(whole)  # each token once
    assert len(set(documents)) == len(documents)
    complete = [int(t) for s, o, d in documents for t in files.get(s, o).document(d)]
    assert whole == complete[: len(whole)]  # whole documents, one after another
    tail = state.tail
    assert tail is not None
    assert len(complete) - len(whole) == tail.tokens - 1  # the tail begins with the last target
    assert complete[len(whole) - 1] == files.get(tail.stratum, tail.order).document(tail.document)[tail.offset]


@quick(150)
@given(calibrated(), lengths_of_cycles, st.integers(1, 3))
def test_every_stretch_has_every_stratum_at_its_share_to_within_a_document(
    known: tuple[Source, Rates], targets: list[int], open_files: int
) -> None:
    """Too much: less than a document. Too little: the harmonic number of the strata, as of the fullest of cups."""
    source, rates = known
    files, state = MemoryFiles(source), SourceState.initial(len(source))
    harmonic = sum(Fraction(1, i) for i in range(1, len(source) + 1))
    for cycle, count in enumerate(targets, start=1):
        try:
            made = draw_cycle(files, state, count, open_files, cycle, rates)
        except Exhausted:
            return
        drawn, state = made.drawn, made.after
        longest = max(d.tokens for d in drawn)
        taken, total = [0] * len(source), 0
        for d in drawn:
            taken[d.stratum] += d.tokens
            total += d.tokens
            for stratum, share in enumerate(made.opening.shares):
                behind = Fraction(share * total, SHARE_ONE) - taken[stratum]
                assert -longest < behind <= longest * harmonic, (stratum, behind, longest)


def use_up(source: Source, rates: Rates, open_files: int, cycle_tokens: int) -> None:
    """No stratum runs out before its source does: with the last cycle sized to what is left, everything is drawn."""
    total = tokens_in(source)
    targets = [cycle_tokens] * ((total - 1) // cycle_tokens)
    targets += [rest] if (rest := total - 1 - sum(targets)) else []
    state = run_through(source, targets, open_files, rates)
    assert state.tail is not None
    assert state.tail.tokens == 1
    assert not any(s.open for s in state.strata)
    assert [s.opened_tokens for s in state.strata] == [sum(sum(f.lengths) for f in files) for files in source]
    with pytest.raises(Exhausted, match=r"source web runs out"):  # the source, not a stratum of it
        run_through(source, [*targets, 1], open_files, rates)


@quick(120)
@given(calibrated(), st.integers(1, 3), st.integers(1, 40))
def test_strata_run_out_together_with_their_source(
    known: tuple[Source, Rates], open_files: int, cycle_tokens: int
) -> None:
    assume(tokens_in(known[0]) >= 2)
    use_up(*known, open_files, cycle_tokens)


@pytest.mark.slow
@thorough(4000)
@given(calibrated(), st.integers(1, 3), st.integers(1, 40))
def test_strata_of_many_sources_run_out_together_with_their_source(
    known: tuple[Source, Rates], open_files: int, cycle_tokens: int
) -> None:
    assume(tokens_in(known[0]) >= 2)
    use_up(*known, open_files, cycle_tokens)


@pytest.mark.parametrize("off", [Fraction(1, 1000), Fraction(0), Fraction(1000)])
@pytest.mark.parametrize("open_files", [1, 2, 5])
def test_a_skewed_source_with_a_bad_calibration_is_used_up_evenly(off: Fraction, open_files: int) -> None:
    """One stratum is 200 times the other, a third begins with files without a document; one rate is far off."""
    barren = tuple(MemoryFile(500, (), held_out=3) for _ in range(6))
    source = (uniform(40), uniform(1, documents=2, length=10), barren + uniform(4))
    for wrong in range(3):
        rates = tuple(Rate(Fraction(100) * (off if i == wrong else 1), 400) for i in range(3))
        use_up(source, rates, open_files, 333)


def test_a_calibration_decides_only_what_is_not_open() -> None:
    """Two strata alike, one said to give three times the tokens: it has more of the first cycle, and ends with it."""
    source = (uniform(100, 2, 2), uniform(100, 2, 2))
    rates = (Rate(Fraction(3_000_000), 4_000_000), Rate(Fraction(1_000_000), 4_000_000))
    first = draw_cycle(MemoryFiles(source), SourceState.initial(2), 39, 1, 1, rates)
    assert abs(Fraction(first.opening.shares[0], SHARE_ONE) - Fraction(3, 4)) < Fraction(1, 50)
    whole = draw_cycle(MemoryFiles(source), SourceState.initial(2), 799, 1, 1, rates)
    assert whole.opening.shares == (SHARE_ONE // 2, SHARE_ONE // 2)
    use_up(source, rates, 1, 39)


def test_an_unsampled_stratum_is_taken_to_be_like_its_source() -> None:
    unopened = SourceState.initial(3)
    rates = (Rate(Fraction(30), 100), UNKNOWN, Rate(Fraction(10), 100))
    assert stratum_rates(unopened.strata, rates) == [Fraction(3, 10), Fraction(1, 5), Fraction(1, 10)]
    opened = (dataclasses.replace(unopened.strata[0], opened_bytes=300, opened_tokens=10), *unopened.strata[1:])
    assert stratum_rates(opened, rates) == [Fraction(40, 400), Fraction(1, 10), Fraction(1, 10)]
    assert stratum_rates(unopened.strata, (UNKNOWN,) * 3) == [0, 0, 0]


def run_through(source: Source, targets: list[int], open_files: int, rates: Rates | None = None) -> SourceState:
    files, state = MemoryFiles(source), SourceState.initial(len(source))
    for cycle, count in enumerate(targets, start=1):
        state = draw_cycle(files, state, count, open_files, cycle, rates).after
    return state


@quick(100)
@given(calibrated(), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 3))
def test_counts_add_up_and_every_file_is_used_open_or_unopened(
    known: tuple[Source, Rates], targets: list[int], open_files: int
) -> None:
    source, rates = known
    try:
        state = run_through(source, targets, open_files, rates)
    except Exhausted:
        return
    opened = [(i, j) for i, s in enumerate(state.strata) for j in range(s.next_file)]
    files = [source[i][j] for i, j in opened]
    counts = state.counts
    assert counts.files == len(opened)
    for stratum, of_stratum in zip(state.strata, source, strict=True):
        assert stratum.opened_bytes == sum(f.size for f in of_stratum[: stratum.next_file])
        assert stratum.opened_tokens == sum(sum(f.lengths) for f in of_stratum[: stratum.next_file])
    assert counts.documents == sum(len(f.lengths) for f in files)
    assert counts.held_out == sum(f.held_out for f in files)
    assert counts.rejected == sum(f.rejected for f in files)
    assert counts.rows == counts.documents + counts.held_out + counts.rejected
    opened_tokens = sum(sum(f.lengths) for f in files)
    still_open = {(i, f.order): f for i, s in enumerate(state.strata) for f in s.open}
    assert still_open.keys() <= set(opened)
    for (i, j), open_file in still_open.items():
        assert 0 <= open_file.cursor < open_file.documents == len(source[i][j].lengths)
        assert open_file.left == sum(source[i][j].lengths[open_file.cursor :])
        assert open_file.tokens == sum(source[i][j].lengths)
    used = [(i, j) for i, j in opened if (i, j) not in still_open]
    taken = sum(len(source[i][j].lengths) for i, j in used) + sum(f.cursor for f in still_open.values())
    assert counts.taken_documents == taken
    assert counts.taken_tokens + sum(f.left for f in still_open.values()) == opened_tokens


def uniform(files: int, documents: int = 10, length: int = 10) -> tuple[MemoryFile, ...]:
    return tuple(MemoryFile(documents * length * 4, (length,) * documents) for _ in range(files))


def test_a_stratum_opens_no_more_files_than_its_need_and_one_document() -> None:
    files = MemoryFiles((uniform(20),))
    made = draw_cycle(files, SourceState.initial(1), 299, 2, 1)
    assert made.opening.strata[0].next_file == 4  # 300 tokens and a longest document of 10: three files are too few


def test_all_but_the_newest_files_are_used_up_in_opening_order_and_these_evenly() -> None:
    drawn = draw_cycle(MemoryFiles((uniform(20),)), SourceState.initial(1), 299, 2, 1).drawn
    assert [d.order for d in drawn] == [0] * 10 + [1] * 10 + [2, 3] * 5


def test_the_newest_files_give_in_proportion_to_what_they_hold() -> None:
    source = ((MemoryFile(100, (1,) * 60), MemoryFile(100, (1,) * 20)),)
    drawn = draw_cycle(MemoryFiles(source), SourceState.initial(1), 39, 2, 1).drawn
    for n in range(1, 41):
        assert abs(sum(d.order == 1 for d in drawn[:n]) - Fraction(n, 4)) < 1


def test_no_two_documents_of_a_file_come_out_of_order() -> None:
    files, state = MemoryFiles((uniform(6), uniform(3))), SourceState.initial(2)
    seen: dict[tuple[int, int], int] = {}
    for cycle in range(1, 5):
        made = draw_cycle(files, state, 170, 2, cycle)
        state = made.after
        for d in made.drawn:
            if not d.is_tail:
                assert d.document == seen.get((d.stratum, d.order), -1) + 1
                seen[d.stratum, d.order] = d.document


def test_a_stratum_of_files_without_any_document_is_passed_over() -> None:
    empty = (MemoryFile(0, (), rejected=1), MemoryFile(900, (), held_out=1))
    state = run_through((empty, uniform(3)), [250], 2)
    assert state.counts.held_out == state.counts.rejected == 1
    assert state.strata[0].next_file == 2


def test_a_document_longer_than_several_cycles_is_carried_through_them() -> None:
    source = ((MemoryFile(4000, (1000,)), MemoryFile(40, (10,))),)
    files, state = MemoryFiles(source), SourceState.initial(1)
    streams = []
    for cycle in range(1, 5):
        made = draw_cycle(files, state, 250, 1, cycle)
        streams.append(made.stream)
        state = made.after
    assert [t for s in streams for t in s[:-1]] == list(range(1000))
    assert state.tail is not None
    assert (state.tail.order, state.tail.tokens) == (1, 10)  # whole: its first token is the last target
    assert state.counts.taken_documents == 2


def test_a_long_tail_counts_for_its_stratum() -> None:
    """Without it the other stratum would have to make up for the tail, and would run out before the source does."""
    source = ((MemoryFile(680, (70, *[10] * 10)),), (MemoryFile(480, (10,) * 12),))
    state = run_through(source, [19], 2)
    assert state.tail is not None
    assert state.tail.tokens == 51
    run_through(source, [19, 259], 2)


def test_an_exhausted_source_is_named_with_what_it_had() -> None:
    with pytest.raises(Exhausted) as caught:
        run_through((uniform(1), uniform(1)), [150, 150], 2)
    message = str(caught.value)
    assert "source web runs out in cycle 2" in message
    assert "takes 151 tokens of it and 50 are left" in message
    assert "of 2 files" in message
    assert "after cycle 1" in message


def as_json(value: Any) -> Any:
    return dataclasses.asdict(value)


def test_drawing_again_from_a_state_gives_the_same_and_leaves_the_state_alone() -> None:
    files = MemoryFiles((uniform(6), uniform(3)))
    state = run_through((uniform(6), uniform(3)), [170], 2)
    before = as_json(state)
    first = draw_cycle(files, state, 170, 2, 2)
    second = draw_cycle(files, state, 170, 2, 2)
    assert first == second
    assert as_json(state) == before
