"""The quantal neuron's release.

    n = clamp(round(u / theta), lo, hi),  output theta * n,  theta = exp(log_theta) a channel
Backward: straight-through where lo - w < u/theta < hi + w; d output / d theta = n - u/theta there and n elsewhere (the
learned-step-size rule, Esser et al., 1902.08153). Rounding is half-to-even. Shapes: T tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_TC: Tensor, log_theta_C: Tensor, lowest: float, highest: float, margin: float) -> Tensor:
        theta_C = log_theta_C.exp()
        quanta_TC = torch.div(at_least_fp32(u_TC), theta_C).round_().clamp_(lowest, highest)
        out_TC = quanta_TC.mul_(theta_C).to(u_TC.dtype)
        ctx.save_for_backward(u_TC, theta_C, out_TC)
        ctx.window = (lowest - margin, highest + margin)
        return out_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        u_TC, theta_C, out_TC = ctx.saved_tensors
        u, dy = at_least_fp32(u_TC), at_least_fp32(dy_TC)
        ratio_TC = torch.div(u, theta_C)
        # hardtanh's backward is the straight-through window in one pass: dy strictly inside, 0 elsewhere.
        du_TC = torch.ops.aten.hardtanh_backward(dy, ratio_TC, *ctx.window)
        # d log_theta = theta d theta = sum of dy * (theta n) - (dy inside the window) * u, which needs no division.
        terms_TC = torch.mul(dy, at_least_fp32(out_TC), out=ratio_TC).addcmul_(du_TC, u, value=-1)
        return du_TC.to(u_TC.dtype), terms_TC.sum(0), None, None, None


def release(u_TC: Tensor, log_theta_C: Tensor, lowest: int, highest: int, margin: float) -> Tensor:
    """Whole quanta of height exp(log_theta), between `lowest` and `highest` of them; the dtype of u stays."""
    if use_triton(u_TC):
        from neuronspark.kernels.release_triton import release_triton

        return release_triton(u_TC, log_theta_C, float(lowest), float(highest), float(margin))
    return _Release.apply(u_TC, log_theta_C, float(lowest), float(highest), float(margin))
