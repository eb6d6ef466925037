"""Where a GPU's time goes in an update: by kernel, by the operators that the kernels belong to, and idle.

A profile is made of the kernels' intervals on the device. Triton kernels are the model's and the trainer's, and each
has its operator in a table beside them; libraries' kernels are known by what their names contain. What nobody knows is
shown as such, so that the operators' times and the idle time add up to the update (kernels that overlap count twice).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

TRAINER_KERNELS = {
    "_adamw_kernel": "AdamW",
    "_node_sums_kernel": "norms of gradients",
    "_stretch_sums_kernel": "norms of gradients",
    "_state_sums_kernel": "optimizer summaries",
}
"""The operator of each kernel of optimizer_kernels.py."""

LIBRARY_KERNELS = (
    (r"nvjet|gemm|gemv|cutlass|xmma|splitK", "matrix products"),
    (r"flash|fmha", "attention"),
    (r"[Ss]ort|fill_reverse_indices", "sorts"),
    (
        r"(?i:memcpy|memset)|[Cc]opy|CatArray|FillFunctor|CUDAFunctor(OnSelf|OnOther)?_add|AddFunctor",
        "copies and additions",
    ),
    (r"gather|index", "gathers"),
    (r"elementwise_kernel|reduce_kernel", "other elementwise and sums"),
)
"""Operators of kernels that are not ours, by what a kernel's full name contains; the first that fits."""

UNKNOWN = "other kernels"
IDLE = "idle"


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """Device time of one kernel in an update."""

    name: str
    operator: str
    ms: float
    calls: int
    share: float
    """Of the update's span."""


@dataclasses.dataclass(frozen=True)
class OperatorTime:
    """Device time of all kernels of one operator in an update."""

    operator: str
    ms: float
    calls: int
    share: float
    """Of the update's span."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where an update's time goes."""

    span_ms: float
    """From the first kernel's start to the last one's end."""
    idle_share: float
    """Part of the span in which no kernel ran."""
    operators: list[OperatorTime]
    """Longest first; the last is the idle time."""
    kernels: list[KernelTime]
    """Longest first."""


def summarize(intervals: Sequence[tuple[str, float, float]], operator_of: Mapping[str, str]) -> Profile:
    """A profile from kernels' names, starts and ends in microseconds; `operator_of` knows Triton kernels by name."""
    busy, end = 0.0, -1.0
    totals: dict[tuple[str, str], list[float]] = {}
    for name, start, stop in sorted(intervals, key=lambda interval: interval[1]):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        totals.setdefault((short_name(name), operator_of.get(name) or library_operator(name)), []).append(stop - start)
    span = max(stop for _, _, stop in intervals) - min(start for _, start, _ in intervals)
    kernels = [
        KernelTime(name, operator, sum(t) / 1e3, len(t), sum(t) / span) for (name, operator), t in totals.items()
    ]
    by_operator: dict[str, list[KernelTime]] = {}
    for kernel in kernels:
        by_operator.setdefault(kernel.operator, []).append(kernel)
    operators = [
        OperatorTime(name, sum(k.ms for k in of), sum(k.calls for k in of), sum(k.share for k in of))
        for name, of in by_operator.items()
    ]
    idle = OperatorTime(IDLE, (span - busy) / 1e3, 0, 1 - busy / span)
    return Profile(
        span_ms=span / 1e3,
        idle_share=idle.share,
        operators=[*sorted(operators, key=lambda operator: -operator.ms), idle],
        kernels=sorted(kernels, key=lambda kernel: -kernel.ms),
    )


def library_operator(kernel: str) -> str:
    """The operator of a library's kernel by its full name; UNKNOWN for one that nobody knows."""
    return next((operator for pattern, operator in LIBRARY_KERNELS if re.search(pattern, kernel)), UNKNOWN)


def short_name(kernel: str) -> str:
    """A kernel's name without what its template and types make of it."""
    if re.match(r"nvjet|.*(gemm|cutlass|xmma)", kernel):
        return "matrix products (cuBLAS)"
    found = re.search(r"(?:at::native::)(?:\(anonymous namespace\)::)?(\w+)", kernel)
    functor = re.search(r"at::native::(\w*[Ff]unctor\w*|\w+_kernel_cuda)", kernel)
    if found:
        return f"torch {found[1]}" + (f" {functor[1]}" if functor and functor[1] != found[1] else "")
    return re.sub(r"[<(].*", "", kernel).removeprefix("void ").strip()
