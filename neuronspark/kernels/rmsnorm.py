"""Root-mean-square normalisation over the last axis.

    y = gain * x / sqrt(mean(x^2) + eps)                          (Zhang and Sennrich, 1910.07467)

Shapes: T tokens, any axes between (heads, groups), C channels; the gain has all axes but the tokens'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays with size 1; fp32 for a 16-bit x."""
    mean_square = torch.linalg.vector_norm(at_least_fp32(x), dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TxC: Tensor, gain_xC: Tensor, eps: float) -> Tensor:
        scale_Tx1 = inverse_rms(x_TxC, eps)
        ctx.save_for_backward(x_TxC, gain_xC, scale_Tx1)
        return (at_least_fp32(x_TxC) * scale_Tx1).mul_(gain_xC).to(x_TxC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TxC: Tensor) -> tuple[Tensor | None, ...]:
        x_TxC, gain_xC, scale_Tx1 = ctx.saved_tensors
        x, dy = at_least_fp32(x_TxC), at_least_fp32(dy_TxC)
        # With e = scale dy x: d gain = sum_t e, and dx = scale gain dy - x scale^2 mean(gain e).
        e_TxC = torch.mul(dy, x).mul_(scale_Tx1)
        dgain_xC = e_TxC.sum(0)
        pull_Tx1 = e_TxC.mul_(gain_xC).sum(-1, keepdim=True).mul_(scale_Tx1.square()).div_(-x.shape[-1])
        dx_TxC = torch.mul(dy, gain_xC, out=e_TxC).mul_(scale_Tx1).addcmul_(x, pull_Tx1)
        return dx_TxC.to(x_TxC.dtype), dgain_xC, None


def rms_norm(x_TxC: Tensor, gain_xC: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last axis and scale by `gain`; the dtype of x stays."""
    if use_triton(x_TxC):
        from neuronspark.kernels.row_norm_triton import rms_norm_triton

        return rms_norm_triton(x_TxC, gain_xC, eps)
    return _RMSNorm.apply(x_TxC, gain_xC, eps)
