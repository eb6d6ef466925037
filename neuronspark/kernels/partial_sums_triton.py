"""The last step of a parameter's gradient: the programs' partial sums, added in a fixed order.

A backward kernel over tokens runs as a fixed number of programs; each sums its own tokens and writes one row of a
[Q, P, C] buffer (Q parameters, P programs, C channels). `sum_partials` adds the P rows: a program owns a few channels
of one parameter and walks the rows, BLOCK_P at a time, in order. No atomics, so the bits depend on the inputs and the
pinned configurations alone. The buffer is a few megabytes and lies in the L2 cache, so that time is latency: a walk of
few steps with many rows in flight, which where rows are many and channels few takes taller blocks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, CompileCase, Launch

MANY = 512
"""More rows than this are summed in taller blocks."""
SUM = launch.register("sum_partials", {ANY: Launch({"BLOCK_P": 512, "BLOCK_C": 8}, num_warps=4)})
SUM_MANY = launch.register("sum_partials/many", {ANY: Launch({"BLOCK_P": 1024, "BLOCK_C": 8}, num_warps=8)})
CANDIDATES = {
    SUM: [
        Launch({"BLOCK_P": 512, "BLOCK_C": 8}, num_warps=4),
        Launch({"BLOCK_P": 256, "BLOCK_C": 8}, num_warps=2),
        Launch({"BLOCK_P": 512, "BLOCK_C": 16}, num_warps=8),
    ],
    SUM_MANY: [
        Launch({"BLOCK_P": 1024, "BLOCK_C": 8}, num_warps=8),
        Launch({"BLOCK_P": 512, "BLOCK_C": 16}, num_warps=8),
        Launch({"BLOCK_P": 1024, "BLOCK_C": 4}, num_warps=8),
    ],
}
"""Configurations to time for each pinned one."""


@triton.jit
def _sum_partials_kernel(partials_ptr, sums_ptr, programs_P, channels_C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    parameter = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    partials = partials_ptr + parameter * programs_P * channels_C
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for first in range(0, programs_P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)[:, None]
        owned = (p < programs_P) & (c < channels_C)
        sums += tl.load(partials + p.to(tl.int64) * channels_C + c, mask=owned, other=0.0)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(sums_ptr + parameter * channels_C + c, tl.sum(sums, 0), mask=c < channels_C)


def sum_partials(partials_QPC: Tensor) -> Tensor:
    """The sum over the programs: fp32 [Q, C] of a contiguous fp32 [Q, P, C]."""
    parameters, programs, channels = partials_QPC.shape
    sums_QC = torch.empty(parameters, channels, dtype=torch.float32, device=partials_QPC.device)
    config = launch.pinned(SUM_MANY if programs > MANY else SUM, partials_QPC.device)
    grid = (triton.cdiv(channels, config.blocks["BLOCK_C"]), parameters)
    _sum_partials_kernel[grid](partials_QPC, sums_QC, programs, channels, **config.options())
    return sums_QC


def compile_cases() -> list[CompileCase]:
    """The kernel in both classes."""
    types = {"partials_ptr": "*fp32", "sums_ptr": "*fp32"}
    sizes = ((SUM, 264, 2560), (SUM_MANY, 660, 7040))
    return [
        CompileCase(name, _sum_partials_kernel, {**types, "programs_P": programs, "channels_C": channels})
        for name, programs, channels in sizes
    ]
