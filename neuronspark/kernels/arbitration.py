"""The comparator's two dense steps: how alike are read and value, and their blend.

    cos   = r . v / (max(|r|, eps) max(|v|, eps))          a head and token
    blend = f_r r + f_v v                                  factors a head and token
Shapes: B rows, h heads, L tokens, d channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
