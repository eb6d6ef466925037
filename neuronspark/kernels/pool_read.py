"""The pool read: causal attention over a row's events with a clock and a write tag, in query blocks.

    logit(t, s) = Q_t . K_s - (T_t - T_s) + log w_s     s <= t, own event included;  T_t = delta_1 + ... + delta_t
    read(t)     = sum_s softmax_s(logit) v_s

Q and K are the head's addresses: queries and keys with the induction match appended (see `hippocampal.py`). T_t is the
same for every s and leaves the softmax; the bias of a key is taken relative to the block's first query, T_s - T_ref,
and so is the stored log-sum-exp, which keeps both small whatever the clock has reached. T itself is summed in fp64 and
only the difference rounded: an fp32 sum that has reached 10^6 moves in steps of 0.06.

The backward recomputes each block from the log-sum-exp. T_s is in the logits of column s and, negated, in those of
row s, so its gradient is (column sum - row sum) of the same fp32 dS; rows sum to zero on paper only, and dropping them
would leave the error of every row in the sums that follow. A step delta_t moves every later T: a reverse cumulative
sum.

Memory beside inputs and outputs: one block of queries times the keys before its end. Shapes: B rows, h heads,
Z = B h, L tokens, q queries of a block, e keys before its end, a address width, d value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.exponential import exp_or_zero_
from neuronspark.kernels.gradient import at_least_fp32

QUERY_BLOCK_TOKENS = 64


def _blocks(tokens: int) -> list[tuple[int, int]]:
    """(first, end) of every query block."""
    return [(first, min(first + QUERY_BLOCK_TOKENS, tokens)) for first in range(0, tokens, QUERY_BLOCK_TOKENS)]


SUM_BLOCK = 64
"""Numbers that one product of `sums_by_blocks` adds up."""


def clock_of(step_ZL: Tensor) -> Tensor:
    """T, the sums of the clock steps from the row's start, in fp64."""
    return sums_by_blocks(step_ZL.double()) if step_ZL.is_cuda else step_ZL.cumsum(1, dtype=torch.float64)


def sums_by_blocks(x_ZL: Tensor) -> Tensor:
    """As `cumsum(1)`: sums inside blocks of SUM_BLOCK by products with a triangle of ones, then over the blocks.

    For a GPU: where operators have to be deterministic, torch's cumsum forms [Z, L, L] there (2.6 to 2.11 at least),
    34 GB for four heads of a row of 32,768 tokens.
    """
    rows, length = x_ZL.shape
    blocks_ZbS = functional.pad(x_ZL, (0, -length % SUM_BLOCK)).view(rows, -1, SUM_BLOCK)
    sums_ZbS = blocks_ZbS @ x_ZL.new_ones(SUM_BLOCK, SUM_BLOCK).triu_()
    if length > SUM_BLOCK:
        sums_ZbS[:, 1:] += sums_by_blocks(sums_ZbS[:, :-1, -1])[:, :, None]
    return sums_ZbS.view(rows, -1)[:, :length]


def block_logits(
    query_ZLa: Tensor, key_ZLa: Tensor, clock_ZL: Tensor, log_write_ZL: Tensor, first: int, end: int
) -> Tensor:
    """The block's logits without each query's own clock, relative to the block's reference: [Z, q, e].

    The clock T is in fp64 (`clock_of`); the logits are in the dtype of log_write.
    """
    since_reference_Ze = (clock_ZL[:, :end] - clock_ZL[:, first, None]).to(log_write_ZL.dtype)
    bias_Ze = since_reference_Ze.add_(log_write_ZL[:, :end])
    logits = torch.baddbmm(
        bias_Ze[:, None],
        at_least_fp32(query_ZLa[:, first:end]),
        at_least_fp32(key_ZLa[:, :end]).transpose(1, 2),
    )
    future = torch.ones(end - first, end - first, dtype=torch.bool, device=logits.device).triu_(1)
    logits[:, :, first:].masked_fill_(future, float("-inf"))
    return logits


