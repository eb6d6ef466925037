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

from neuronspark.kernels.backend import use_triton


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
    if main is None:
        return deliver(parameter, torch.mm(left_MT, right_TN))
    add_product(main, left_MT, right_TN)
    return None


_ADDMM_INTO_FP32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
"""Until torch 2.9 addmm wants its first argument in the factors' dtype, so it cannot add to an fp32 buffer in place."""


def add_product(total_MN: Tensor, left_MT: Tensor, right_TN: Tensor) -> None:
    """total += left @ right. On a GPU a total in fp32 of 16-bit factors is accumulated in fp32, with nothing rounded.

    cuBLAS does so in one pass at 93-102 % of its plain products' rate on an H200, faster than a product and an
    addition, and faster than a Triton kernel at every weight's shape (docs/decisions/0007-kernels.md).
    """
    if total_MN.dtype == left_MT.dtype:
        total_MN.addmm_(left_MT, right_TN)
    elif not use_triton(left_MT):
        total_MN.add_(torch.mm(left_MT, right_TN))
    elif not left_MT.is_cuda:
        total_MN.addmm_(left_MT.to(total_MN.dtype), right_TN.to(total_MN.dtype))
    elif _ADDMM_INTO_FP32:
        torch.addmm(total_MN, left_MT, right_TN, out_dtype=total_MN.dtype, out=total_MN)
    else:
        total_MN.add_(torch.mm(left_MT, right_TN, out_dtype=total_MN.dtype))


def put_product(total_MN: Tensor, left_MT: Tensor, right_TN: Tensor) -> None:
    """total = left @ right, whatever total held before; precision as in `add_product`."""
    if total_MN.dtype == left_MT.dtype:
        torch.mm(left_MT, right_TN, out=total_MN)
    elif use_triton(left_MT) and left_MT.is_cuda:
        torch.mm(left_MT, right_TN, out_dtype=total_MN.dtype, out=total_MN)
    else:
        add_product(total_MN.zero_(), left_MT, right_TN)


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
