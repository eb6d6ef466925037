"""The dendritic state-space recurrence, as a chunked scan.

    V_t = exp(a_t) V_{t-1} + (f_t v_t) (x) B_t          a_t <= 0 a log decay, f_t an input factor, one each a head
    y_t = V_t C_t + skip v_t                             V_0 = 0 before a row's first token

Inside a chunk with s_i = a_1 + ... + a_i (fp32) the recurrence is a masked product (state-space duality, Dao and Gu,
2405.21060); only the states at chunk ends go through a recurrence:

    y_i = sum_{j<=i} exp(s_i - s_j) (C_i . B_j) f_j v_j  +  exp(s_i) S C_i
    S'  = exp(s_Q) S + sum_j exp(s_Q - s_j) (f_j v_j) (x) B_j

Every exponent is <= 0, so nothing overflows. A log decay below -60 is read as -60: no state survives either (1e-26),
and a chunk's sums stay small enough to resolve slow decays beside it.

Backward: with x_j = f_j v_j and the skip left out of y, the gradient of s_i is dy_i . y_i - x_i . dx_i, plus dS' . S'
at the chunk's end: each pair (i, j) enters through s_i - s_j, so its row sum is dy . y and its column sum x . dx.

Shapes: B rows, L tokens, c chunks, Q tokens a chunk, H heads, G groups, P compartments, N states, M = (H/G) P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.config import SCAN_CHUNK_TOKENS
from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.exponential import LOWEST_LOG, exp_or_zero_


def _pad_tokens(tensor_BLx: Tensor, extra: int) -> Tensor:
    """Zeros after the last token: a decay of 1 and no input, which change no state and no gradient."""
    return functional.pad(tensor_BLx, (0, 0) * (tensor_BLx.dim() - 2) + (0, extra)) if extra else tensor_BLx


def _chunked(tensor_BLx: Tensor, chunk: int) -> Tensor:
    """[B, L, ...] -> [B, c, Q, ...]."""
    return tensor_BLx.unflatten(1, (-1, chunk))


def _decay_matrix(s_BcQH: Tensor) -> Tensor:
    """exp(s_i - s_j) for j <= i, 0 above the diagonal: [B, c, H, Q, Q]."""
    s_BcHQ = s_BcQH.transpose(2, 3).contiguous()
    chunk = s_BcHQ.shape[-1]
    above_QQ = torch.ones(chunk, chunk, dtype=torch.bool, device=s_BcHQ.device).triu_(1)
    differences = s_BcHQ[..., :, None] - s_BcHQ[..., None, :]
    return exp_or_zero_(differences.masked_fill_(above_QQ, LOWEST_LOG))


def _by_group(tensor_BcQHP: Tensor, groups: int) -> Tensor:
    """[B, c, Q, H, P] -> [B, c, G, Q, M], a view."""
    return tensor_BcQHP.flatten(3).unflatten(3, (groups, -1)).transpose(2, 3)


def _by_head(tensor_BcGQM: Tensor, compartments: int) -> Tensor:
    """[B, c, G, Q, M] -> [B, c, Q, H, P]."""
    return tensor_BcGQM.transpose(2, 3).flatten(3).unflatten(3, (-1, compartments))


def _state_decay(s_BcQH: Tensor, groups: int, compartments: int) -> Tensor:
    """A chunk's whole decay for every row of its state: [B, c, G, M, 1]."""
    whole_BcH = exp_or_zero_(s_BcQH[:, :, -1].clone())
    return whole_BcH.repeat_interleave(compartments, -1).unflatten(-1, (groups, -1))[..., None]