class _PoolRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_ZLa: Tensor, key_ZLa: Tensor, value_ZLd: Tensor, step_ZL: Tensor, log_write_ZL: Tensor
    ) -> Tensor:
        tokens = query_ZLa.shape[1]
        clock_ZL = clock_of(step_ZL)
        read_ZLd = torch.empty_like(value_ZLd)
        lse_ZL = torch.empty_like(log_write_ZL)
        for first, end in _blocks(tokens):
            p_Zqe = block_logits(query_ZLa, key_ZLa, clock_ZL, log_write_ZL, first, end)
            highest = p_Zqe.amax(2, keepdim=True)
            total = exp_or_zero_(p_Zqe.sub_(highest)).sum(2, keepdim=True)
            read = torch.bmm(p_Zqe.to(value_ZLd.dtype), value_ZLd[:, :end])
            read_ZLd[:, first:end] = read / total
            lse_ZL[:, first:end] = total.log_().add_(highest)[..., 0]
        ctx.save_for_backward(query_ZLa, key_ZLa, value_ZLd, clock_ZL, log_write_ZL, read_ZLd, lse_ZL)
        return read_ZLd

    @staticmethod
    def backward(ctx: Any, dread_ZLd: Tensor) -> tuple[Tensor, ...]:
        query_ZLa, key_ZLa, value_ZLd, clock_ZL, log_write_ZL, read_ZLd, lse_ZL = ctx.saved_tensors
        dquery_ZLa = torch.empty_like(query_ZLa)
        dkey_ZLa = torch.zeros_like(key_ZLa, dtype=log_write_ZL.dtype)
        dvalue_ZLd = torch.zeros_like(value_ZLd, dtype=log_write_ZL.dtype)
        column_ZL = torch.zeros_like(log_write_ZL)
        row_ZL = torch.empty_like(log_write_ZL)
        inner_ZL1 = (at_least_fp32(dread_ZLd) * read_ZLd).sum(2, keepdim=True)
        for first, end in _blocks(query_ZLa.shape[1]):
            block = slice(first, end)
            p_Zqe = block_logits(query_ZLa, key_ZLa, clock_ZL, log_write_ZL, first, end)
            exp_or_zero_(p_Zqe.sub_(lse_ZL[:, block, None]))
            dread_Zqd = at_least_fp32(dread_ZLd[:, block])
            dvalue_ZLd[:, :end].baddbmm_(p_Zqe.transpose(1, 2), dread_Zqd)
            dlogits_Zqe = torch.baddbmm(
                inner_ZL1[:, block], dread_Zqd, at_least_fp32(value_ZLd[:, :end]).transpose(1, 2), beta=-1
            ).mul_(p_Zqe)
            column_ZL[:, :end] += dlogits_Zqe.sum(1)
            row_ZL[:, block] = dlogits_Zqe.sum(2)
            dquery_ZLa[:, block] = torch.bmm(dlogits_Zqe, at_least_fp32(key_ZLa[:, :end]))
            dkey_ZLa[:, :end].baddbmm_(dlogits_Zqe.transpose(1, 2), at_least_fp32(query_ZLa[:, block]))
        dstep_ZL = (column_ZL - row_ZL).flip(1).cumsum(1).flip(1)
        return dquery_ZLa, dkey_ZLa.to(key_ZLa.dtype), dvalue_ZLd.to(value_ZLd.dtype), dstep_ZL, column_ZL


def pool_read(query: Tensor, key: Tensor, value: Tensor, clock_step: Tensor, log_write: Tensor) -> Tensor:
    """What every token reads from its row's events so far.

    query, key [B, h, L, a]; value [B, h, L, d]; clock_step >= 0 and log_write <= 0, both [B, h, L] in fp32.
    Returns [B, h, L, d] in the dtype of value.
    """
    if use_triton(query):
        from neuronspark.kernels.pool_read_triton import pool_read_triton

        return pool_read_triton(query, key, value, clock_step, log_write)
    rows, heads = query.shape[:2]
    flat = (tensor.flatten(0, 1).contiguous() for tensor in (query, key, value, clock_step, log_write))
    return _PoolRead.apply(*flat).unflatten(0, (rows, heads))
