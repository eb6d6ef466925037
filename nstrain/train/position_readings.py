"""Losses by position: in the row, in segments of the training length, and in the document, in doublings.

    val_<L>/pos/seg<k>            the loss on the targets k S + 1 ... (k + 1) S of a row, S the training length
    val_<L>/pos/last_over_first   the last segment's over the first's
    val_<L>/docpos/bin<k>         the loss on documents' first tokens (k = 0), and on their tokens of index 2^(k-1) to
                                  below 2^k: by how much it falls as the known part of the document doubles
    val_<L>/docpos/tokens_frac    the share of the targets that docpos counts; those before a row's first EOS belong
                                  to a document whose beginning the row cuts off

Every target has its row's weight. Shapes: n rows, L targets; a row's tokens are its L inputs and one more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nstrain.train.model import IGNORED_TOKEN

FloatArray = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.int64]


def document_losses(losses_nL: FloatArray, tokens: TokenArray, eos_id: int, weights_n: FloatArray) -> dict[str, float]:
    """The docpos readings of a validation, of rows of tokens [n, L + 1]; a bin without a target is left out."""
    counted_nL, bins_nL = _bins(tokens, eos_id)
    weights_nL = weights_n[:, None] * (tokens[:, 1:] != IGNORED_TOKEN)
    bins, weights, losses = bins_nL[counted_nL], weights_nL[counted_nL], losses_nL[counted_nL]
    weight_of = np.bincount(bins, weights)
    loss_of = np.bincount(bins, weights * losses)
    prefix = f"val_{losses_nL.shape[1]}/docpos"
    return {
        **{f"{prefix}/bin{k}": float(loss_of[k] / weight) for k, weight in enumerate(weight_of) if weight > 0},
        f"{prefix}/tokens_frac": float(weights.sum() / weights_nL.sum()),
    }


def document_bins(tokens: TokenArray, eos_id: int, weights_n: FloatArray) -> tuple[int, ...]:
    """The bins of `document_losses` that a target falls into."""
    counted_nL, bins_nL = _bins(tokens, eos_id)
    counted_nL = counted_nL & (tokens[:, 1:] != IGNORED_TOKEN) & (weights_n[:, None] > 0)
    return tuple(int(k) for k in np.unique(bins_nL[counted_nL]))


def _bins(tokens: TokenArray, eos_id: int) -> tuple[npt.NDArray[np.bool_], TokenArray]:
    """Of each target, [n, L]: whether an EOS of the row comes before it, and if so its bin."""
    position = np.arange(tokens.shape[1])
    last_eos = np.maximum.accumulate(np.where(tokens == eos_id, position, -1), axis=1)[:, :-1]
    after_first_nL = position[1:] - last_eos - 1
    counted_nL = last_eos >= 0
    # The exponent of a whole number as a binary fraction in [1/2, 1) is its length in bits: 0, 1, 2, 2, 3, 3, 3, 3 ...
    return counted_nL, np.frexp(np.where(counted_nL, after_first_nL, 0))[1].astype(np.int64)


def segment_losses(
    losses_nL: FloatArray, tokens: TokenArray, train_length: int, weights_n: FloatArray
) -> dict[str, float]:
    """The pos readings of rows longer than those of training; the last segment may be shorter."""
    row_tokens = losses_nL.shape[1]
    weights_nL = weights_n[:, None] * (tokens[:, 1:] != IGNORED_TOKEN)
    firsts = range(0, row_tokens, train_length)
    segments = [slice(first, first + train_length) for first in firsts]
    means = [
        float((weights_nL[:, segment] * losses_nL[:, segment]).sum() / weights_nL[:, segment].sum())
        for segment in segments
    ]
    prefix = f"val_{row_tokens}/pos"
    return {
        **{f"{prefix}/seg{k}": mean for k, mean in enumerate(means)},
        f"{prefix}/last_over_first": means[-1] / means[0],
    }
