"""Which row of which source is trained when: shares in every window, permutations, seeking, digests."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import json
import time
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
from data_helpers import quick, reference_permutation, thorough
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Refusal
from nstrain.data import order as order_module
from nstrain.data.order import ORDER_VERSION, RowOrder, derive_key, keyed_permutation, row_table


def make_order(shares: tuple[int, ...], **changes: int) -> RowOrder:
    values = {"seed": 7, "cycle": 1, "segment_units": 1, "segments": 2, "unit_tokens": 8, "row_tokens": 4, **changes}
    names = tuple(f"s{i}" for i in range(len(shares)))
    return RowOrder(sources=names, shares=shares, **values)


@st.composite
def recipes(draw: st.DrawFn, most: int = 40) -> tuple[int, ...]:
    """Shares of 1 ... most sources: even, random, or one source hundreds of times another."""
    k = draw(st.integers(1, most))
    largest = draw(st.sampled_from([1, 3, 12, 60]))
    shares = draw(st.lists(st.integers(1, largest), min_size=k, max_size=k))
    if draw(st.booleans()):
        shares[draw(st.integers(0, k - 1))] += draw(st.integers(0, 500))
    return tuple(shares)


def worst_window(sources: np.ndarray, shares: tuple[int, ...]) -> Fraction:
    """The largest |rows of a source - its share of the rows| over every source and every run of consecutive rows."""
    whole, n = sum(shares), np.arange(len(sources) + 1, dtype=np.int64)
    worst = 0
    for source, share in enumerate(shares):
        ahead = np.concatenate([[0], np.cumsum(sources == source)]) * whole - share * n  # of its share, times `whole`
        worst = max(worst, int(ahead.max() - ahead.min()))
    return Fraction(worst, whole)


def refuse_two_rows(shares: tuple[int, ...], row_tokens: int, segment_units: int, segments: int) -> None:
    cycles = [
        make_order(shares, cycle=c, row_tokens=row_tokens, segment_units=segment_units, segments=segments)
        for c in (1, 2)
    ]
    sources = np.concatenate([cycle.locate(0, cycle.rows)[0] for cycle in cycles])
    assert worst_window(sources, shares) < 2


@quick(60)
@given(recipes(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 3))
def test_every_window_is_within_two_rows_of_the_shares_across_segments_and_cycles(
    shares: tuple[int, ...], row_tokens: int, segment_units: int, segments: int
) -> None:
    refuse_two_rows(shares, row_tokens, segment_units, segments)


@pytest.mark.slow
@thorough(1500)
@given(recipes(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 3))
def test_every_window_is_within_two_rows_of_the_shares_of_many_recipes(
    shares: tuple[int, ...], row_tokens: int, segment_units: int, segments: int
) -> None:
    refuse_two_rows(shares, row_tokens, segment_units, segments)


def test_the_measure_itself_sees_an_order_that_is_three_rows_off() -> None:
    assert worst_window(np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]), (1, 1)) == 6 - Fraction(6, 2)


@quick(40)
@given(recipes(most=12), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 3))
def test_every_window_of_every_segment_comes_once_and_inside_its_segment(
    shares: tuple[int, ...], row_tokens: int, segment_units: int, segments: int
) -> None:
    order = make_order(shares, row_tokens=row_tokens, segment_units=segment_units, segments=segments)
    sources, windows = order.locate(0, order.rows)
    for segment in range(segments):
        part = slice(segment * order.segment_rows, (segment + 1) * order.segment_rows)
        for source, a_segment in enumerate(order.segment_windows.tolist()):
            taken = np.sort(windows[part][sources[part] == source])
            assert taken.tolist() == list(range(segment * a_segment, (segment + 1) * a_segment))


@quick(60)
@given(st.data(), recipes(most=8), st.sampled_from([2, 8]), st.integers(1, 4))
def test_seeking_anywhere_gives_the_same_rows(
    data: st.DataObject, shares: tuple[int, ...], row_tokens: int, segments: int
) -> None:
    order = make_order(shares, row_tokens=row_tokens, segments=segments)
    sources, windows = order.locate(0, order.rows)
    for _ in range(4):
        first = data.draw(st.integers(0, order.rows))
        last = data.draw(st.integers(first, order.rows))
        fresh = make_order(shares, row_tokens=row_tokens, segments=segments)
        for sought in (order.locate(first, last), fresh.locate(first, last)):
            assert np.array_equal(sought[0], sources[first:last])
            assert np.array_equal(sought[1], windows[first:last])


def test_seeking_builds_only_the_permutations_it_needs_and_keeps_few() -> None:
    order = make_order((3, 1), segment_units=4, segments=50)
    order.locate(order.segment_rows * 30 + 1, order.segment_rows * 30 + 3)
    assert {segment for segment, _ in order._permutations} == {30}
    order.locate(0, order.rows)
    assert len(order._permutations) <= 4


# ------------------------------------------------------------------ the same, written a second time from the reference


def reference_table(shares: tuple[int, ...]) -> list[int]:
    """The quota method for the chairman assignment problem, in rational numbers."""
    k, whole = len(shares), sum(shares)
    if k == 1:
        return [0] * whole
    margin = Fraction(1, 2 * k - 2)
    counts, table = [0] * k, []
    for n in range(1, whole + 1):
        ready = [i for i in range(k) if Fraction(shares[i] * n, whole) - counts[i] >= margin]
        due = {i: (counts[i] + 1 - margin) * whole / shares[i] for i in ready}
        chosen = min(ready, key=lambda i: (due[i], i))
        counts[chosen] += 1
        table.append(chosen)
    return table


@quick(60)
@given(recipes(most=15))
def test_the_table_is_the_quota_method_in_exact_numbers(shares: tuple[int, ...]) -> None:
    reduced = tuple(int(Fraction(share, np.gcd.reduce(shares))) for share in shares)
    assert row_table(reduced).tolist() == reference_table(reduced)


@quick(40)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 200))
def test_the_permutation_is_the_counters_sorted_by_their_hash(key: bytes, n: int) -> None:
    assert keyed_permutation(key, n).tolist() == reference_permutation(key, n)


def test_equal_hashes_keep_the_order_of_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_mix", lambda x: (x >> np.uint64(60)) ^ (x & np.uint64(3)))  # few values
    permutation = keyed_permutation(bytes(32), 1000).tolist()
    assert sorted(permutation) == list(range(1000))
    assert permutation != list(range(1000))
    assert sum(i > j for i, j in itertools.pairwise(permutation)) < 4


def reference_digest(order: RowOrder) -> str:
    """From the documented formulas alone, row by row."""
    digest, table, ordinals = hashlib.blake2b(digest_size=32), reference_table(order.shares), [0] * len(order.shares)

    @functools.cache
    def permutation(segment: int, source: int) -> list[int]:
        parts = ["window", order.seed, order.cycle, segment, order.sources[source], order.row_tokens]
        key = hashlib.blake2b(json.dumps(parts, separators=(",", ":")).encode(), digest_size=32).digest()
        return reference_permutation(key, int(order.segment_windows[source]))

    for row in range(order.rows):
        source = table[row % len(table)]
        segment, j = divmod(ordinals[source], int(order.segment_windows[source]))
        window = segment * int(order.segment_windows[source]) + permutation(segment, source)[j]
        ordinals[source] += 1
        digest.update(source.to_bytes(8, "little") + window.to_bytes(8, "little"))
    return digest.hexdigest()


@quick(25)
@given(recipes(most=6), st.sampled_from([2, 8]), st.integers(1, 3), st.integers(0, 2**40), st.integers(1, 9))
def test_the_digest_is_that_of_the_documented_order(
    shares: tuple[int, ...], row_tokens: int, segments: int, seed: int, cycle: int
) -> None:
    order = make_order(shares, row_tokens=row_tokens, segments=segments, seed=seed, cycle=cycle)
    assert order.digest() == reference_digest(order)


def test_order_version_2_never_moves() -> None:
    """If this fails, tokens of existing lines have moved: undo that, or raise ORDER_VERSION.

    The order of the rows is that of version 1; version 2 changed which documents a cycle draws.
    """
    assert ORDER_VERSION == 2
    assert derive_key("window", 7, 1, 0, "s0", 4).hex() == GOLDEN_KEY
    assert keyed_permutation(bytes(range(32)), 12).tolist() == GOLDEN_PERMUTATION
    assert row_table((5, 3, 1)).tolist() == GOLDEN_TABLE
    assert make_order((5, 3, 1)).digest() == GOLDEN_DIGEST
    large = make_order((17, 11, 4, 2, 1), seed=2**40 + 1, cycle=1234, segment_units=3, segments=5, unit_tokens=4096)
    assert large.digest() == GOLDEN_LARGE_DIGEST


GOLDEN_KEY = "7953aede487bb101aac8fc3847d753bc1e499dbdc0cac54f7014749570cd5eaa"
GOLDEN_PERMUTATION = [9, 1, 8, 10, 5, 7, 0, 2, 11, 4, 3, 6]
GOLDEN_TABLE = [0, 1, 0, 1, 0, 0, 2, 1, 0]
GOLDEN_DIGEST = "1100fa22e32c819da02642ac4a2b2fc50ae24773f093a646087cd67023f8fe7f"
GOLDEN_LARGE_DIGEST = "5f97e05a22ac6ca0d174cef20de8ea726ae02b134bc6f87d7dede8204e830e7d"


def test_the_digest_changes_with_seed_cycle_length_and_names() -> None:
    base = {"segment_units": 8}
    digests = {
        make_order((5, 3), **base).digest(),
        make_order((5, 3), **base, seed=8).digest(),
        make_order((5, 3), **base, cycle=2).digest(),
        make_order((5, 3), **base, row_tokens=8).digest(),
        RowOrder(7, 1, ("other", "s1"), (5, 3), 8, 2, 8, 4).digest(),
    }
    assert len(digests) == 5


def test_segments_and_sources_have_permutations_of_their_own() -> None:
    order = make_order((1, 1), segment_units=64, segments=3, row_tokens=8)
    sources, windows = order.locate(0, order.rows)
    seen = {
        tuple((windows[sources == source][segment * 64 : (segment + 1) * 64] - segment * 64).tolist())
        for source in (0, 1)
        for segment in (0, 1, 2)
    }
    assert len(seen) == 6


def test_shares_are_proportions() -> None:
    assert make_order((10, 6)).digest() == make_order((5, 3)).digest()


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (0, 37), (37, 36), (5, 4)])
def test_rows_that_are_not_there_are_refused(first: int, last: int) -> None:
    order = make_order((5, 3, 1))
    assert order.rows == 36
    with pytest.raises(Refusal, match=r"cycle 1 has rows 0 ... 35"):
        order.locate(first, last)


@pytest.mark.parametrize("row_tokens", [0, -4, 3, 16])
def test_a_row_length_that_does_not_divide_the_unit_is_refused(row_tokens: int) -> None:
    with pytest.raises(Refusal, match="do not divide"):
        make_order((1, 1), row_tokens=row_tokens)


class GivesWay(OrderedDict[tuple[int, int], np.ndarray]):
    """Lets other threads go on between a look and what follows from it."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0)
        return found


def test_threads_may_ask_for_rows_of_segments_far_apart() -> None:
    """Rows are read ahead in one: what it puts into the cache takes the place of what another is about to use."""
    order, segments = make_order((1, 1, 1), segments=40), 40
    order._permutations = GivesWay()
    rows = order.segment_rows
    alone = make_order((1, 1, 1), segments=segments)
    expected = [alone.locate(segment * rows, (segment + 1) * rows)[1].tolist() for segment in range(segments)]

    def ask(first: int) -> bool:
        places = [(first + step // 2) % segments for step in range(2 * segments)]
        return all(order.locate(s * rows, (s + 1) * rows)[1].tolist() == expected[s] for s in places)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(0, segments, 10)))
    assert order.sources_of(5, 50).tolist() == order.locate(5, 50)[0].tolist()
