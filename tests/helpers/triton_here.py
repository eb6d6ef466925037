"""Triton kernels run on the card where there is one, else in Triton's interpreter on the CPU.

To be imported before a module that has kernels: the decorator decides when it runs.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernels run."""


def _mend_interpreter() -> None:
    """What Triton 3.6's interpreter does otherwise than a card, or not at all with numpy 2.4.

    It takes int() of an array with one element, which numpy refuses (loops with bounds known at run time), rounds fp32
    to bf16 towards zero, and multiplies bf16 matrices as the integers that hold their bits.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def patch_tensor(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        truth = lambda self: bool(self.handle.data.item()) if self.handle.data.size == 1 else True  # noqa: E731
        scope.set_attr(tensor, "__bool__", truth)

    def cast_impl(self, source, kind):  # type: ignore[no-untyped-def]
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
            return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return cast(self, source, kind)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter._patch_lang_tensor = patch_tensor
    builder.cast_impl, builder.create_dot = cast_impl, create_dot


if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _mend_interpreter()
