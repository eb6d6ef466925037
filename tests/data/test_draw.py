"""Drawing a source's documents, case by case."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from drawn_sources import MemoryFile, MemoryFiles, draw_cycle, run_through, uniform

from nstrain.base.errors import Exhausted
from nstrain.data.state import SourceState


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


def test_drawing_again_from_a_state_gives_the_same_and_leaves_the_state_alone() -> None:
    files = MemoryFiles((uniform(6), uniform(3)))
    state = run_through((uniform(6), uniform(3)), [170], 2)
    before = dataclasses.asdict(state)
    first = draw_cycle(files, state, 170, 2, 2)
    second = draw_cycle(files, state, 170, 2, 2)
    assert first == second
    assert dataclasses.asdict(state) == before