def _carry(local_BcGMN: Tensor, decay_BcGM1: Tensor, reverse: bool) -> Tensor:
    """The state that enters each chunk (reverse: the state gradient that enters from the right); consumes `local`."""
    chunks = local_BcGMN.shape[1]
    order = range(chunks - 1, 0, -1) if reverse else range(chunks - 1)
    ahead = -1 if reverse else 1
    entering = torch.empty_like(local_BcGMN)
    entering[:, chunks - 1 if reverse else 0] = 0
    for chunk in order:
        torch.addcmul(
            local_BcGMN[:, chunk],
            entering[:, chunk],
            decay_BcGM1[:, chunk],
            out=local_BcGMN[:, chunk],
        )
        entering[:, chunk + ahead] = local_BcGMN[:, chunk]
    return entering


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip_H: Tensor) -> Tensor:
        tokens, compartments = v.shape[1], v.shape[3]
        groups = b.shape[2]
        chunk = min(SCAN_CHUNK_TOKENS, tokens)
        extra = -tokens % chunk
        v_, a_, f_, b_, c_ = (_chunked(_pad_tokens(x, extra), chunk) for x in (v, log_decay, factor, b, c))
        s_BcQH = a_.clamp(min=LOWEST_LOG).cumsum(2)
        decay_BcHQQ = _decay_matrix(s_BcQH)
        bT_BcGNQ, c_BcGQN = b_.permute(0, 1, 3, 4, 2), c_.transpose(2, 3)
        scores_BcGQQ = torch.matmul(c_BcGQN, bT_BcGNQ)
        mixing_BcHQQ = _mix(decay_BcHQQ, scores_BcGQQ).to(v.dtype)
        x_BcHQP = (v_ * f_[..., None]).to(v.dtype).transpose(2, 3).contiguous()
        y_inside = torch.matmul(mixing_BcHQQ, x_BcHQP)

        from_s_BcQH = exp_or_zero_(s_BcQH.clone())
        to_end_BcQH = exp_or_zero_(s_BcQH[:, :, -1:] - s_BcQH)
        x_end_BcQHP = (v_ * (f_ * to_end_BcQH)[..., None]).to(v.dtype)
        local = torch.matmul(_by_group(x_end_BcQHP, groups).transpose(3, 4), b_.transpose(2, 3))
        state_decay = _state_decay(s_BcQH, groups, compartments)
        state_BcGMN = _carry(local.to(s_BcQH.dtype), state_decay, reverse=False).to(v.dtype)
        y_across = _by_head(torch.matmul(c_BcGQN, state_BcGMN.transpose(3, 4)), compartments)
        y = torch.mul(y_across, from_s_BcQH[..., None]).add_(y_inside.transpose(2, 3))
        y = y.addcmul_(v_, skip_H[:, None]).flatten(1, 2)
        ctx.save_for_backward(v, log_decay, factor, b, c, skip_H, decay_BcHQQ, mixing_BcHQQ, state_BcGMN, s_BcQH, y)
        return y[:, :tokens].to(v.dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        v, log_decay, factor, b, c, skip_H, decay_BcHQQ, mixing_BcHQQ, state_BcGMN, s_BcQH, y = ctx.saved_tensors
        tokens, groups, compartments = v.shape[1], b.shape[2], v.shape[3]
        chunk = s_BcQH.shape[2]
        extra = -tokens % chunk
        v_, f_, b_, c_, dy_ = (_chunked(_pad_tokens(x, extra), chunk) for x in (v, factor, b, c, dy))
        b_BcGQN, c_BcGQN = b_.transpose(2, 3), c_.transpose(2, 3)
        to_end_BcQH = exp_or_zero_(s_BcQH[:, :, -1:] - s_BcQH)
        state_decay = _state_decay(s_BcQH, groups, compartments)

        # The states' gradients: from the outputs after each chunk, carried back through the chunks' decays.
        dy_start = _by_group((dy_ * exp_or_zero_(s_BcQH.clone())[..., None]).to(v.dtype), groups)
        local = torch.matmul(dy_start.transpose(3, 4), c_BcGQN)
        dstate_BcGMN = _carry(local.to(s_BcQH.dtype), state_decay, reverse=True)
        ds_end_BcH = _state_products(dstate_BcGMN, state_BcGMN, compartments)
        dstate_BcGMN = dstate_BcGMN.to(v.dtype)

        dy_BcHQP = dy_.transpose(2, 3).contiguous()
        x_BcHQP = (v_ * f_[..., None]).to(v.dtype).transpose(2, 3).contiguous()
        dx_inside = torch.matmul(mixing_BcHQQ.transpose(3, 4), dy_BcHQP).transpose(2, 3)
        dx_across = _by_head(torch.matmul(b_BcGQN, dstate_BcGMN.transpose(3, 4)), compartments)
        dx_BcQHP = torch.mul(dx_across, to_end_BcQH[..., None]).add_(dx_inside)

        dmixing_BcHQQ = torch.matmul(dy_BcHQP, x_BcHQP.transpose(3, 4)).to(s_BcQH.dtype).mul_(decay_BcHQQ)
        dscores_BcGQQ = dmixing_BcHQQ.unflatten(2, (groups, -1)).sum(3).to(v.dtype)
        x_end = _by_group((v_ * (f_ * to_end_BcQH)[..., None]).to(v.dtype), groups)
        dc = torch.matmul(dscores_BcGQQ, b_BcGQN).add_(torch.matmul(dy_start, state_BcGMN))
        db = torch.matmul(dscores_BcGQQ.transpose(3, 4), c_BcGQN).add_(torch.matmul(x_end, dstate_BcGMN))

        dfactor_BcQH = (dx_BcQHP * v_).sum(-1)
        dy_v_BcQH = (dy_ * v_).to(s_BcQH.dtype).sum(-1)
        dy_y_BcQH = (dy_ * _chunked(y, chunk)).sum(-1)
        ds_BcQH = dy_y_BcQH.sub_(dy_v_BcQH * skip_H).sub_(dfactor_BcQH * f_)
        ds_BcQH[:, :, -1] += ds_end_BcH
        da = ds_BcQH.flip(2).cumsum(2).flip(2).flatten(1, 2)[:, :tokens] * (log_decay >= LOWEST_LOG)
        dv = dx_BcQHP.mul_(f_[..., None]).addcmul_(dy_, skip_H[:, None]).to(v.dtype).flatten(1, 2)[:, :tokens]
        dfactor = dfactor_BcQH.flatten(1, 2)[:, :tokens]
        db = db.transpose(2, 3).flatten(1, 2)[:, :tokens]
        dc = dc.transpose(2, 3).flatten(1, 2)[:, :tokens]
        return dv, da, dfactor, db, dc, dy_v_BcQH.sum((0, 1, 2))


def _mix(decay_BcHQQ: Tensor, scores_BcGQQ: Tensor) -> Tensor:
    """Each head's decay times its group's scores."""
    groups = scores_BcGQQ.shape[2]
    return (decay_BcHQQ.unflatten(2, (groups, -1)) * scores_BcGQQ[:, :, :, None]).flatten(2, 3)


def _state_products(dstate_BcGMN: Tensor, state_BcGMN: Tensor, compartments: int) -> Tensor:
    """<dS', S'> a head for the state that leaves each chunk: [B, c, H]; nothing leaves the last one."""
    products = (dstate_BcGMN[:, :-1] * state_BcGMN[:, 1:]).sum(-1)
    heads_BcH = products.flatten(2).unflatten(2, (-1, compartments)).sum(-1)
    return functional.pad(heads_BcH, (0, 0, 0, 1))


def dendritic_scan(v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """The recurrence of this page over every row, from a zero state.

    v [B, L, H, P] inputs; log_decay [B, L, H] <= 0 and factor [B, L, H], fp32; b, c [B, L, G, N], head i in group
    i // (H / G); skip [H]. Returns y [B, L, H, P] in the dtype of v.
    """
    if use_triton(v):
        from neuronspark.kernels.dendritic_scan_triton import dendritic_scan_triton

        return dendritic_scan_triton(v, log_decay, factor, b, c, skip)
    return _Scan.apply(v, log_decay, factor, b, c, skip)
