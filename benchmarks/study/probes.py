"""Rows that ask for one thing: to repeat what came before, and to recall what was bound to a key. Made from a seed.

Their tokens are drawn from the vocabulary's common part, so that nothing but the row itself can foretell them. A target
counts as right if its probability is above one half: then it is the most likely token, and the loss alone tells.

Shapes: n rows of L inputs and one more token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from benchmarks.study.data import EOS_ID

COMMON_TOKENS = (300, 8000)
"""Where probe tokens are drawn from: no single bytes, and no rare tokens."""
INDUCTION_DISTANCES = (64, 512, 1023)
RECALL_PAIRS = (16, 64, 256)


@dataclasses.dataclass(frozen=True)
class ProbeRows:
    """Rows and the targets in them that are asked for."""

    name: str
    tokens: npt.NDArray[np.int64]
    """[n, L + 1]"""
    asked: npt.NDArray[np.bool_]
    """[n, L]: over the targets."""

    def score(self, losses: npt.NDArray[np.float32]) -> dict[str, float]:
        """Mean loss in nats and share of right targets, of the losses [n, L] of a model."""
        found = losses[self.asked].astype(np.float64)
        return {"loss": float(found.mean()), "right": float((found < np.log(2)).mean())}


def induction(distance: int, row_tokens: int, rows: int, vocabulary: int, seed: int = 0) -> ProbeRows:
    """Random stretches of `distance` tokens, each twice in its row's start; the second time all but its first is asked.

    The rest of the row goes on with fresh random tokens, so that all rows are of one length.
    """
    generator = np.random.default_rng([seed, 1, distance])
    tokens = _drawn(generator, (rows, row_tokens + 1), vocabulary)
    tokens[:, 0] = EOS_ID
    tokens[:, 1 + distance : 1 + 2 * distance] = tokens[:, 1 : 1 + distance]
    asked = np.zeros((rows, row_tokens), dtype=np.bool_)
    asked[:, 1 + distance : 2 * distance] = True  # targets are one place on: the first repeated token is not asked
    return ProbeRows(f"induction-{distance}", tokens, asked)


def recall(pairs: int, row_tokens: int, rows: int, vocabulary: int, seed: int = 0) -> ProbeRows:
    """`pairs` distinct keys, each followed by its value, then the keys in another order: each time the value is asked.

    Multi-query associative recall (Arora et al., 2312.04927).
    """
    generator = np.random.default_rng([seed, 2, pairs])
    low, high = _common(vocabulary)
    tokens = _drawn(generator, (rows, row_tokens + 1), vocabulary)
    asked = np.zeros((rows, row_tokens), dtype=np.bool_)
    tokens[:, 0] = EOS_ID
    for row in range(rows):
        keys = generator.choice(np.arange(low, high), pairs, replace=False)
        values = generator.integers(low, high, pairs)
        order = generator.permutation(pairs)
        shown = np.stack((keys, values), 1).reshape(-1)
        queried = np.stack((keys[order], values[order]), 1).reshape(-1)
        tokens[row, 1 : 1 + 4 * pairs] = np.concatenate((shown, queried))
    asked[:, 2 * pairs + 1 : 4 * pairs : 2] = True
    return ProbeRows(f"recall-{pairs}", tokens, asked)


def all_probes(row_tokens: int, rows: int, vocabulary: int) -> list[ProbeRows]:
    """Those that fit into rows of one length."""
    found = [induction(d, row_tokens, rows, vocabulary) for d in INDUCTION_DISTANCES if 2 * d <= row_tokens]
    return found + [recall(p, row_tokens, rows, vocabulary) for p in RECALL_PAIRS if 4 * p <= row_tokens]


def _common(vocabulary: int) -> tuple[int, int]:
    low, high = COMMON_TOKENS
    return (low, high) if vocabulary >= high else (1, vocabulary)


def _drawn(generator: np.random.Generator, shape: tuple[int, ...], vocabulary: int) -> npt.NDArray[np.int64]:
    return generator.integers(*_common(vocabulary), shape)
