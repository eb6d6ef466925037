"""The head on a GPU: cuBLAS products a chunk of tokens at a time, and one kernel between them.

A chunk's bf16 logits are turned into their own gradient where they lie. A program owns a token's row and sweeps it
twice: the first sweep keeps, in fp32, a running maximum and a running sum of exponentials for every eight neighbours
(which one thread loads in 16 bytes); the second reads the row again, from the L2 cache as far as that holds the rows
in work, and writes

    dlogits = scale * ((1 + 2 z lse) softmax(logits) - [v = target])

over it, rounded once. The token's weight is in there, so neither product needs its narrow side scaled and rounded a
second time: dh = dlogits E is rounded once, and dE = dlogits^T h is accumulated over the chunks in fp32 (the reference
scales the narrow sides instead). Rows without a target are zeroed without being read.

The gradient is formed in the forward, while the logits are there: a backward that forms them anew would need a fourth
product, a third of the time. It waits in a buffer of V x d fp32 until the backward adds it to the table's main_grad,
times the loss's gradient. Adding to main_grad in the forward instead would spare that buffer (1.3 GB for ns-2b: 1 % of
a card) and two of the passes over it (by count 0.6 ms of some 50), but then a loss whose backward never runs, or runs
with another gradient, would have changed main_grad. The first chunk writes the buffer, the others add to it.

Memory: TOKENS x V logits in h's dtype (one chunk), V x d fp32 and T x d from the forward to the backward. Operations:
6 T d V. Bytes beside the products': 4 to 6 T V for the kernel, 8 V d a chunk for the sums, 12 V d for the last
addition.

The chunk is pinned as a launch configuration is, since it decides the order of dE's sums. Large chunks read and write
dE less often; and at width 2560 a chunk's dh has 10 tiles of 256 columns, so that 1664 n tokens, 130 n tiles of 128
rows, keep 132 multiprocessors busy to the last wave where 4096 tokens leave a fifth of them idle.
Shapes: T tokens, V vocabulary, d channels.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.cross_entropy import IGNORED
from neuronspark.kernels.gradient import add_product, main_gradient, put_product
from neuronspark.kernels.launch import ANY, CompileCase, Launch


def _row(eights: int, warps: int) -> Launch:
    return Launch({"EIGHTS": eights}, num_warps=warps)


def _chunk(tokens: int) -> Launch:
    return Launch({"TOKENS": tokens}, num_warps=1)


ROW = launch.register("linear_cross_entropy/row", {ANY: _row(1024, 8), "sm_90": _row(2048, 32)})
CHUNK = launch.register(
    "linear_cross_entropy/chunk",
    {ANY: _chunk(2048), "sm_90": _chunk(3328), "sm_100": _chunk(4096), "sm_103": _chunk(4096)},
)
"""Not a kernel's: the tokens whose logits are held at once."""
SCALED = launch.register("linear_cross_entropy/scaled", {ANY: Launch({"BLOCK": 4096}, num_warps=8)})

CANDIDATES = {
    ROW: [_row(1024, 8), _row(1024, 16), _row(2048, 16), _row(1024, 32), _row(2048, 32)],
    CHUNK: [_chunk(tokens) for tokens in (2048, 3328, 4096, 4992, 6656, 8192)],
    SCALED: [Launch({"BLOCK": 4096}, num_warps=8), Launch({"BLOCK": 2048}, num_warps=8)],
}
"""Configurations to time for each pinned one."""

NO_TARGET = tl.constexpr(IGNORED)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)
"""Where a maximum starts: finite, so that no difference of two infinities is formed."""


