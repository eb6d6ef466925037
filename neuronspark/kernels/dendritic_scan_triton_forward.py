# mypy: disable-error-code="no-untyped-def"
"""Forward kernels of the dendritic scan, and the walk over states that its backward shares.

`dendritic_scan_triton` holds the design. Logarithms are to the base 2 here, and run from a chunk's start.

Shapes: B rows, L tokens, c chunks, Q tokens a chunk, H heads, G groups, P compartments, N states, K segments of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.launch import ANY, Launch

LARGEST_STATES = 128
"""The largest N that the kernels take."""
LARGEST_COMPARTMENTS = 64
"""The largest P of a head in the kernels; wider heads are split, since compartments do not mix."""
WALKS_WANTED = 256
"""Rows are cut in segments until there are this many walks: about two a multiprocessor of a large card."""
SMALLEST_SEGMENT_CHUNKS = 8
"""A segment of a row has at least this many chunks."""


def chunk_tokens(dtype: torch.dtype) -> int:
    """Q: products of 64 x 64 tiles for tensor cores; fp32 products go without, and keep smaller tiles in registers."""
    return 64 if dtype.itemsize == 2 else 32


def type_class(dtype: torch.dtype) -> str:
    """The part of a launch configuration's name that says what the products multiply."""
    return f"{8 * dtype.itemsize}-bit"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one scan."""

    rows: int
    """B."""
    tokens: int
    """L, of a row."""
    heads: int
    """H."""
    compartments: int
    """P."""
    states: int
    """N."""
    groups: int
    """G."""
    dtype: torch.dtype
    """Of v, b and c, and of the products' operands."""

    @property
    def chunk(self) -> int:
        """Q."""
        return chunk_tokens(self.dtype)

    @property
    def chunks(self) -> int:
        """c, of a row; the last one may be filled up with empty tokens."""
        return -(-self.tokens // self.chunk)

    @property
    def segment_chunks(self) -> int:
        """Chunks of a segment, the part of a row that one program walks over: a rule of the shape alone."""
        wanted = -(-WALKS_WANTED // (self.rows * self.heads))
        most = max(1, self.chunks // SMALLEST_SEGMENT_CHUNKS)
        return -(-self.chunks // min(wanted, most))

    @property
    def segments(self) -> int:
        """K, of a row."""
        return -(-self.chunks // self.segment_chunks)

    def blocks(self) -> dict[str, Any]:
        """What the kernels take as compile-time arguments."""
        return {
            "N": self.states,
            "P": self.compartments,
            "BLOCK_Q": self.chunk,
            "BLOCK_N": tile(self.states),
            "BLOCK_P": tile(self.compartments),
        }


def tile(width: int) -> int:
    """The side of a tile that holds `width` channels: a power of two, at least what a product needs."""
    return max(16, triton.next_power_of_2(width))


def _pin(kernel: str, bits: str, chosen: Launch) -> str:
    return launch.register(f"dendritic_scan_{kernel}/{bits}", {ANY: chosen})


for _bits in ("16-bit", "32-bit"):
    _pin("decays", _bits, Launch({"BLOCK_H": 16}, num_warps=4))
    _pin("states", _bits, Launch({}, num_warps=4, num_stages=3 if _bits == "16-bit" else 1))
    _pin("outputs", _bits, Launch({}, num_warps=4))


# --- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def expm1_of_log2(log2_x):
    """2^log2_x - 1 for log2_x <= 0, to fp32's relative precision.

    A state that decays by S + S expm1(x) a chunk loses no more than rounding over thousands of chunks; a factor
    exp(x) itself, rounded near 1, would be off by up to 6e-8 the same way each time.
    """
    x = log2_x * 0.6931471805599453
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.25, series, tl.exp2(log2_x) - 1)


@triton.jit
def within(rows, columns, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a tile: `rows` [., 1], and the columns below COLUMNS where the tile is wider."""
    if COLUMNS == BLOCK:
        return rows
    else:
        return rows & (columns < COLUMNS)[None, :]


@triton.jit
def load_state(at, n, p, N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """A state [N, P] that lies contiguously at `at`; zeros in the rest of its tile."""
    pointers = at + n[:, None] * P + p[None, :]
    if N == BLOCK_N and P == BLOCK_P:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(n < N)[:, None] & (p < P)[None, :], other=0.0)


@triton.jit
def store_state(at, state, n, p, N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """Writes a state [N, P] contiguously at `at`, in the type kept there."""
    pointers = at + n[:, None] * P + p[None, :]
    if N == BLOCK_N and P == BLOCK_P:
        tl.store(pointers, state.to(at.dtype.element_ty))
    else:
        tl.store(pointers, state.to(at.dtype.element_ty), mask=(n < N)[:, None] & (p < P)[None, :])


@triton.jit
def sum_decays_kernel(
    log_decay,
    factor,
    logs,
    factors,
    tokens,
    heads,
    chunks,
    decay_row,
    decay_token,
    decay_head,
    factor_row,
    factor_token,
    factor_head,
    LOWEST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sums of the log decays from each chunk's start, and the factors, head by head: [B, L, H] -> [B, H, c Q]."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tl.arange(0, BLOCK_Q)
    token = chunk * BLOCK_Q + q
    inside = (token < tokens)[:, None] & (h < heads)[None, :]
    at = token.to(tl.int64)[:, None]
    a_QH = tl.load(
        log_decay + row * decay_row + at * decay_token + h[None, :] * decay_head, mask=inside, other=0.0
    )
    f_QH = tl.load(
        factor + row * factor_row + at * factor_token + h[None, :] * factor_head, mask=inside, other=0.0
    )
    a_QH = tl.where(a_QH < LOWEST, LOWEST, a_QH)
    s_QH = tl.cumsum(a_QH * 1.4426950408889634, axis=0)
    to = (row * heads + h[None, :]) * chunks * BLOCK_Q + token[:, None]
    tl.store(logs + to, s_QH, mask=(h < heads)[None, :])
    tl.store(factors + to, f_QH, mask=(h < heads)[None, :])


@triton.jit
def walk_states_kernel(
    left,
    right,
    logs,
    factors,
    ends,
    end_logs,
    entering,
    tokens,
    heads,
    chunks,
    segments,
    segment_chunks,
    group_heads,
    left_row,
    left_token,
    left_group,
    right_row,
    right_token,
    right_head,
    REVERSE: tl.constexpr,
    TO_END: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """S <- exp(s_Q) S + left^T (weight right) over the chunks of one segment of one head's row.

    Forward: left B, right v, weights f_j exp(s_Q - s_j). REVERSE: left C, right dy, weights exp(s_i), last chunk first.
    TO_END: from zero, and only the segment's last state and its whole log decay are written, to `ends` and `end_logs`.
    Otherwise from the other segments' ends, and the state before each chunk is written to `entering`.
    """
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    if REVERSE and TO_END:
        segment += 1
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)
    q = tl.arange(0, BLOCK_Q)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    left += row * left_row + (head // group_heads) * left_group
    right += row * right_row + head * right_head
    by_head = (row * heads + head) * chunks * BLOCK_Q
    logs += by_head
    factors += by_head
    ends += (row * heads + head) * segments * (N * P)
    end_logs += (row * heads + head) * segments

    S_NP = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    if not TO_END:
        others = segments - 1 - segment if REVERSE else segment
        for index in range(others):
            other = segments - 1 - index if REVERSE else index
            end_NP = load_state(ends + other * (N * P), n, p, N, P, BLOCK_N, BLOCK_P)
            S_NP += S_NP * expm1_of_log2(tl.load(end_logs + other)) + end_NP
    whole_log = 0.0
    for index in range(count):
        chunk = first + count - 1 - index if REVERSE else first + index
        if not TO_END:
            to = ((row * chunks + chunk) * heads + head) * (N * P)
            store_state(entering + to, S_NP, n, p, N, P, BLOCK_N, BLOCK_P)
        inside = (chunk * BLOCK_Q + q < tokens)[:, None]
        token = (chunk * BLOCK_Q).to(tl.int64)
        left_QN = tl.load(
            left + token * left_token + q[:, None] * left_token + n[None, :], mask=within(inside, n, N, BLOCK_N), other=0.0
        )
        right_QP = tl.load(
            right + token * right_token + q[:, None] * right_token + p[None, :],
            mask=within(inside, p, P, BLOCK_P),
            other=0.0,
        )
        s_Q = tl.load(logs + chunk * BLOCK_Q + q)
        total = tl.load(logs + chunk * BLOCK_Q + BLOCK_Q - 1)
        if REVERSE:
            weight_Q = tl.exp2(s_Q)
        else:
            weight_Q = tl.exp2(total - s_Q) * tl.load(factors + chunk * BLOCK_Q + q)
        weighted_QP = (right_QP * weight_Q[:, None]).to(right_QP.dtype)
        S_NP += S_NP * expm1_of_log2(total)
        S_NP = tl.dot(tl.trans(left_QN), weighted_QP, S_NP, input_precision="ieee")
        whole_log += total
    if TO_END:
        store_state(ends + segment * (N * P), S_NP, n, p, N, P, BLOCK_N, BLOCK_P)
        tl.store(end_logs + segment, whole_log)


@triton.jit
def outputs_kernel(
    v,
    b,
    c,
    skip,
    logs,
    factors,
    ends,
    end_logs,
    entering,
    y,
    tokens,
    heads,
    chunks,
    segments,
    segment_chunks,
    group_heads,
    v_row,
    v_token,
    v_head,
    b_row,
    b_token,
    b_group,
    c_row,
    c_token,
    c_group,
    SAVE: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """y over the chunks of one segment of one head's row, the state in registers; SAVE: writes it before each chunk."""
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)
    q = tl.arange(0, BLOCK_Q)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    v += row * v_row + head * v_head
    b += row * b_row + (head // group_heads) * b_group
    c += row * c_row + (head // group_heads) * c_group
    y += (row * tokens * heads + head) * P
    by_head = (row * heads + head) * chunks * BLOCK_Q
    logs += by_head
    factors += by_head
    ends += (row * heads + head) * segments * (N * P)
    end_logs += (row * heads + head) * segments
    skip_of_head = tl.load(skip + head).to(tl.float32)

    S_NP = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    for other in range(segment):
        end_NP = load_state(ends + other * (N * P), n, p, N, P, BLOCK_N, BLOCK_P)
        S_NP += S_NP * expm1_of_log2(tl.load(end_logs + other)) + end_NP
    for index in range(count):
        chunk = first + index
        token = (chunk * BLOCK_Q).to(tl.int64)
        inside = (chunk * BLOCK_Q + q < tokens)[:, None]
        inside_P = within(inside, p, P, BLOCK_P)
        inside_N = within(inside, n, N, BLOCK_N)
        v_QP = tl.load(v + token * v_token + q[:, None] * v_token + p[None, :], mask=inside_P, other=0.0)
        b_QN = tl.load(b + token * b_token + q[:, None] * b_token + n[None, :], mask=inside_N, other=0.0)
        c_QN = tl.load(c + token * c_token + q[:, None] * c_token + n[None, :], mask=inside_N, other=0.0)
        s_Q = tl.load(logs + chunk * BLOCK_Q + q)
        f_Q = tl.load(factors + chunk * BLOCK_Q + q)
        total = tl.load(logs + chunk * BLOCK_Q + BLOCK_Q - 1)
        state_NP = S_NP.to(v_QP.dtype)
        if SAVE:
            to = ((row * chunks + chunk) * heads + head) * (N * P)
            store_state(entering + to, state_NP, n, p, N, P, BLOCK_N, BLOCK_P)

        scores_QQ = tl.dot(c_QN, tl.trans(b_QN), input_precision="ieee")
        log_QQ = tl.where(q[:, None] >= q[None, :], s_Q[:, None] - s_Q[None, :], -float("inf"))
        mixing_QQ = (scores_QQ * (tl.exp2(log_QQ) * f_Q[None, :])).to(v_QP.dtype)
        y_QP = tl.dot(c_QN, state_NP, input_precision="ieee") * tl.exp2(s_Q)[:, None]
        y_QP = tl.dot(mixing_QQ, v_QP, y_QP, input_precision="ieee")
        y_QP += v_QP * skip_of_head
        at = q[:, None] * (heads * P) + p[None, :]
        tl.store(y + token * heads * P + at, y_QP.to(y.dtype.element_ty), mask=inside_P)

        weighted_QP = (v_QP * (f_Q * tl.exp2(total - s_Q))[:, None]).to(v_QP.dtype)
        S_NP += S_NP * expm1_of_log2(total)
        S_NP = tl.dot(tl.trans(b_QN), weighted_QP, S_NP, input_precision="ieee")


# --- on the host ---------------------------------------------------------------------------------------------


def sum_decays(log_decay: Tensor, factor: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(log2 decay since the chunk's start, factor), each [B, H, c Q] fp32, no input after a row's last token."""
    logs = log_decay.new_empty(sizes.rows, sizes.heads, sizes.chunks * sizes.chunk, dtype=torch.float32)
    factors = torch.empty_like(logs)
    chosen = launch.pinned(f"dendritic_scan_decays/{type_class(sizes.dtype)}", log_decay.device)
    grid = (sizes.rows * sizes.chunks, triton.cdiv(sizes.heads, chosen.blocks["BLOCK_H"]))
    sum_decays_kernel[grid](
        log_decay,
        factor,
        logs,
        factors,
        sizes.tokens,
        sizes.heads,
        sizes.chunks,
        *log_decay.stride(),
        *factor.stride(),
        LOWEST=LOWEST_LOG,
        BLOCK_Q=sizes.chunk,
        **chosen.options(),
    )
    return logs, factors


def segment_ends(
    left: Tensor, right: Tensor, logs: Tensor, factors: Tensor, sizes: Sizes, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Each segment's state from a zero one, [B, H, K, N, P], and its log2 decay, [B, H, K]; fp32.

    The segment that nothing follows (reverse: the first) is left unwritten; nobody reads it.
    """
    ends = logs.new_empty(sizes.rows, sizes.heads, sizes.segments, sizes.states, sizes.compartments)
    end_logs = logs.new_empty(sizes.rows, sizes.heads, sizes.segments)
    if sizes.segments > 1:
        _walk(left, right, logs, factors, ends, end_logs, ends, sizes, reverse=reverse, to_end=True)
    return ends, end_logs


def state_gradients(c: Tensor, dy: Tensor, logs: Tensor, factors: Tensor, sizes: Sizes) -> Tensor:
    """The gradient of the state that leaves each chunk, [B, c, H, N, P], in the dtype of v."""
    ends, end_logs = segment_ends(c, dy, logs, factors, sizes, reverse=True)
    leaving = states_like(dy, sizes)
    _walk(c, dy, logs, factors, ends, end_logs, leaving, sizes, reverse=True, to_end=False)
    return leaving


def states_like(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Room for a state a chunk and head."""
    return tensor.new_empty(sizes.rows, sizes.chunks, sizes.heads, sizes.states, sizes.compartments)


def _walk(
    left: Tensor,
    right: Tensor,
    logs: Tensor,
    factors: Tensor,
    ends: Tensor,
    end_logs: Tensor,
    entering: Tensor,
    sizes: Sizes,
    *,
    reverse: bool,
    to_end: bool,
) -> None:
    chosen = launch.pinned(f"dendritic_scan_states/{type_class(sizes.dtype)}", left.device)
    walk_states_kernel[(sizes.heads, sizes.segments - to_end, sizes.rows)](
        left,
        right,
        logs,
        factors,
        ends,
        end_logs,
        entering,
        sizes.tokens,
        sizes.heads,
        sizes.chunks,
        sizes.segments,
        sizes.segment_chunks,
        sizes.heads // sizes.groups,
        *left.stride()[:3],
        *right.stride()[:3],
        REVERSE=reverse,
        TO_END=to_end,
        **sizes.blocks(),
        **chosen.options(),
    )


def outputs(
    v: Tensor, b: Tensor, c: Tensor, skip: Tensor, logs: Tensor, factors: Tensor, sizes: Sizes, *, save: bool
) -> tuple[Tensor, Tensor]:
    """(y, the state that enters each chunk [B, c, H, N, P] in the dtype of v; empty unless `save`)."""
    ends, end_logs = segment_ends(b, v, logs, factors, sizes, reverse=False)
    y = v.new_empty(v.shape)
    entering = states_like(v, sizes) if save else v.new_empty(0)
    chosen = launch.pinned(f"dendritic_scan_outputs/{type_class(sizes.dtype)}", v.device)
    outputs_kernel[(sizes.heads, sizes.segments, sizes.rows)](
        v,
        b,
        c,
        skip,
        logs,
        factors,
        ends,
        end_logs,
        entering,
        y,
        sizes.tokens,
        sizes.heads,
        sizes.chunks,
        sizes.segments,
        sizes.segment_chunks,
        sizes.heads // sizes.groups,
        *v.stride()[:3],
        *b.stride()[:3],
        *c.stride()[:3],
        SAVE=save,
        **sizes.blocks(),
        **chosen.options(),
    )
    return y, entering
