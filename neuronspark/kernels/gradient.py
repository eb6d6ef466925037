"""Where a parameter's gradient goes.

A trainer that accumulates over micro-batches gives every parameter an fp32 buffer `main_grad`. The operators add into
it during the backward and return None to autograd, so that no `.grad` is ever allocated. A parameter without
`main_grad` receives its gradient in the ordinary way.

Matrices are handled inside their operator (the product adds straight into the buffer). Everything else is read
through `tapped`, behind which ordinary autograd applies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def main_gradient(parameter: Tensor) -> Tensor | None:
    """The buffer that collects the parameter's gradient, or None if it has none."""
    return getattr(parameter, "main_grad", None)


def deliver(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Add the gradient to the parameter's main_grad and return None, or return it for autograd."""
    main = main_gradient(parameter)
    if main is None:
        return gradient.to(parameter.dtype)
    main.add_(gradient)
    return None


def deliver_product(parameter: Tensor, left_MT: Tensor, right_TN: Tensor) -> Tensor | None:
    """As `deliver`, for a gradient that is the product left @ right, without a buffer for the product if possible."""
    main = main_gradient(parameter)
    if main is not None and main.dtype == left_MT.dtype:
        main.addmm_(left_MT, right_TN)
        return None
    return deliver(parameter, torch.mm(left_MT, right_TN))


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        # An attribute, not save_for_backward: the buffer hangs on this very object, which checkpointing would replace.
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        return deliver(ctx.parameter, gradient)


def tapped(parameter: Tensor) -> Tensor:
    """The parameter's value, whose gradient goes where `deliver` says."""
    return _Tap.apply(parameter)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is fp64: the dtype of norms, logits, decays and clocks."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
