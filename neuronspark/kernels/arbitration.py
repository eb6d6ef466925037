"""The comparator: how much of a head's output is what it read, and how much is its value.

    cos   = r . v / (max(|r|, eps) max(|v|, eps))          a head and token
    nu    = (1 - cos) / 2                                  novelty
    pi    = sigmoid(copy + copy_bias - novelty_weight nu)
    g     = softplus(gain + read_gain_bias)
    mixed = g pi r + (1 - pi) v

The reference is made of two operators, the cosine and the blend of two vectors.
Shapes: B rows, h heads, L tokens, T = B L, d channels of a head, D = h d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32

COSINE_EPS = 1e-6


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
        r, v = at_least_fp32(r_BhLd), at_least_fp32(v_BhLd)
        r_inverse = torch.linalg.vector_norm(r, dim=-1, keepdim=True).clamp_(min=COSINE_EPS).reciprocal_()
        v_inverse = torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_(min=COSINE_EPS).reciprocal_()
        cosine = (r * v).sum(-1, keepdim=True).mul_(r_inverse).mul_(v_inverse)
        ctx.save_for_backward(r_BhLd, v_BhLd, r_inverse, v_inverse, cosine)
        return cosine[..., 0]

    @staticmethod
    def backward(ctx: Any, dcosine_BhL: Tensor) -> tuple[Tensor, Tensor]:
        r_BhLd, v_BhLd, r_inverse, v_inverse, cosine = ctx.saved_tensors
        r, v = at_least_fp32(r_BhLd), at_least_fp32(v_BhLd)
        dcosine = dcosine_BhL[..., None]
        cross = dcosine * r_inverse * v_inverse
        # A norm below eps is a constant: it has no pull on its vector.
        r_pull = dcosine * cosine * r_inverse.square() * (r_inverse < 1 / COSINE_EPS)
        v_pull = dcosine * cosine * v_inverse.square() * (v_inverse < 1 / COSINE_EPS)
        dr = (v * cross).addcmul_(r, r_pull, value=-1)
        dv = (r * cross).addcmul_(v, v_pull, value=-1)
        return dr.to(r_BhLd.dtype), dv.to(v_BhLd.dtype)


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r_BhLd: Tensor, v_BhLd: Tensor, r_factor: Tensor, v_factor: Tensor) -> Tensor:
        ctx.save_for_backward(r_BhLd, v_BhLd, r_factor, v_factor)
        rows, heads, tokens, width = r_BhLd.shape
        out_BLhd = r_factor.new_empty(rows, tokens, heads, width)
        out_BhLd = torch.mul(r_BhLd, r_factor[..., None], out=out_BLhd.transpose(1, 2))
        out_BhLd.addcmul_(v_BhLd, v_factor[..., None])
        return out_BLhd.to(r_BhLd.dtype)

    @staticmethod
    def backward(ctx: Any, dout_BLhd: Tensor) -> tuple[Tensor, ...]:
        r_BhLd, v_BhLd, r_factor, v_factor = ctx.saved_tensors
        dout = at_least_fp32(dout_BLhd).transpose(1, 2).contiguous()
        dr_factor, dv_factor = (dout * r_BhLd).sum(-1), (dout * v_BhLd).sum(-1)
        dr = (dout * r_factor[..., None]).to(r_BhLd.dtype)
        return dr, dout.mul_(v_factor[..., None]).to(v_BhLd.dtype), dr_factor, dv_factor


def cosine(r_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
    """The cosine of each head's two vectors: [B, h, L], at least fp32."""
    return _Cosine.apply(r_BhLd, v_BhLd)


def blend(r_BhLd: Tensor, v_BhLd: Tensor, r_factor_BhL: Tensor, v_factor_BhL: Tensor) -> Tensor:
    """r_factor * r + v_factor * v, laid out as [B, L, h, d] in the dtype of r."""
    return _Blend.apply(r_BhLd, v_BhLd, r_factor_BhL, v_factor_BhL)


def compare(
    r_BhLd: Tensor,
    v_BhLd: Tensor,
    copy_BhL: Tensor,
    gain_BhL: Tensor,
    copy_bias_h: Tensor,
    novelty_weight_h: Tensor,
    read_gain_bias_h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Novelty nu, copy share pi and read gain g of every head and token, [B, h, L] each, at least fp32."""
    novelty_BhL = (1 - cosine(r_BhLd, v_BhLd)) / 2
    pi_BhL = torch.sigmoid(copy_BhL + copy_bias_h[:, None] - novelty_weight_h[:, None] * novelty_BhL)
    return novelty_BhL, pi_BhL, functional.softplus(gain_BhL + read_gain_bias_h[:, None])


def arbitrate(
    r_BhLd: Tensor,
    v_BhLd: Tensor,
    copy_BhL: Tensor,
    gain_BhL: Tensor,
    copy_bias_h: Tensor,
    novelty_weight_h: Tensor,
    read_gain_bias_h: Tensor,
) -> Tensor:
    """The comparator's mix of read r and value v, [T, D] in the dtype of r; all but r and v is at least fp32."""
    if use_triton(r_BhLd):
        from neuronspark.kernels.arbitration_triton import arbitrate_triton

        return arbitrate_triton(r_BhLd, v_BhLd, copy_BhL, gain_BhL, copy_bias_h, novelty_weight_h, read_gain_bias_h)
    inputs = (copy_BhL, gain_BhL, copy_bias_h, novelty_weight_h, read_gain_bias_h)
    _, pi_BhL, read_gain_BhL = compare(r_BhLd, v_BhLd, *inputs)
    return blend(r_BhLd, v_BhLd, read_gain_BhL * pi_BhL, 1 - pi_BhL).flatten(2).flatten(0, 1)
