"""Matrix products with weights.

Shapes: T tokens, I inputs, O outputs; a weight is [O, I].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.gradient import deliver_product


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TI)
        ctx.weights = weights_OI
        return tuple(torch.mm(x_TI, weight.t()) for weight in weights_OI)

    @staticmethod
    def backward(ctx: Any, *gradients_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,) = ctx.saved_tensors
        dx_TI: Tensor | None = None
        weight_gradients = []
        for dy_TO, weight in zip(gradients_TO, ctx.weights, strict=True):
            if ctx.needs_input_grad[0]:
                dx_TI = torch.mm(dy_TO, weight) if dx_TI is None else dx_TI.addmm_(dy_TO, weight)
            weight_gradients.append(deliver_product(weight, dy_TO.t(), x_TI))
        return dx_TI, *weight_gradients


class _ProjectOnto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight = weight_OI
        return torch.addmm(base_TO, x_TI, weight_OI.t())

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,) = ctx.saved_tensors
        return dy_TO, torch.mm(dy_TO, ctx.weight), deliver_product(ctx.weight, dy_TO.t(), x_TI)


def project(x_TI: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
    """x W^T for each of the weights; the input's gradient is accumulated over them in the order given."""
    return _Project.apply(x_TI, *weights_OI)


def project_onto(base_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """base + x W^T: a projection added to a residual stream (or to another projection)."""
    return _ProjectOnto.apply(base_TO, x_TI, weight_OI)
