"""What the rules of drawing promise for any source: no token lost or doubled, strata at their shares, true counts."""

from __future__ import annotations

from fractions import Fraction

from data_helpers import quick
from drawn_sources import MemoryFiles, Rates, Source, calibrated, draw_cycle, lengths_of_cycles, run_through
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted
from nstrain.data.draw import SourceDraw
from nstrain.data.opening import SHARE_ONE
from nstrain.data.state import SourceState


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
