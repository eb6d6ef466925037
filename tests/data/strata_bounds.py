"""How far a stratum may be from its share, wherever a document of a cycle ends.

A segment's end lies between two such places, and is no further off. Ahead: at most its own longest document, since a
stratum is drawn only while it is not ahead. Behind: at most H(k-1) = 1 + 1/2 + ... + 1/(k-1) times the longest document
drawn, k strata having a share. (Let A(j) be the mean of the j largest lags. A document of length d drawn from the
largest of them leaves A(j) no larger if that stratum is still among the j, else at most A(j+1) + d/j; A(k) = 0; and the
tail that a cycle begins with makes A(j) at most d/j. So A(1) <= H(k-1) d.) On real text lags beyond one document are
rare: the callers assert how rare.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.data.opening import SHARE_ONE


def lags_of(source: dict[str, Any], table: npt.NDArray[Any]) -> list[float]:
    """The largest lag at every document's end, in longest documents; both bounds are asserted.

    `source` is the source's part of the cycle's manifest, `table` its table of documents.
    """
    ends = table["end"].astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    drawn = np.zeros((len(table), len(source["shares"])), np.int64)
    drawn[np.arange(len(table)), table["stratum"]] = lengths
    ahead = np.cumsum(drawn, axis=0) * SHARE_ONE - ends[:, None] * np.array(source["shares"], np.int64)[None, :]
    assert (ahead.max(axis=0) <= drawn.max(axis=0) * SHARE_ONE).all(), "a stratum is drawn only when it is not ahead"
    with_share = sum(share > 0 for share in source["shares"])
    harmonic = sum((Fraction(1, i) for i in range(1, with_share)), Fraction(0))
    behind = -ahead.min(axis=1)
    assert int(behind.max()) <= harmonic * int(lengths.max()) * SHARE_ONE
    lags: list[float] = (behind / (SHARE_ONE * lengths.max())).tolist()
    return lags
