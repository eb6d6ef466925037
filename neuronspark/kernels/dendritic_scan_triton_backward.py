# mypy: disable-error-code="no-untyped-def"
"""Backward kernels of the dendritic scan; `dendritic_scan_triton` holds the design.

Shapes: B rows, L tokens, c chunks, Q tokens a chunk, H heads, G groups, P compartments, N states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.dendritic_scan_triton_forward import (
    TRITON_TYPES,
    Sizes,
    block_heads,
    by_head,
    by_state,
    load_tile,
    state_gradients,
    store_tile,
    tile,
    type_class,
)
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.launch import ANY, Launch

GRADIENT_PROGRAMS_WANTED = 1024
"""A group's heads are split in blocks until there are this many programs: a few waves of a large card."""
MOST_HEAD_BLOCKS = 8
"""But in no more than this, since each block writes its own parts of db and dc."""

CANDIDATES = {
    "dendritic_scan_gradients/16-bit": [Launch({}, 4, 3), Launch({}, 4, 2), Launch({}, 4, 1)],
}
"""Launch configurations for Hopper, the pinned one first. Its compiler has no barrier between warp groups after a
product (triton issue 11047), so more than four warps are for other cards."""
_PINNED = {
    "dendritic_scan_gradients/16-bit": {
        "sm_90": CANDIDATES["dendritic_scan_gradients/16-bit"][0],
        ANY: Launch({}, 8, 2),
    },
    "dendritic_scan_gradients/32-bit": {ANY: Launch({}, 8, 1)},
    "dendritic_scan_decay_gradients/16-bit": {ANY: Launch({"BLOCK_H": 16}, 4)},
    "dendritic_scan_decay_gradients/32-bit": {ANY: Launch({"BLOCK_H": 16}, 4)},
    "dendritic_scan_part_sums/16-bit": {ANY: Launch({"BLOCK": 1024}, 4)},
    "dendritic_scan_part_sums/32-bit": {ANY: Launch({"BLOCK": 1024}, 4)},
}
for _name, _launches in _PINNED.items():
    launch.register(_name, _launches)
# 0.356 ms on an H200 at 4 x 4096 tokens of 80 heads; two stages spill as little and take 0.393.
launch.allow_spill("dendritic_scan_gradients/16-bit", "sm_90", 32)


# --- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def later_range(SIZE: tl.constexpr, count):
    """0 ... SIZE - 1, such that the compiler takes it for another range than tl.arange(0, SIZE).

    What is computed from the plain one before a loop (addresses, masks) is kept in registers for what comes after it.
    """
    return tl.arange(0, SIZE) + tl.minimum(count, 0)


