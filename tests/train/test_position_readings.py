"""Losses by position in the document and in the row, against token-by-token loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nstrain.train.position_readings import document_losses, segment_losses

EOS = 1


def test_bins_by_hand() -> None:
    """Row: two tokens of a cut document, its EOS, then a document of six tokens with its EOS, then one token."""
    tokens = np.array([[7, 7, EOS, 4, 5, 6, 7, 8, EOS, 9]])
    #  targets                7  EOS  4    5    6    7    8   EOS   9
    losses = np.array([[9.0, 9.0, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0]])
    found = document_losses(losses, tokens, EOS, np.ones(1))
    assert found == {
        "val_9/docpos/bin0": (1.0 + 11.0) / 2,
        "val_9/docpos/bin1": 2.0,
        "val_9/docpos/bin2": (3.0 + 5.0) / 2,
        "val_9/docpos/bin3": (7.0 + 9.0) / 2,
        "val_9/docpos/tokens_frac": 7 / 9,
    }


@given(
    st.lists(st.lists(st.sampled_from([EOS, 5, -100]), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_bins_against_a_loop(rows: list[list[int]], seed: int) -> None:
    tokens = np.array(rows)
    rng = np.random.default_rng(seed)
    losses, weights = rng.random((len(rows), 8)), rng.random(len(rows)) + 0.1
    if not (tokens[:, 1:] != -100).any():
        return
    sums: dict[int, list[float]] = {}
    counted = total = 0.0
    for row in range(len(rows)):
        since = None
        for target in range(1, 9):
            if tokens[row, target - 1] == EOS:
                since = 0
            elif since is not None:
                since += 1
            if tokens[row, target] == -100:
                continue
            total += weights[row]
            if since is not None:
                counted += weights[row]
                sums.setdefault(since.bit_length(), [0.0, 0.0])
                sums[since.bit_length()][0] += weights[row]
                sums[since.bit_length()][1] += weights[row] * losses[row, target - 1]
    found = document_losses(losses, tokens, EOS, weights)
    assert found.pop("val_8/docpos/tokens_frac") == pytest.approx(counted / total)
    assert found.keys() == {f"val_8/docpos/bin{k}" for k in sums}
    for k, (weight, loss) in sums.items():
        assert found[f"val_8/docpos/bin{k}"] == pytest.approx(loss / weight)


def test_rows_without_an_eos() -> None:
    found = document_losses(np.ones((2, 4)), np.full((2, 5), 7), EOS, np.ones(2))
    assert found == {"val_4/docpos/tokens_frac": 0.0}


def test_rows_of_no_weight_do_not_count() -> None:
    tokens = np.array([[EOS, 7, 7], [EOS, 7, 7]])
    found = document_losses(np.array([[1.0, 2.0], [50.0, 60.0]]), tokens, EOS, np.array([0.5, 0.0]))
    assert found == {"val_2/docpos/bin0": 1.0, "val_2/docpos/bin1": 2.0, "val_2/docpos/tokens_frac": 1.0}


def test_segments_by_hand() -> None:
    """Two rows, weights 3 and 1, of two segments of four targets and one of two; a padded target does not count."""
    losses = np.array([[1.0] * 4 + [2.0] * 4 + [4.0, 99.0], [5.0] * 4 + [6.0] * 4 + [8.0, 8.0]])
    tokens = np.full((2, 11), 7)
    tokens[0, -1] = -100
    found = segment_losses(losses, tokens, 4, np.array([3.0, 1.0]))
    last = (3 * 4.0 + 8.0 + 8.0) / 5
    assert found == {
        "val_10/pos/seg0": 2.0,
        "val_10/pos/seg1": 3.0,
        "val_10/pos/seg2": pytest.approx(last),
        "val_10/pos/last_over_first": pytest.approx(last / 2.0),
    }
