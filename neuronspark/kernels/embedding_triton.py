"""The embedding's gradient, added row by row to the tied fp32 gradient: no table-sized buffer, no atomics.

The tokens are sorted, stably and as 32-bit numbers, so that a table row's gradients form a run of places, in the order
of their positions. Windows of WINDOW places cut the runs into pieces: a place that is the first of its run or of its
window begins a piece. First pass, a program for each place (and block of columns): it stops unless its place begins a
piece; else it sums the piece's rows of dy in fp32, in order. A piece that is a whole run is added to the table's row
there and then, by the only program that touches that row. Second pass, a program for each window: if a run begins in
it and goes beyond, the program adds up that run's pieces, which the first pass left in a buffer, and adds their sum to
the table's row. A window leaves at most two pieces there (one that comes from before, one that goes on).

So a row that every token shares costs T / WINDOW programs of WINDOW rows and one that adds T / WINDOW pieces, and
distinct tokens cost one row each. Grids and shapes depend on T, V and d alone: nothing is read back by the host, and a
CUDA graph can hold it. The order of every sum is fixed by the tokens and by WINDOW, ROWS and PIECES. Bytes: dy once,
each touched row of the gradient read and written once, and the sort (T keys of 4 bytes: little beside them).
Shapes: T tokens, V table rows, d channels.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, CompileCase, Launch

WINDOW = 64
"""Places of sorted tokens to a window."""


def _sum_launch(rows: int, columns: int, warps: int) -> Launch:
    return Launch({"WINDOW": WINDOW, "ROWS": rows, "BLOCK_D": columns}, num_warps=warps)


SUM_PIECES = launch.register("embedding_gradient/pieces", {ANY: _sum_launch(4, 1024, 4)})
COMBINE = launch.register(
    "embedding_gradient/combine", {ANY: Launch({"WINDOW": WINDOW, "PIECES": 16, "BLOCK_D": 128}, num_warps=4)}
)
CANDIDATES = {
    SUM_PIECES: [_sum_launch(4, 1024, 4), _sum_launch(2, 2048, 4), _sum_launch(8, 512, 4), _sum_launch(2, 4096, 8)],
    COMBINE: [
        Launch({"WINDOW": WINDOW, "PIECES": 16, "BLOCK_D": 128}, num_warps=4),
        Launch({"WINDOW": WINDOW, "PIECES": 32, "BLOCK_D": 64}, num_warps=4),
        Launch({"WINDOW": WINDOW, "PIECES": 8, "BLOCK_D": 256}, num_warps=4),
    ],
}
"""Configurations to time for each pinned one."""


@triton.jit
def _add_to_row(table_ptr, token, table_stride, d, inside, added):
    row = table_ptr + token.to(tl.int64) * table_stride + d
    held = tl.load(row, mask=inside, other=0.0)
    tl.store(row, (held.to(tl.float32) + added).to(held.dtype), mask=inside)


@triton.jit
def _sum_pieces_kernel(
    table_ptr,
    pieces_ptr,
    dy_ptr,
    sorted_ptr,
    order_ptr,
    tokens_T,
    width,
    table_stride,
    dy_stride,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < width
    token = tl.load(sorted_ptr + place)
    opens_run = tl.load(sorted_ptr + place - 1, mask=place > 0, other=-1) != token
    if opens_run | (place % WINDOW == 0):
        places = place + tl.arange(0, WINDOW)
        here = places < tl.minimum(place // WINDOW * WINDOW + WINDOW, tokens_T)
        count = tl.sum((tl.load(sorted_ptr + places, mask=here, other=-1) == token).to(tl.int32), 0)
        end = place + count
        closes_run = tl.load(sorted_ptr + end, mask=end < tokens_T, other=-1) != token
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for first in range(place, end, ROWS):
            rows = first + tl.arange(0, ROWS)
            position = tl.load(order_ptr + rows, mask=rows < end, other=0)
            dy = dy_ptr + position[:, None].to(tl.int64) * dy_stride + d[None, :]
            dy_RD = tl.load(dy, mask=(rows < end)[:, None] & inside[None, :], other=0.0)
            total += tl.sum(dy_RD.to(tl.float32), 0)
        if opens_run & closes_run:
            _add_to_row(table_ptr, token, table_stride, d, inside, total)
        else:
            piece = 2 * (place // WINDOW) + (place % WINDOW != 0).to(tl.int32)
            tl.store(pieces_ptr + piece.to(tl.int64) * width + d, total, mask=inside)


@triton.jit
def _combine_kernel(
    table_ptr,
    pieces_ptr,
    sorted_ptr,
    tokens_T,
    width,
    table_stride,
    WINDOW: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    window = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < width
    first = window * WINDOW
    end = first + WINDOW
    token = tl.load(sorted_ptr + tl.minimum(end, tokens_T) - 1)
    goes_on = tl.load(sorted_ptr + end, mask=end < tokens_T, other=-1) == token
    comes_from_before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1) == token
    if goes_on & (comes_from_before == 0):
        # Its first piece began at the window's first place, or later.
        later = (tl.load(sorted_ptr + first) != token).to(tl.int32)
        total = tl.load(pieces_ptr + (2 * window + later).to(tl.int64) * width + d, mask=inside, other=0.0)
        more = goes_on
        next_window = window + 1
        while more:
            windows = next_window + tl.arange(0, PIECES)
            ours = tl.load(sorted_ptr + windows * WINDOW, mask=windows * WINDOW < tokens_T, other=-1) == token
            piece = pieces_ptr + (2 * windows)[:, None].to(tl.int64) * width + d[None, :]
            total += tl.sum(tl.load(piece, mask=ours[:, None] & inside[None, :], other=0.0), 0)
            more = tl.sum(ours.to(tl.int32), 0) == PIECES
            next_window += PIECES
        _add_to_row(table_ptr, token, table_stride, d, inside, total)


def add_rows_triton(table_Vd: Tensor, tokens_T: Tensor, dy_Td: Tensor) -> None:
    """table[tokens[t]] += dy[t] for every t, summed in fp32 and rounded once; the table's rows are contiguous."""
    tokens, width = dy_Td.shape
    dy_Td = dy_Td if dy_Td.stride(1) == 1 else dy_Td.contiguous()
    sorted_T, order_T = torch.sort(tokens_T.to(torch.int32), stable=True)
    sums = launch.pinned(SUM_PIECES, dy_Td.device)
    combine = launch.pinned(COMBINE, dy_Td.device)
    windows = triton.cdiv(tokens, WINDOW)
    pieces = torch.empty(2 * windows, width, dtype=torch.float32, device=dy_Td.device)
    _sum_pieces_kernel[(tokens, triton.cdiv(width, sums.blocks["BLOCK_D"]))](
        table_Vd,
        pieces,
        dy_Td,
        sorted_T,
        order_T,
        tokens,
        width,
        table_Vd.stride(0),
        dy_Td.stride(0),
        **sums.options(),
    )
    _combine_kernel[(windows, triton.cdiv(width, combine.blocks["BLOCK_D"]))](
        table_Vd, pieces, sorted_T, tokens, width, table_Vd.stride(0), **combine.options()
    )


def compile_cases() -> list[CompileCase]:
    """Both passes, for a bf16 gradient that goes into an fp32 table."""
    scalars = {"tokens_T": 16384, "table_stride": 2560, "dy_stride": 2560}
    pointers = {"table_ptr": "*fp32", "pieces_ptr": "*fp32", "sorted_ptr": "*i32"}
    sums: dict[str, str | int] = {**pointers, "dy_ptr": "*bf16", "order_ptr": "*i64", **scalars}
    combine: dict[str, str | int] = {**pointers, "tokens_T": 16384, "table_stride": 2560}
    return [
        CompileCase(SUM_PIECES, _sum_pieces_kernel, sums, {"width": 2560}),
        CompileCase(COMBINE, _combine_kernel, combine, {"width": 2560}),
    ]
