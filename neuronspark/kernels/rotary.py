"""Rotary position embedding (Su et al., 2104.09864) of RMS-normalised heads, half-split pairs.

Channel i of the first half and channel i of the second half are a pair, turned by the angle t * base^(-2 i / d). Angles
are formed in fp64: at position 30,000 an fp32 angle is already off by 1e-3.

Shapes: B rows, L tokens, h heads, d channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.gradient import at_least_fp32
from neuronspark.kernels.rmsnorm import inverse_rms


def rotary_table(tokens: int, head_width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position's angles, formed in fp64 and rounded once: [2, tokens, head_width / 2]."""
    if device.type == "meta":
        return torch.empty(2, tokens, head_width // 2, device=device, dtype=dtype)
    pair = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * base**-pair
    return torch.stack((angle.cos(), angle.sin())).to(device=device, dtype=dtype)


def _turn(x_BLhd: Tensor, cos_L1d: Tensor, sin_L1d: Tensor) -> Tensor:
    """Turn every pair by its angle into a fresh [B, h, L, d] buffer; returns its [B, L, h, d] view."""
    rows, tokens, heads, width = x_BLhd.shape
    out = x_BLhd.new_empty(rows, heads, tokens, width).transpose(1, 2)
    (first, second), (out_first, out_second) = x_BLhd.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos_L1d, out=out_first).addcmul_(second, sin_L1d, value=-1)
    torch.mul(second, cos_L1d, out=out_second).addcmul_(first, sin_L1d)
    return out


class _RotaryNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLhd: Tensor, table: Tensor, eps: float) -> Tensor:
        x = at_least_fp32(x_BLhd)
        cos_L1d, sin_L1d = table[:, : x.shape[1], None].to(x.dtype)
        scale_BLh1 = inverse_rms(x, eps)
        # A turn keeps the norm, so the scale may follow it.
        out = _turn(x, cos_L1d, sin_L1d).mul_(scale_BLh1)
        ctx.save_for_backward(out, scale_BLh1, cos_L1d, sin_L1d)
        ctx.dtype = x_BLhd.dtype
        return out.to(x_BLhd.dtype).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout_BhLd: Tensor) -> tuple[Tensor | None, ...]:
        out_BLhd, scale_BLh1, cos_L1d, sin_L1d = ctx.saved_tensors
        dout = at_least_fp32(dout_BhLd).transpose(1, 2)
        # In the turned frame: dx = scale (dout - out mean(dout out)); then turn back.
        pull_BLh1 = (dout * out_BLhd).sum(-1, keepdim=True).div_(-out_BLhd.shape[-1])
        turned = torch.addcmul(dout, out_BLhd, pull_BLh1).mul_(scale_BLh1)
        return _turn(turned, cos_L1d, -sin_L1d).to(ctx.dtype), None, None


def rotary_norm(x_BLhd: Tensor, table: Tensor, eps: float) -> Tensor:
    """Each head RMS-normalised (no gain), then turned by its token's position; laid out as [B, h, L, d]."""
    return _RotaryNorm.apply(x_BLhd, table, eps)
