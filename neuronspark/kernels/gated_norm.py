"""The dendritic layer's soma: the read-out, gated and normalised a head at a time.

    m = y * silu(z);  u = gain * m / sqrt(mean(m^2) + eps)
Shapes: T tokens, H heads, P compartments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.gradient import at_least_fp32
from neuronspark.kernels.rmsnorm import inverse_rms


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_THP: Tensor, z_THP: Tensor, gain_HP: Tensor, eps: float) -> Tensor:
        m_THP = functional.silu(at_least_fp32(z_THP)).mul_(y_THP)
        scale_TH1 = inverse_rms(m_THP, eps)
        ctx.save_for_backward(y_THP, z_THP, gain_HP, scale_TH1)
        return m_THP.mul_(scale_TH1).mul_(gain_HP).to(y_THP.dtype)

    @staticmethod
    def backward(ctx: Any, du_THP: Tensor) -> tuple[Tensor | None, ...]:
        y_THP, z_THP, gain_HP, scale_TH1 = ctx.saved_tensors
        y, z, du = at_least_fp32(y_THP), at_least_fp32(z_THP), at_least_fp32(du_THP)
        silu_THP = functional.silu(z)
        m_THP = silu_THP * y
        # As in rmsnorm.py, with m in the place of x.
        e_THP = torch.mul(du, m_THP).mul_(scale_TH1)
        dgain_HP = e_THP.sum(0)
        pull_TH1 = e_THP.mul_(gain_HP).sum(-1, keepdim=True).mul_(scale_TH1.square()).div_(-m_THP.shape[-1])
        dm_THP = torch.mul(du, gain_HP, out=e_THP).mul_(scale_TH1).addcmul_(m_THP, pull_TH1)
        dy_THP = silu_THP.mul_(dm_THP)
        dz_THP = torch.ops.aten.silu_backward(dm_THP.mul_(y), z)
        return dy_THP.to(y_THP.dtype), dz_THP.to(z_THP.dtype), dgain_HP, None


def gated_norm(y_THP: Tensor, z_THP: Tensor, gain_HP: Tensor, eps: float) -> Tensor:
    """y * silu(z), RMS-normalised over each head's compartments; the dtype of y stays."""
    return _GatedNorm.apply(y_THP, z_THP, gain_HP, eps)
