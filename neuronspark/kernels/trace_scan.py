"""The hippocampal trace: a leaky average with a decay of its own for every token and channel.

    c_t = lambda_t c_{t-1} + (1 - lambda_t) u_t,   lambda = exp(log_decay), c = 0 before a row's first token

Tokens are cut into chunks; the recurrence runs over the positions inside a chunk for all chunks at once, then over the
chunks' ends, whose decays are exponentials of summed fp32 logarithms (a product of rounded decays would drift over a
long row). Shapes: B rows, L tokens, c chunks, Q tokens a chunk, K channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.exponential import exp_or_zero_
from neuronspark.kernels.gradient import at_least_fp32

CHUNK_TOKENS = 32


def _scan(input_BLK: Tensor, log_decay_BLK: Tensor) -> Tensor:
    """y_t = exp(log_decay_t) y_{t-1} + input_t from zero."""
    tokens = input_BLK.shape[1]
    chunk = min(CHUNK_TOKENS, tokens)
    extra = -tokens % chunk
    x = functional.pad(input_BLK, (0, 0, 0, extra)).unflatten(1, (-1, chunk))
    log_decay = functional.pad(log_decay_BLK, (0, 0, 0, extra)).unflatten(1, (-1, chunk))
    decay = log_decay.exp()
    y = torch.empty_like(x)
    y[:, :, 0] = x[:, :, 0]
    for position in range(1, chunk):
        torch.addcmul(x[:, :, position], decay[:, :, position], y[:, :, position - 1], out=y[:, :, position])
    since_start = exp_or_zero_(log_decay.cumsum(2))
    carried = torch.zeros_like(y[:, :, 0])
    for index in range(1, y.shape[1]):
        torch.addcmul(y[:, index - 1, -1], since_start[:, index - 1, -1], carried[:, index - 1], out=carried[:, index])
    return y.addcmul_(since_start, carried[:, :, None]).flatten(1, 2)[:, :tokens]


class _Trace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_BLK: Tensor, log_decay_BLK: Tensor) -> Tensor:
        share_BLK = log_decay_BLK.expm1().neg_()
        c_BLK = _scan(share_BLK * u_BLK, log_decay_BLK)
        ctx.save_for_backward(u_BLK, log_decay_BLK, share_BLK, c_BLK)
        return c_BLK

    @staticmethod
    def backward(ctx: Any, dc_BLK: Tensor) -> tuple[Tensor, Tensor]:
        u_BLK, log_decay_BLK, share_BLK, c_BLK = ctx.saved_tensors
        # The adjoint is the same recurrence from the right: g_t = dc_t + lambda_{t+1} g_{t+1}.
        shifted = functional.pad(log_decay_BLK[:, 1:], (0, 0, 0, 1)).flip(1)
        g_BLK = _scan(dc_BLK.to(c_BLK.dtype).flip(1), shifted).flip(1)
        before_BLK = functional.pad(c_BLK[:, :-1], (0, 0, 1, 0))
        dlog_decay = (before_BLK - u_BLK).mul_(g_BLK).mul_(log_decay_BLK.exp())
        return (g_BLK * share_BLK).to(u_BLK.dtype), dlog_decay


def trace_scan(u_BLK: Tensor, log_decay_BLK: Tensor) -> Tensor:
    """The trace [B, L, K] of u under log decays <= 0 (fp32), in the decays' dtype."""
    if use_triton(u_BLK):
        from neuronspark.kernels.trace_scan_triton import trace_scan_triton

        return trace_scan_triton(u_BLK, log_decay_BLK)
    return _Trace.apply(u_BLK, log_decay_BLK)


def log_decay(logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
    """log lambda = -softplus(logit + bias), at least fp32; 1 - lambda is sigmoid(logit + bias)."""
    return -functional.softplus(at_least_fp32(logit_BLK) + bias_K)


def trace_of_logits(u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
    """The trace [B, L, K] of u under the decays of logits, in the dtype of u; the bias is at least fp32."""
    if use_triton(u_BLK):
        from neuronspark.kernels.trace_scan_triton import trace_of_logits_triton

        return trace_of_logits_triton(u_BLK, logit_BLK, bias_K)
    return trace_scan(at_least_fp32(u_BLK), log_decay(logit_BLK, bias_K)).to(u_BLK.dtype)
