"""How far back the pool read looks: its weights recomputed a block of queries at a time, and reduced at once.

The weights are those of the operator (kernels/pool_read.py): softmax over s <= t of Q_t . K_s - (T_t - T_s) + log w_s,
from the heads' addresses, which hold the induction match, their clock steps and write tags; a weight below e^-60 of its
query's largest is 0 there as here. Only the queries of a row's last `train_length` positions are looked at. For each:

    by_distance(D)      the weight on the event D tokens back; D = 0 is the query's own event
    attn_dist_bin<k>    by_distance summed over D = 0 (k = 0) or D = 2^(k-1) ... 2^k - 1
    attn_beyond_train   by_distance summed over D >= train_length
    attn_mean_log2      sum over D of by_distance(D) log2(1 + D)
    attn_entropy        -sum of w ln w, in nats

Readings are means over those queries, [B, h] each.

Memory: two blocks of `WEIGHTS` weights, their keys in fp32, and the distance profile, [B, h, L] in float64. A block is
64 queries of as many heads of one row as fit. Nothing is L x L.

Shapes: B rows, h heads, L tokens; z heads of one row at a time, q queries of a block, e keys before its end, a address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from neuronspark.kernels.exponential import exp_or_zero_
from neuronspark.kernels.pool_read import QUERY_BLOCK_TOKENS, block_logits, clock_of
from neuronspark.probe_rows import PartReadings, ProbedRows

WEIGHTS = 1 << 23
"""Weights that are formed at once (those of one head's block of queries at least)."""

ATTENTION_READINGS = (
    "hippocampal/attn_dist_bin<k>",
    "hippocampal/attn_beyond_train",
    "hippocampal/attn_mean_log2",
    "hippocampal/attn_entropy",
)


@dataclasses.dataclass(frozen=True)
class WeightsBlock:
    """The weights of some heads of one row for a block of queries."""

    row: int
    heads: slice
    first: int
    """The position of the block's first query; its last is the last key's."""
    weights_zqe: Tensor


def heads_at_once(tokens: int) -> int:
    """Of how many heads of a row a block of queries' weights is formed at once."""
    return max(1, WEIGHTS // (QUERY_BLOCK_TOKENS * tokens))


def weights_in_blocks(
    query_BhLa: Tensor, key_BhLa: Tensor, clock_step_BhL: Tensor, log_write_BhL: Tensor, first_query: int
) -> Iterator[WeightsBlock]:
    """The pool read's weights for the queries from `first_query` on, block by block, at least fp32."""
    rows, heads, tokens, _ = query_BhLa.shape
    together = heads_at_once(tokens)
    for row in range(rows):
        for head in range(0, heads, together):
            some = slice(head, min(head + together, heads))
            clock_zL = clock_of(clock_step_BhL[row, some])
            for first in range(first_query, tokens, QUERY_BLOCK_TOKENS):
                end = min(first + QUERY_BLOCK_TOKENS, tokens)
                weights_zqe = block_logits(
                    query_BhLa[row, some], key_BhLa[row, some], clock_zL, log_write_BhL[row, some], first, end
                )
                exp_or_zero_(weights_zqe.sub_(weights_zqe.amax(2, keepdim=True)))
                yield WeightsBlock(row, some, first, weights_zqe.div_(weights_zqe.sum(2, keepdim=True)))


def by_distance(weights_zqe: Tensor) -> Tensor:
    """A block's weights summed over its queries by how far back the event is: [z, e], index 0 the query's own."""
    heads, queries, keys = weights_zqe.shape
    width = keys + queries - 1
    # Each query's row one place further left than the one before: then equal distances stand in one column, the
    # longest in the first; the column of distance D is keys - 1 - D.
    skewed_zqx = weights_zqe.new_zeros(heads, queries, width)
    shape, strides = (heads, queries, keys), (queries * width, width - 1, 1)
    skewed_zqx.as_strided(shape, strides, queries - 1).copy_(weights_zqe)
    return skewed_zqx.sum(1)[:, :keys].flip(1)


def probe_attention(
    query_BhLa: Tensor, key_BhLa: Tensor, clock_step_BhL: Tensor, log_write_BhL: Tensor, rows: ProbedRows
) -> PartReadings:
    """The readings of this page."""
    row_heads, tokens = clock_step_BhL.shape[:2], rows.row_tokens
    first_query = max(0, tokens - rows.train_length)
    queries = tokens - first_query
    profile_BhL = torch.zeros(*row_heads, tokens, dtype=torch.float64, device=query_BhLa.device)
    entropy_Bh = torch.zeros(*row_heads, dtype=torch.float64, device=query_BhLa.device)
    for block in weights_in_blocks(query_BhLa, key_BhLa, clock_step_BhL, log_write_BhL, first_query):
        weights_zqe = block.weights_zqe
        entropy_Bh[block.row, block.heads] += torch.special.entr(weights_zqe).sum(2).double().sum(1)
        profile_BhL[block.row, block.heads, : weights_zqe.shape[2]] += by_distance(weights_zqe)
    profile_BhL /= queries
    log2_L = torch.arange(1, tokens + 1, dtype=torch.float64, device=query_BhLa.device).log2_()
    return {
        **{
            f"hippocampal/attn_dist_bin{k}": profile_BhL[..., first:end].sum(2)
            for k, (first, end) in enumerate(distance_bins(tokens))
        },
        "hippocampal/attn_beyond_train": profile_BhL[..., rows.train_length :].sum(2),
        "hippocampal/attn_mean_log2": (profile_BhL * log2_L).sum(2),
        "hippocampal/attn_entropy": entropy_Bh / queries,
    }


def distance_bins(tokens: int) -> list[tuple[int, int]]:
    """(first, end) of the distances of every bin of a row: 0, 1, 2 ... 3, 4 ... 7, and so on, up to tokens - 1."""
    firsts = [0, *(1 << k for k in range((tokens - 1).bit_length()))]
    return list(zip(firsts, [*firsts[1:], tokens], strict=True))
