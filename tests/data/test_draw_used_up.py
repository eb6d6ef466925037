"""Strata run out together with their source, whatever its calibration says."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from data_helpers import quick, thorough
from drawn_sources import (
    UNKNOWN,
    MemoryFile,
    MemoryFiles,
    Rates,
    Source,
    calibrated,
    draw_cycle,
    run_through,
    sources,
    tokens_in,
    uniform,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted
from nstrain.data import draw, opening
from nstrain.data.opening import SHARE_ONE, Rate, stratum_rates
from nstrain.data.state import SourceState


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


@quick(60)
@given(sources(), st.integers(1, 6), st.integers(1, 40))
def test_a_share_that_was_rounded_ends_no_source(source: Source, bits: int, cycle_tokens: int) -> None:
    """A cycle of 2^32 tokens gives a stratum of a few its share to within 16 tokens: here shares are as coarse."""
    assume(tokens_in(source) >= 2)
    with pytest.MonkeyPatch.context() as patch:
        for module in (draw, opening):
            patch.setattr(module, "SHARE_ONE", 1 << bits)
        use_up(source, (UNKNOWN,) * len(source), 6, cycle_tokens)


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
