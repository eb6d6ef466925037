# mypy: disable-error-code="no-untyped-def"
"""Triton kernels over a group's flat buffers: AdamW in one pass, and the sums that the gradient norms are made of.

AdamW reads master, gradient and both moments and writes them (the gradient as zeros) and the compute copy: 34 bytes an
element with a bf16 copy, which is all that must move, so memory is its floor. Whether an update is applied is a
predicate on its stores; the gradient's reset is not predicated and stores a literal zero. A moving average adds 8 bytes
an element, from where it begins.

The norms' pass reads the gradient once, 4 bytes an element. A node of NODE elements is summed in fp64 by one program;
a stretch of nodes - one part's share of one group - by SPLITS programs, each over every SPLITS-th block, and those in
their order. No sum depends on what runs first. The optimizer's summary forms four such sums in a pass over masters and
moments.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a program of AdamW; buffers are whole numbers of them."""
NODES = 4
"""Nodes of a program of the first sums."""
STATE_NODES = 2
"""Nodes of a program of the summary's first sums."""
SPLITS = 32
NODE_BLOCK = 256
"""Nodes that a program of the second sums adds at a time."""


@triton.jit
def _adamw_kernel(
    master,
    gradient,
    exp_avg,
    exp_avg_sq,
    compute,
    ema,
    divisor,
    skip,
    rate,
    decay,
    move,
    corrections,
    beta1,
    beta2,
    eps,
    HAS_COPY: tl.constexpr,
    HAS_EMA: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # All loads before the first store, so that they are under way together: nothing can be moved over a store.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradient + at)
    w = tl.load(master + at)
    m = tl.load(exp_avg + at)
    v = tl.load(exp_avg_sq + at)
    applied = (tl.load(skip) + tl.zeros([BLOCK], tl.float32)) == 0
    if HAS_EMA:
        share = tl.load(move) + tl.zeros([BLOCK], tl.float32)
        moves = applied & (share > 0)
        e = tl.load(ema + at, mask=moves, other=0.0)
    step_size = tl.load(rate)
    ones = tl.full([BLOCK], 1.0, tl.float32)
    root_correction2 = tl.sqrt_rn(tl.load(corrections + 1).to(tl.float32))
    corrected_rate = tl.div_rn(step_size * ones, tl.load(corrections).to(tl.float32) * ones)

    g = tl.div_rn(g, tl.load(divisor) * ones)
    if DECAYS:
        w = w - step_size * tl.load(decay).to(tl.float32) * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w = w - tl.div_rn(corrected_rate * m, tl.div_rn(tl.sqrt_rn(v), root_correction2 * ones) + eps)

    tl.store(gradient + at, tl.zeros([BLOCK], tl.float32))
    tl.store(master + at, w, mask=applied)
    tl.store(exp_avg + at, m, mask=applied)
    tl.store(exp_avg_sq + at, v, mask=applied)
    if HAS_COPY:
        tl.store(compute + at, w.to(compute.dtype.element_ty), mask=applied)
    if HAS_EMA:
        tl.store(ema + at, tl.where(share == 1.0, w, e + share * (w - e)), mask=moves)


def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compute: Tensor | None,
    ema: Tensor | None,
    divisor: Tensor,
    skip: Tensor,
    rate: Tensor,
    decay: Tensor | None,
    move: Tensor,
    corrections: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW update of flat fp32 buffers (whole BLOCKs), or with `skip` = 1 only the reset of the gradient.

    `compute`, if there is one, receives the masters rounded to its dtype; `ema`, if there is one, goes a share `move`
    of the way to them, is copied from them at 1 and stays as it is at 0. `divisor`, `skip`, `rate` and `move` are fp32
    0-d tensors, `decay` a 0-d tensor or None for a group that does not decay; `corrections` holds 1 - beta1^t and
    1 - beta2^t in fp64.
    """
    assert master.numel() % BLOCK == 0
    _adamw_kernel[(master.numel() // BLOCK,)](
        master,
        gradient,
        exp_avg,
        exp_avg_sq,
        master if compute is None else compute,
        master if ema is None else ema,
        divisor,
        skip,
        rate,
        rate if decay is None else decay,
        move,
        corrections,
        beta1,
        beta2,
        eps,
        HAS_COPY=compute is not None,
        HAS_EMA=ema is not None,
        DECAYS=decay is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _node_sums_kernel(buffer, sums, nodes, NODE: tl.constexpr, NODES: tl.constexpr):
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    inside = node < nodes
    at = node.to(tl.int64)[:, None] * NODE + tl.arange(0, NODE)[None, :]
    x = tl.load(buffer + at, mask=inside[:, None], other=0.0).to(tl.float64)
    tl.store(sums + node, tl.sum(x * x, 1), mask=inside)


@triton.jit
def _stretch_sums_kernel(sums, firsts, lasts, out, SPLITS: tl.constexpr, NODE_BLOCK: tl.constexpr):
    stretch, split = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(firsts + stretch), tl.load(lasts + stretch)
    total = tl.zeros([NODE_BLOCK], tl.float64)
    for start in range(first + split * NODE_BLOCK, last, SPLITS * NODE_BLOCK):
        node = start + tl.arange(0, NODE_BLOCK)
        total += tl.load(sums + node, mask=node < last, other=0.0)
    tl.store(out + stretch * SPLITS + split, tl.sum(total, 0))


def node_sums(buffer: Tensor, node_elements: int) -> Tensor:
    """The sum of squares of each `node_elements` (a power of two) of an fp32 buffer, in fp64."""
    nodes = buffer.numel() // node_elements
    sums = torch.empty(nodes, dtype=torch.float64, device=buffer.device)
    _node_sums_kernel[(triton.cdiv(nodes, NODES),)](buffer, sums, nodes, NODE=node_elements, NODES=NODES, num_warps=4)
    return sums


@triton.jit
def _state_sums_kernel(
    master,
    exp_avg,
    exp_avg_sq,
    sums,
    stride,
    nodes,
    correction1,
    root_correction2,
    eps,
    NODE: tl.constexpr,
    NODES: tl.constexpr,
):
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    inside = node < nodes
    at = node.to(tl.int64)[:, None] * NODE + tl.arange(0, NODE)[None, :]
    w = tl.load(master + at, mask=inside[:, None], other=0.0)
    m = tl.load(exp_avg + at, mask=inside[:, None], other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside[:, None], other=0.0)
    step = (m / correction1) / (tl.sqrt_rn(v) / root_correction2 + eps)
    w, m, v, step = w.to(tl.float64), m.to(tl.float64), v.to(tl.float64), step.to(tl.float64)
    tl.store(sums + node, tl.sum(w * w, 1), mask=inside)
    tl.store(sums + stride + node, tl.sum(m * m, 1), mask=inside)
    tl.store(sums + 2 * stride + node, tl.sum(v, 1), mask=inside)
    tl.store(sums + 3 * stride + node, tl.sum(step * step, 1), mask=inside)


def state_sums(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    node_elements: int,
    correction1: float,
    correction2: float,
    eps: float,
    out: Tensor,
) -> None:
    """Sums of w^2, m^2, v and AdamW's step^2 at rate 1 of each `node_elements` of flat buffers, into `out` [4, nodes].

    `correction1` and `correction2` are 1 - beta^t, or 1 where nothing was applied yet; `out`, fp64, may be a slice.
    """
    nodes = master.numel() // node_elements
    _state_sums_kernel[(triton.cdiv(nodes, STATE_NODES),)](
        master,
        exp_avg,
        exp_avg_sq,
        out,
        out.stride(0),
        nodes,
        correction1,
        math.sqrt(correction2),
        eps,
        NODE=node_elements,
        NODES=STATE_NODES,
        num_warps=4,
    )


def stretch_sums(sums: Tensor, firsts: Tensor, lasts: Tensor) -> Tensor:
    """Sums over stretches [first, last) of nodes (int64 tensors), in fp64: [stretches]."""
    parts = torch.empty(firsts.numel(), SPLITS, dtype=torch.float64, device=sums.device)
    _stretch_sums_kernel[(firsts.numel(), SPLITS)](
        sums, firsts, lasts, parts, SPLITS=SPLITS, NODE_BLOCK=NODE_BLOCK, num_warps=4
    )
    return parts.sum(1)
