"""Near-copies by shingles: a text is a near-copy if much of it occurs in what was taken before.

A shingle is 64 bytes of a text whose white space is single blanks. Of all shingles one in sixteen is looked at, chosen
by its own hash, so that the same passage gives the same shingles wherever it stands. The containment of a text in a set
is the share of its shingles that the set has (Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

SHINGLE_BYTES = 64
SAMPLED_BITS = 4
"""A shingle is looked at if so many low bits of its hash are zero."""

_BASE = 0x9E3779B97F4A7C15 | 1
_MIX = 0xBF58476D1CE4E5B9


def shingles(text: str) -> set[int]:
    """The sampled shingles of a text, as 64-bit hashes; at least one if the text has 64 bytes."""
    data = np.frombuffer(re.sub(r"\s+", " ", text).encode(), dtype=np.uint8)
    if len(data) < SHINGLE_BYTES:
        return set()
    hashes = _mixed(_window_hashes(data))
    sampled = hashes[(hashes & np.uint64((1 << SAMPLED_BITS) - 1)) == 0]
    return set((sampled if len(sampled) else hashes[:1]).tolist())


def _window_hashes(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The polynomial hash modulo 2^64 of every window of 64 bytes, windows doubled six times."""
    hashes: npt.NDArray[np.uint64] = data.astype(np.uint64)
    width, power = 1, _BASE
    while width < SHINGLE_BYTES:
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
        width, power = 2 * width, power * power % 2**64
    return hashes


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Low bits that depend on all of a hash's bits."""
    mixed: npt.NDArray[np.uint64] = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class SeenText:
    """The shingles of every text taken so far."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def containment(self, text_shingles: set[int]) -> float:
        """The share of a text's shingles that were seen; 0 for a text without any."""
        return len(text_shingles & self._seen) / len(text_shingles) if text_shingles else 0.0

    def add(self, text_shingles: set[int]) -> None:
        """Take a text in."""
        self._seen |= text_shingles
