"""Which row of which source is trained when: pure functions of pinned inputs and a position.

Three pieces, none with state, none with a library's random stream:

* `row_table(shares)`: one period of K rows (K = sum of the shares) that is repeated for a whole cycle. Row i of the
  cycle is of source `table[i mod K]`. It is the quota method for the chairman assignment problem (R. Tijdeman, The
  chairman assignment problem, Discrete Mathematics 32, 1980), earliest deadline first, in exact integers. Any prefix
  holds each source within one row of its share, so any run of consecutive rows - an update of any size, across
  segments and cycles of one recipe - within two, whatever the row length.
* `Windows`: the j-th row of a source inside a segment is window perm(j), a keyed permutation of the segment's windows.
* `order_digest`: the hash of a cycle's generated (source, window) sequence; a checkpoint holds it, and a resume under
  another is refused.

ORDER_VERSION is raised by any change that moves a token; a line made under one version is not continued under another.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.disk import canonical_json
from nstrain.base.errors import Refusal

ORDER_VERSION = 2

UInt64 = npt.NDArray[np.uint64]


def reduced_shares(shares: Sequence[int]) -> tuple[int, ...]:
    """Shares divided by their greatest common divisor; their sum is K. All must be positive."""
    assert min(shares, default=0) > 0, f"shares must be positive, found {list(shares)}"
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


@functools.lru_cache(maxsize=64)
def row_table(shares: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """One period of the row order: the source index of each of its K rows, read-only.

    With k sources, K rows and slots counted from 1, row j (from 0) of a source with share n may be placed from the
    first slot i with (2k-2)(n i - j K) >= K, and is due at ((2k-2)(j+1) - 1) K / ((2k-2) n); a due row may be placed up
    to slot floor(due) + 1. In each slot the released row that is due first is placed (ties: the lowest source).
    """
    assert math.gcd(*shares) == 1 or len(shares) == 1, "reduce the shares first"
    k, period = len(shares), sum(shares)
    table = np.zeros(period, dtype=np.int32)
    if k > 1:
        q = 2 * k - 2
        placed = [0] * k
        for slot in range(1, period + 1):
            best, best_due = -1, (0, 1)
            for source, share in enumerate(shares):
                if q * (share * slot - placed[source] * period) < period:
                    continue  # not released yet
                due = (q * (placed[source] + 1) - 1, share)  # times K / q, common to all
                if best < 0 or due[0] * best_due[1] < best_due[0] * due[1]:
                    best, best_due = source, due
            assert best >= 0, "the quota method always has a released row"
            assert slot <= (best_due[0] * period) // (q * best_due[1]) + 1, "a row was placed after its deadline"
            table[slot - 1] = best
            placed[best] += 1
        assert tuple(placed) == shares, "a period holds each source exactly at its share"
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=64)
def prefix_counts(shares: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """For each row of the period, how many rows of its own source stand before it in the period."""
    table = row_table(shares)
    counts = np.empty_like(table)
    for source in range(len(shares)):
        where = table == source
        counts[where] = np.arange(np.count_nonzero(where), dtype=np.int32)
    counts.flags.writeable = False
    return counts


def locate_rows(shares: tuple[int, ...], first: int, last: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Rows first ... last-1 of a cycle's order: their source indices, and their ordinals among the source's rows."""
    period = sum(shares)
    row = np.arange(first, last, dtype=np.int64)
    sources = row_table(shares)[row % period]
    ordinals = (row // period) * np.asarray(shares, np.int64)[sources] + prefix_counts(shares)[row % period]
    return sources, ordinals


def derive_key(*parts: Any) -> bytes:
    """A 32-byte key from JSON values, the same on every machine."""
    return hashlib.blake2b(canonical_json(list(parts)), digest_size=32).digest()


def _mix(x: UInt64) -> UInt64:
    """The finaliser of splitmix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = x ^ (x >> np.uint64(31))
    return mixed


def keyed_permutation(key: bytes, n: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 ... n-1 decided by a 32-byte key: the indices sorted by a counter-based 64-bit hash.

    Equal hashes keep the order of the indices, so the result is one permutation whatever the sort.
    """
    k = np.frombuffer(key, dtype="<u8")
    counter = np.arange(n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashed = _mix(_mix(counter * np.uint64(0x9E3779B97F4A7C15) + k[0]) ^ k[1])
        hashed = _mix(hashed + k[2]) ^ k[3]
    return np.argsort(hashed, kind="stable")


def window_permutation(
    seed: int, cycle: int, segment: int, source: str, row_tokens: int, windows: int
) -> npt.NDArray[np.int64]:
    """The order in which a segment's windows of one source are read: entry j is the window of the j-th row."""
    return keyed_permutation(derive_key("window", seed, cycle, segment, source, row_tokens), windows)


class RowOrder:
    """The complete order of one cycle at one row length: row -> (source, window of the source's cycle stream).

    `segment_windows[s]` is the number of windows of source s in each of the cycle's segments. Seeking costs the one
    segment's permutations that a row falls into, wherever it is. Any thread may ask: rows are read ahead in one.
    """

    def __init__(
        self,
        seed: int,
        cycle: int,
        sources: tuple[str, ...],
        shares: tuple[int, ...],
        segment_units: int,
        segments: int,
        unit_tokens: int,
        row_tokens: int,
    ) -> None:
        refuse_row_length(row_tokens, unit_tokens)
        self.seed, self.cycle, self.sources, self.shares = seed, cycle, sources, reduced_shares(shares)
        self.segments, self.row_tokens = segments, row_tokens
        windows_a_unit = unit_tokens // row_tokens
        self.segment_windows = np.array([s * segment_units * windows_a_unit for s in self.shares], np.int64)
        self.segment_rows = sum(self.shares) * segment_units * windows_a_unit
        self.rows = self.segment_rows * segments
        self._permutations: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()
        self._permutations_lock = threading.Lock()

    def _permutation(self, segment: int, source: int) -> npt.NDArray[np.int64]:
        key = (segment, source)
        with self._permutations_lock:  # or another thread's newest one takes the place of that which is found here
            if key not in self._permutations:
                windows = int(self.segment_windows[source])
                self._permutations[key] = window_permutation(
                    self.seed, self.cycle, segment, self.sources[source], self.row_tokens, windows
                )
                if len(self._permutations) > 2 * len(self.sources):  # an update spans two segments at most, usually
                    self._permutations.popitem(last=False)
            self._permutations.move_to_end(key)
            return self._permutations[key]

    def sources_of(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """Rows first ... last-1: source indices."""
        return self._places(first, last)[0]

    def _places(self, first: int, last: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Rows first ... last-1: source indices, and each row's number among its source's. Raises `Refusal`."""
        if not 0 <= first <= last <= self.rows:
            raise Refusal(f"cycle {self.cycle} has rows 0 ... {self.rows - 1}; asked for {first} ... {last - 1}")
        return locate_rows(self.shares, first, last)

    def locate(self, first: int, last: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Rows first ... last-1: source indices, and windows counted from the start of the cycle's stream."""
        sources, ordinals = self._places(first, last)
        windows = np.empty_like(ordinals)
        for segment in range(first // self.segment_rows, -(-last // self.segment_rows)):
            start, end = segment * self.segment_rows - first, (segment + 1) * self.segment_rows - first
            of_segment = sources[max(start, 0) : end]
            for source in range(len(self.sources)):
                where = max(start, 0) + np.flatnonzero(of_segment == source)
                if where.size:
                    before = segment * int(self.segment_windows[source])  # whole periods: each source's cut is here
                    windows[where] = before + self._permutation(segment, source)[ordinals[where] - before]
        return sources, windows

    def digest(self) -> str:
        """blake2b-256 of the whole (source, window) sequence, as little-endian pairs of uint64."""
        digest = hashlib.blake2b(digest_size=32)
        for segment in range(self.segments):
            sources, windows = self.locate(segment * self.segment_rows, (segment + 1) * self.segment_rows)
            digest.update(np.stack([sources.astype("<u8"), windows.astype("<u8")], axis=1).tobytes())
        return digest.hexdigest()


def refuse_row_length(row_tokens: int, unit_tokens: int) -> None:
    """A row length must divide the line's unit. Raises `Refusal`."""
    if row_tokens <= 0 or unit_tokens % row_tokens:
        raise Refusal(
            f"rows of {row_tokens:,} tokens do not divide the data line's unit of {unit_tokens:,}; "
            f"use a divisor of it, such as {unit_tokens // 2:,} or {unit_tokens // 4:,}"
        )