@triton.jit
def gradients_kernel(
    v,
    b,
    c,
    dy,
    dv,
    states,
    dstates,
    skip,
    logs,
    factors,
    bc_parts,
    own_products,
    column_sums,
    column_sums_across,
    row_sums,
    row_sums_across,
    skip_products,
    end_flow,
    part_size,
    tokens,
    heads,
    chunks,
    groups,
    group_heads,
    head_block,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The gradients of one chunk over a block of its group's heads.

    Two programs share the work, side by side so that the second to read a tile finds it in the L2 cache: the even one
    takes the pairs of tokens inside the chunk, and dv; the odd one takes what goes through the states.
    """
    at_chunk = tl.program_id(0) // 2
    row = at_chunk // chunks
    chunk = at_chunk % chunks
    group = tl.program_id(2)
    first = group * group_heads + tl.program_id(1) * head_block
    count = tl.minimum(head_block, (group + 1) * group_heads - first)
    token = chunk * BLOCK_Q
    q = tl.arange(0, BLOCK_Q)
    at_row = row.to(tl.int64) * heads * chunks * BLOCK_Q + token
    b_QN = load_tile(b, row, group, token, BLOCK_Q, BLOCK_N)
    c_QN = load_tile(c, row, group, token, BLOCK_Q, BLOCK_N)
    if tl.program_id(0) % 2 == 0:
        # Tiles are [j, i]: i the token of y, j < i that of v; a token's own pair has no decay, and is left to fp32.
        scores_QQ = tl.dot(b_QN, tl.trans(c_QN), input_precision="ieee")
        own_Q = tl.sum(tl.where(q[None, :] == q[:, None], scores_QQ, 0.0), axis=1)
        scores_QQ = tl.where(q[None, :] > q[:, None], scores_QQ, 0.0)
        dscores_QQ = tl.zeros((BLOCK_Q, BLOCK_Q), tl.float32)
        sixteen = tl.arange(0, 16)
        ones = tl.where(sixteen == 0, 1.0, tl.zeros((BLOCK_Q, 16), tl.float32)).to(v.dtype)
        for index in range(count):
            head = first + index
            at_head = at_row + head * chunks * BLOCK_Q
            v_QP = load_tile(v, row, head, token, BLOCK_Q, BLOCK_P)
            dy_QP = load_tile(dy, row, head, token, BLOCK_Q, BLOCK_P)
            dS_NP = load_tile(dstates, at_chunk, head, 0, BLOCK_N, BLOCK_P)
            s_Q = tl.load(logs + at_head + q)
            f_Q = tl.load(factors + at_head + q)
            total = tl.load(logs + at_head + BLOCK_Q - 1)
            dmixing_QQ = tl.dot(v_QP, tl.trans(dy_QP), input_precision="ieee")
            # A log above 0 is cut only where i < j, and there the scores are 0: no select in the loop.
            decay_QQ = tl.exp2(tl.minimum(s_Q[None, :] - s_Q[:, None], 0.0))
            mixing_QQ = (scores_QQ * decay_QQ).to(v.dtype)
            dmixing_QQ *= decay_QQ
            dscores_QQ += dmixing_QQ * f_Q[:, None]
            # Rounded once, so that the sums over rows and over columns see the same flow and leave nothing.
            flow_QQ = (dmixing_QQ * scores_QQ).to(v.dtype)
            f_16Q = tl.broadcast_to(f_Q.to(v.dtype)[None, :], (16, BLOCK_Q))
            column = tl.dot(flow_QQ, ones, input_precision="ieee")
            tl.store(column_sums + at_head + q, tl.sum(column, axis=1))
            rows_16Q = tl.dot(f_16Q, flow_QQ, input_precision="ieee")
            tl.store(row_sums + at_head + q[None, :] + sixteen[:, None] * 0, rows_16Q, mask=(sixteen == 0)[:, None])
            dx_QP = tl.dot(b_QN, dS_NP, input_precision="ieee") * tl.exp2(total - s_Q)[:, None]
            dx_QP = tl.dot(mixing_QQ, dy_QP, dx_QP, input_precision="ieee")
            own_weight_Q = tl.load(skip + head).to(tl.float32) + own_Q * f_Q
            dy32_QP = dy_QP.to(tl.float32)
            dv_QP = dx_QP * f_Q[:, None] + dy32_QP * own_weight_Q[:, None]
            store_tile(dv, row, head, token, dv_QP, BLOCK_Q, BLOCK_P)
        i = later_range(BLOCK_Q, count)
        dscores = tl.where(i[None, :] >= i[:, None], dscores_QQ, 0.0).to(b.dtype)
        db_QN = tl.dot(dscores, c_QN, input_precision="ieee")
        dc_QN = tl.trans(tl.dot(tl.trans(b_QN), dscores, input_precision="ieee"))
    else:
        if tl.program_id(1) == 0:
            own_Q = tl.sum(b_QN.to(tl.float32) * c_QN.to(tl.float32), axis=1)
            to = (row.to(tl.int64) * tokens + token + q) * groups + group
            tl.store(own_products + to, own_Q, mask=token + q < tokens)
        db_QN = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        dc_QN = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        n = tl.arange(0, BLOCK_N)
        for index in range(count):
            head = first + index
            at_head = at_row + head * chunks * BLOCK_Q
            s_Q = tl.load(logs + at_head + q)
            f_Q = tl.load(factors + at_head + q)
            total = tl.load(logs + at_head + BLOCK_Q - 1)
            to_end_Q = tl.exp2(total - s_Q)
            from_start_Q = tl.exp2(s_Q)
            # In this order, few tiles are in registers at a time.
            S_NP = load_tile(states, at_chunk, head, 0, BLOCK_N, BLOCK_P)
            dS_NP = load_tile(dstates, at_chunk, head, 0, BLOCK_N, BLOCK_P)
            through_N = tl.sum(S_NP.to(tl.float32) * dS_NP.to(tl.float32), axis=1)
            at_flow = (at_chunk.to(tl.int64) * heads + head) * N
            tl.store(end_flow + at_flow + n, tl.exp2(total) * through_N, mask=n < N)
            v_QP = load_tile(v, row, head, token, BLOCK_Q, BLOCK_P)
            left_QN = tl.dot(v_QP, tl.trans(dS_NP), input_precision="ieee")
            tl.store(column_sums_across + at_head + q, to_end_Q * tl.sum(left_QN * b_QN.to(tl.float32), axis=1))
            db_QN += left_QN * (f_Q * to_end_Q)[:, None]
            dy_QP = load_tile(dy, row, head, token, BLOCK_Q, BLOCK_P)
            skip_Q = tl.sum(v_QP.to(tl.float32) * dy_QP.to(tl.float32), axis=1)
            tl.store(skip_products + at_head + q, skip_Q)
            right_QN = tl.dot(dy_QP, tl.trans(S_NP), input_precision="ieee")
            tl.store(row_sums_across + at_head + q, from_start_Q * tl.sum(right_QN * c_QN.to(tl.float32), axis=1))
            dc_QN += right_QN * from_start_Q[:, None]
    i = later_range(BLOCK_Q, count)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    bc_parts += (tl.program_id(1) * 2 + tl.program_id(0) % 2).to(tl.int64) * 2 * part_size
    bc_parts += ((row.to(tl.int64) * tokens + token) * groups + group) * N
    inside = (token + i < tokens) & (n < N)
    tl.store(bc_parts + i * (groups * N) + n, db_QN, mask=inside)
    tl.store(bc_parts + part_size + i * (groups * N) + n, dc_QN, mask=inside)


@triton.jit
def decay_gradients_kernel(
    log_decay,
    factors,
    own_products,
    column_sums,
    column_sums_across,
    row_sums,
    row_sums_across,
    skip_products,
    end_flow,
    dlog_decay,
    dfactor,
    skip_parts,
    tokens,
    heads,
    chunks,
    groups,
    group_heads,
    decay_row,
    decay_token,
    decay_head,
    LOWEST: tl.constexpr,
    ROUNDED: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The sums over a chunk that make dlog_decay, dfactor and the chunk's part of dskip; [B, H, c Q] -> [B, L, H].

    ROUNDED: the type that the factors were rounded to in the sums over rows, as then they are here.
    """
    at_chunk = tl.program_id(0).to(tl.int64)
    row = at_chunk // chunks
    chunk = tl.program_id(0) % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    n = tl.arange(0, BLOCK_N)
    token = chunk * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = (token < tokens)[:, None] & (h < heads)[None, :]
    at_head = (row * heads + h[None, :]) * chunks * BLOCK_Q + token[:, None]
    f_QH = tl.load(factors + at_head, mask=inside, other=0.0)
    column_QH = tl.load(column_sums + at_head, mask=inside, other=0.0)
    across_QH = tl.load(column_sums_across + at_head, mask=inside, other=0.0)
    row_QH = tl.load(row_sums + at_head, mask=inside, other=0.0)
    row_across_QH = tl.load(row_sums_across + at_head, mask=inside, other=0.0)
    skip_QH = tl.load(skip_products + at_head, mask=inside, other=0.0)
    through_NH = tl.load(
        end_flow + (at_chunk * heads + h[None, :]) * N + n[:, None],
        mask=(n < N)[:, None] & (h < heads)[None, :],
        other=0.0,
    )
    a_QH = tl.load(
        log_decay + row * decay_row + token.to(tl.int64)[:, None] * decay_token + h[None, :] * decay_head,
        mask=inside,
        other=0.0,
    )
    outgoing_QH = f_QH * across_QH
    later_QH = tl.cumsum(row_across_QH + (row_QH - f_QH.to(ROUNDED).to(tl.float32) * column_QH), axis=0, reverse=True)
    earlier_QH = tl.cumsum(outgoing_QH, axis=0) - outgoing_QH
    da_QH = tl.where(a_QH < LOWEST, 0.0, later_QH + earlier_QH + tl.sum(through_NH, axis=0)[None, :])
    to = (row * tokens + token[:, None]) * heads + h[None, :]
    tl.store(dlog_decay + to, da_QH, mask=inside)
    own_QH = tl.load(
        own_products + (row * tokens + token[:, None]) * groups + (h // group_heads)[None, :], mask=inside, other=0.0
    )
    tl.store(dfactor + to, column_QH + across_QH + own_QH * skip_QH, mask=inside)
    tl.store(skip_parts + at_chunk * heads + h, tl.sum(skip_QH, axis=0), mask=h < heads)


@triton.jit
def part_sums_kernel(parts, sums, count, size, BLOCK: tl.constexpr):
    """Adds `count` parts of `size` elements in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(sums + at, total.to(sums.dtype.element_ty), mask=at < size)


# --- on the host ---------------------------------------------------------------------------------------------


def gradient_head_block(sizes: Sizes) -> int:
    """Heads whose parts of db and dc one program adds up; two programs share a chunk."""
    return block_heads(sizes, GRADIENT_PROGRAMS_WANTED // 2, MOST_HEAD_BLOCKS)


def gradients(
    v: Tensor,
    log_decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    logs: Tensor,
    factors: Tensor,
    states: Tensor,
    dy: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dv, dlog_decay, dfactor, db, dc, dskip)."""
    v_tiles, b_tiles, c_tiles, dy_tiles = (by_head(tensor, sizes) for tensor in (v, b, c, dy))
    dstates = state_gradients(c_tiles, dy_tiles, logs, factors, states, sizes)
    head_block = gradient_head_block(sizes)
    head_blocks = -(-sizes.heads // sizes.groups // head_block)
    dv = v.new_empty(v.shape)
    bc_parts = logs.new_empty(2 * head_blocks, 2, *b.shape)
    own_products = logs.new_empty(b.shape[:3])
    sums = [torch.empty_like(logs) for _ in range(5)]
    end_flow = logs.new_empty(sizes.rows, sizes.chunks, sizes.heads, sizes.states)
    chosen = launch.pinned(f"dendritic_scan_gradients/{type_class(sizes.dtype)}", v.device)
    gradients_kernel[(2 * sizes.rows * sizes.chunks, head_blocks, sizes.groups)](
        v_tiles,
        b_tiles,
        c_tiles,
        dy_tiles,
        by_head(dv, sizes),
        by_state(states),
        by_state(dstates),
        skip,
        logs,
        factors,
        bc_parts,
        own_products,
        *sums,
        end_flow,
        b.numel(),
        sizes.tokens,
        sizes.heads,
        sizes.chunks,
        sizes.groups,
        sizes.heads // sizes.groups,
        head_block,
        **sizes.blocks(),
        **chosen.options(),
    )
    db, dc = _sum_parts(bc_parts, sizes).unbind()
    dlog_decay, dfactor, skip_parts = _decay_gradients(log_decay, factors, [own_products, *sums, end_flow], sizes)
    return dv, dlog_decay, dfactor, db, dc, skip_parts.sum((0, 1))


def _sum_parts(parts: Tensor, sizes: Sizes) -> Tensor:
    """The sum over the first dimension, in the dtype of b and c."""
    sums = parts.new_empty(parts.shape[1:], dtype=sizes.dtype)
    chosen = launch.pinned(f"dendritic_scan_part_sums/{type_class(sizes.dtype)}", parts.device)
    grid = (triton.cdiv(sums.numel(), chosen.blocks["BLOCK"]),)
    part_sums_kernel[grid](parts, sums, parts.shape[0], sums.numel(), **chosen.options())
    return sums


def _decay_gradients(
    log_decay: Tensor, factors: Tensor, sums: list[Tensor], sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """(dlog_decay and dfactor [B, L, H], the chunks' parts of dskip [B, c, H])."""
    dlog_decay, dfactor = (factors.new_empty(log_decay.shape) for _ in range(2))
    skip_parts = factors.new_empty(sizes.rows, sizes.chunks, sizes.heads)
    chosen = launch.pinned(f"dendritic_scan_decay_gradients/{type_class(sizes.dtype)}", log_decay.device)
    decay_gradients_kernel[(sizes.rows * sizes.chunks, triton.cdiv(sizes.heads, chosen.blocks["BLOCK_H"]))](
        log_decay,
        factors,
        *sums,
        dlog_decay,
        dfactor,
        skip_parts,
        sizes.tokens,
        sizes.heads,
        sizes.chunks,
        sizes.groups,
        sizes.heads // sizes.groups,
        *log_decay.stride(),
        LOWEST=LOWEST_LOG,
        ROUNDED=TRITON_TYPES[sizes.dtype],
        N=sizes.states,
        BLOCK_N=tile(sizes.states),
        BLOCK_Q=sizes.chunk,
        **chosen.options(),
    )
    return dlog_decay, dfactor, skip_parts
