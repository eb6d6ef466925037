"""The addresses of the pool read: queries and keys of every head, each with its half of the induction match.

    query(t) = [ 4 gain q_t / sqrt(d_h) ; 2 beta p_t / r ]        gain and beta a head
    key(s)   = [ k_s                    ; p_{s-1}        ]        p before a row's first token is 0

q and k are RMS-normalised a head (no gain) and turned by their token's position, p is RMS-normalised and the same for
all heads; so query(t) . key(s) is high when what preceded s looks like now.

Shapes: B rows, L tokens, T = B L, h heads of d channels, D = h d, r match width, a = d + r.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.rotary import rotary_norm

QUERY_SHARPNESS = 4.0
MATCH_SHARPNESS = 2.0


def addresses(
    q_TD: Tensor,
    k_TD: Tensor,
    p_Tr: Tensor,
    query_gain_h: Tensor,
    match_gain_h: Tensor,
    rotary: Tensor,
    row_tokens: int,
    eps: float,
    before_Br: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(query, key), both [B, h, L, a] in the dtype of q, of rows of `row_tokens` tokens.

    p and `before`, the p of the token before each row's first, come as projected; without `before` that p is 0. No
    gradient reaches it. The gains are at least fp32; `rotary` is `rotary.rotary_table` of the rows' positions.
    """
    if use_triton(q_TD):
        from neuronspark.kernels.addresses_triton import addresses_triton

        return addresses_triton(q_TD, k_TD, p_Tr, query_gain_h, match_gain_h, rotary, row_tokens, eps, before_Br)
    heads = len(query_gain_h)
    by_head = (-1, row_tokens, heads, q_TD.shape[1] // heads)
    q_BhLd = rotary_norm(q_TD.view(by_head), rotary, eps)
    k_BhLd = rotary_norm(k_TD.view(by_head), rotary, eps)
    unit_gain_r = torch.ones(p_Tr.shape[1], dtype=rotary.dtype, device=rotary.device)
    p_BLr = rms_norm(p_Tr, unit_gain_r, eps).unflatten(0, (-1, row_tokens))
    before_BLr = functional.pad(p_BLr[:, :-1], (0, 0, 1, 0))
    if before_Br is not None:
        before_BLr[:, 0] = rms_norm(before_Br.detach(), unit_gain_r, eps)

    q_scale_h = query_gain_h * (QUERY_SHARPNESS / math.sqrt(by_head[-1]))
    p_scale_h = match_gain_h * (MATCH_SHARPNESS / p_Tr.shape[1])
    query_BhLd = (q_BhLd * q_scale_h[:, None, None]).to(q_TD.dtype)
    match_BhLr = (p_BLr[:, None] * p_scale_h[:, None, None]).to(q_TD.dtype)
    preceding_BhLr = before_BLr[:, None].expand_as(match_BhLr)
    return torch.cat((query_BhLd, match_BhLr), -1), torch.cat((k_BhLd, preceding_BhLr), -1)
