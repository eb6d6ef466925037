"""Which implementation of an operator runs: its Triton kernels, or its PyTorch reference.

Every operator has both, with one contract. The reference is right on any device and in float64; the kernels are for
CUDA tensors of at most 32 bits. NEURONSPARK_KERNELS=reference runs the references there too, to compare with; with
NEURONSPARK_KERNELS=triton and TRITON_INTERPRET=1 the kernels run on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os

from torch import Tensor

KERNELS_VARIABLE = "NEURONSPARK_KERNELS"
CHOICES = ("auto", "reference", "triton")


class KernelsUnavailable(RuntimeError):
    """The Triton kernels are wanted and cannot run; the message says why and what to do."""


def kernel_choice() -> str:
    """What NEURONSPARK_KERNELS asks for, as it is: one of `CHOICES`, if it is not refused at the first operator."""
    return os.environ.get(KERNELS_VARIABLE, CHOICES[0])


def use_triton(tensor: Tensor) -> bool:
    """Whether an operator runs its Triton kernels for this input; `KernelsUnavailable` if it should and cannot."""
    choice = kernel_choice()
    if choice not in CHOICES:
        raise KernelsUnavailable(f"{KERNELS_VARIABLE} is {choice!r}: expected one of {', '.join(CHOICES)}")
    if choice == "reference" or tensor.element_size() > 4:
        return False
    if choice == "auto" and not tensor.is_cuda:
        return False
    if not _has_triton():
        raise KernelsUnavailable(
            "the kernels need the package triton, which is not installed; install the triton that your torch asks for, "
            f"or set {KERNELS_VARIABLE}=reference to run without them (several times slower)"
        )
    return True


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