@triton.jit
def _row_kernel(
    logits_ptr,
    targets_ptr,
    ce_ptr,
    lse_ptr,
    scale_ptr,
    z_weight,
    vocabulary,
    row_stride,
    GRADIENT: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    token = tl.program_id(0)
    target = tl.load(targets_ptr + token)
    row = logits_ptr + token.to(tl.int64) * row_stride
    v = tl.arange(0, EIGHTS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if target == NO_TARGET:
        tl.store(ce_ptr + token, 0.0)
        tl.store(lse_ptr + token, 0.0)
        if GRADIENT:
            zeros = tl.zeros((EIGHTS, 8), dtype=logits_ptr.dtype.element_ty)
            for first in range(0, vocabulary, EIGHTS * 8):
                tl.store(row + first + v, zeros, mask=first + v < vocabulary)
    else:
        picked = tl.load(row + target).to(tl.float32)
        highest = tl.full((EIGHTS,), LOWEST, dtype=tl.float32)
        total = tl.zeros((EIGHTS,), dtype=tl.float32)
        for first in range(0, vocabulary, EIGHTS * 8):
            x = tl.load(row + first + v, mask=first + v < vocabulary, other=-float("inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)
            risen = tl.maximum(highest, tl.max(x, 1))
            total *= tl.exp2((highest - risen) * LOG2_E)
            total += tl.sum(tl.exp2((x - risen[:, None]) * LOG2_E), 1)
            highest = risen
        top = tl.max(highest, 0)
        total_1 = tl.sum(total * tl.exp2((highest - top) * LOG2_E), 0)
        log_total = tl.log(total_1)
        lse = top + log_total
        # From the maximum, not from the log-sum-exp: of large logits that has lost digits that the difference needs.
        tl.store(ce_ptr + token, (top - picked) + log_total)
        tl.store(lse_ptr + token, lse)
        if GRADIENT:
            # Every thread has read the target's logit before one writes over it.
            tl.debug_barrier()
            scale = tl.load(scale_ptr)
            share = (1.0 + 2.0 * z_weight * lse) / total_1
            for first in range(0, vocabulary, EIGHTS * 8):
                inside = first + v < vocabulary
                x = tl.load(row + first + v, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
                slope = tl.exp2((x - top) * LOG2_E) * share - tl.where(first + v == target, 1.0, 0.0)
                tl.store(row + first + v, (scale * slope).to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_kernel(out_ptr, x_ptr, factor_ptr, elements, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    scaled = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    if ADD:
        scaled += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def _rows(
    logits_TV: Tensor, targets_T: Tensor, ce_T: Tensor, lse_T: Tensor, scale: Tensor, z_weight: float, gradient: bool
) -> None:
    """Cross-entropies and log-sum-exps of a chunk's logits, 0 without a target; then the logits' gradient over them."""
    options = launch.pinned(ROW, logits_TV.device).options()
    _row_kernel[(logits_TV.shape[0],)](
        logits_TV,
        targets_T,
        ce_T,
        lse_T,
        scale,
        z_weight,
        logits_TV.shape[1],
        logits_TV.stride(0),
        GRADIENT=gradient,
        **options,
    )


def _scaled(out: Tensor, x: Tensor, factor: Tensor, add: bool) -> Tensor:
    """out = factor * x, or out += factor * x, in fp32 and rounded once; both contiguous, factor one element."""
    chosen = launch.pinned(SCALED, x.device)
    grid = (triton.cdiv(x.numel(), chosen.blocks["BLOCK"]),)
    _scaled_kernel[grid](out, x, factor, x.numel(), ADD=add, **chosen.options())
    return out


class _LinearCrossEntropyTriton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_Td: Tensor,
        table_Vd: Tensor,
        targets_T: Tensor,
        scale: Tensor,
        z_weight: float,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, width), vocabulary = h_Td.shape, table_Vd.shape[0]
        step = launch.pinned(CHUNK, h_Td.device).blocks["TOKENS"]
        targets_T, factor = targets_T.contiguous(), scale.float()
        ce_T, lse_T = (torch.empty(tokens, dtype=torch.float32, device=h_Td.device) for _ in range(2))
        logits_TV = h_Td.new_empty(min(step, tokens), vocabulary)
        dh_Td = h_Td.new_empty((tokens, width) if with_gradient else 0)
        dtable_Vd = h_Td.new_empty((vocabulary, width) if with_gradient else 0, dtype=torch.float32)
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            chunk_Td = h_Td[part]
            dlogits_TV = torch.mm(chunk_Td, table_Vd.t(), out=logits_TV[: chunk_Td.shape[0]])
            _rows(dlogits_TV, targets_T[part], ce_T[part], lse_T[part], factor, z_weight, with_gradient)
            if with_gradient:
                torch.mm(dlogits_TV, table_Vd, out=dh_Td[part])
                (add_product if first else put_product)(dtable_Vd, dlogits_TV.t(), chunk_Td)
        ctx.save_for_backward(dh_Td, dtable_Vd)
        ctx.table = table_Vd
        ce_sum = ce_T.sum()
        z_sum = lse_T.square_().sum().mul_(z_weight)
        ctx.mark_non_differentiable(ce_sum, z_sum)
        return (ce_sum + z_sum) * scale, ce_sum, z_sum

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _ce: Tensor, _z: Tensor) -> tuple[Tensor | None, ...]:
        dh_Td, dtable_Vd = ctx.saved_tensors
        factor = dloss.float()
        main = main_gradient(ctx.table)
        if main is None:
            dtable = _scaled(torch.empty_like(ctx.table), dtable_Vd, factor, add=False)
        else:
            dtable = None
            _scaled(main, dtable_Vd, factor, add=True)
        return _scaled(torch.empty_like(dh_Td), dh_Td, factor, add=False), dtable, None, None, None, None


def linear_cross_entropy_triton(
    h_Td: Tensor, table_Vd: Tensor, targets_T: Tensor, scale: Tensor, z_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy.linear_cross_entropy`; the table and its main_grad are contiguous."""
    return _LinearCrossEntropyTriton.apply(h_Td, table_Vd, targets_T, scale, z_weight, torch.is_grad_enabled())


def token_cross_entropy_triton(h_Td: Tensor, table_Vd: Tensor, targets_T: Tensor) -> Tensor:
    """As `cross_entropy.token_cross_entropy`: one sweep over each row, nothing written over it."""
    tokens, step = h_Td.shape[0], launch.pinned(CHUNK, h_Td.device).blocks["TOKENS"]
    targets_T = targets_T.contiguous()
    ce_T, lse_T = (torch.empty(tokens, dtype=torch.float32, device=h_Td.device) for _ in range(2))
    logits_TV = h_Td.new_empty(min(step, tokens), table_Vd.shape[0])
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        chunk_TV = torch.mm(h_Td[part], table_Vd.t(), out=logits_TV[: h_Td[part].shape[0]])
        # Without a gradient the scale is not read: any fp32 tensor will do.
        _rows(chunk_TV, targets_T[part], ce_T[part], lse_T[part], ce_T, 0.0, gradient=False)
    return ce_T


def compile_cases() -> list[CompileCase]:
    """The row's kernel with and without a gradient, and the scaling with and without addition, in bf16."""
    pointers = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "ce_ptr": "*fp32", "lse_ptr": "*fp32"}
    row = {**pointers, "scale_ptr": "*fp32", "z_weight": "fp32"}
    shape = {"vocabulary": 130_560, "row_stride": 130_560}
    scaled = {"factor_ptr": "*fp32", "elements": "i64"}
    return [
        *(CompileCase(ROW, _row_kernel, row, {**shape, "GRADIENT": gradient}) for gradient in (True, False)),
        CompileCase(SCALED, _scaled_kernel, {"out_ptr": "*bf16", "x_ptr": "*bf16", **scaled}, {"ADD": False}),
        CompileCase(SCALED, _scaled_kernel, {"out_ptr": "*fp32", "x_ptr": "*fp32", **scaled}, {"ADD": True}),
    ]
