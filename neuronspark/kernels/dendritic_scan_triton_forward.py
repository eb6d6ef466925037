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
from triton.tools.tensor_descriptor import TensorDescriptor

from neuronspark.kernels import launch
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.launch import ANY, Launch

LARGEST_STATES = 128
"""The largest N that the kernels take."""
WALKS_WANTED = 256
"""Rows are cut in segments until there are this many walks: about two a multiprocessor of a large card."""
OUTPUT_PROGRAMS_WANTED = 2048
"""A group's heads are split in blocks until there are this many programs: four waves of a large card."""
SMALLEST_SEGMENT_CHUNKS = 8
"""A segment of a row has at least this many chunks."""
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Triton's names of the types that the kernels take."""


def chunk_tokens(dtype: torch.dtype) -> int:
    """Q: what one instruction of the tensor cores takes; fp32 products do without, with both operands in registers."""
    return 64 if dtype.itemsize == 2 else 16


def largest_compartments(dtype: torch.dtype) -> int:
    """The largest P of a head in the kernels; wider heads are split, since compartments do not mix."""
    return chunk_tokens(dtype)


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


def block_heads(sizes: Sizes, programs: int, most: int | None = None) -> int:
    """Heads of a group that one program takes, for about so many programs over all chunks: a rule of the shape alone.

    A group is split in at most `most` blocks.
    """
    group_heads = sizes.heads // sizes.groups
    blocks = -(-programs // (sizes.rows * sizes.chunks * sizes.groups))
    return -(-group_heads // min(blocks, group_heads, most or group_heads))


def tile(width: int) -> int:
    """The side of a tile that holds `width` channels: a power of two, at least what a product needs."""
    return max(16, triton.next_power_of_2(width))


CANDIDATES = {
    "dendritic_scan_states/16-bit": [Launch({}, 4, 3), Launch({}, 4, 2), Launch({}, 4, 1)],
    # The products' results become operands in the loop: one stage, until a card has shown that its compiler does
    # more stages right. 168 registers let three programs share a multiprocessor.
    # 128 registers let four programs share a multiprocessor.
    "dendritic_scan_outputs/16-bit": [Launch({}, 4, 2, 128), Launch({}, 4, 3, 128), Launch({}, 4, 1, 128)],
}
"""Launch configurations for Hopper, the pinned one first."""
_PINNED = {
    "dendritic_scan_decays/16-bit": {ANY: Launch({"BLOCK_H": 16}, 4)},
    "dendritic_scan_decays/32-bit": {ANY: Launch({"BLOCK_H": 16}, 4)},
    # Blackwell's compiler does not pipeline a loop that stores tiles.
    "dendritic_scan_states/16-bit": {"sm_90": CANDIDATES["dendritic_scan_states/16-bit"][0], ANY: Launch({}, 4, 1)},
    "dendritic_scan_states/32-bit": {ANY: Launch({}, 8, 1)},
    "dendritic_scan_outputs/16-bit": {"sm_90": CANDIDATES["dendritic_scan_outputs/16-bit"][0], ANY: Launch({}, 4, 1)},
    "dendritic_scan_outputs/32-bit": {ANY: Launch({}, 8, 1)},
}
for _name, _launches in _PINNED.items():
    launch.register(_name, _launches)


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
def load_tile(tensor, outer, head, token, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile [ROWS, COLUMNS] of a tensor that `by_head` describes, from a token on; zeros outside the tensor."""
    return tl.reshape(tensor.load([outer, head, token, 0]), (ROWS, COLUMNS))


@triton.jit
def store_tile(tensor, outer, head, token, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the part of a tile that lies in the tensor, in the tensor's type."""
    tensor.store([outer, head, token, 0], tl.reshape(tile.to(tensor.dtype), (1, 1, ROWS, COLUMNS)))


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
    a_QH = tl.load(log_decay + row * decay_row + at * decay_token + h[None, :] * decay_head, mask=inside, other=0.0)
    f_QH = tl.load(factor + row * factor_row + at * factor_token + h[None, :] * factor_head, mask=inside, other=0.0)
    a_QH = tl.where(a_QH < LOWEST, LOWEST, a_QH)
    s_QH = tl.cumsum(a_QH * 1.4426950408889634, axis=0)
    to = (row * heads + h[None, :]) * chunks * BLOCK_Q + token[:, None]
    tl.store(logs + to, s_QH, mask=(h < heads)[None, :])
    tl.store(factors + to, f_QH, mask=(h < heads)[None, :])


@triton.jit
def state_from_other_segments(
    ends,
    end_logs,
    segment,
    segments,
    REVERSE: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The state with which a segment begins: the ends of those before it (REVERSE: after it), each decayed to here."""
    n = tl.arange(0, BLOCK_N)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    S_NP = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    others = segments - 1 - segment if REVERSE else segment
    for index in range(others):
        other = segments - 1 - index if REVERSE else index
        end_NP = tl.load(ends + other * (N * P) + n * P + p, mask=(n < N) & (p < P), other=0.0)
        S_NP += S_NP * expm1_of_log2(tl.load(end_logs + other)) + end_NP
    return S_NP


@triton.jit
def walk_states_kernel(
    left,
    right,
    logs,
    factors,
    ends,
    end_logs,
    entering,
    heads,
    chunks,
    segments,
    segment_chunks,
    group_heads,
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
    row = tl.program_id(2)
    segment = tl.program_id(1)
    if REVERSE and TO_END:
        segment += 1
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)
    group = head // group_heads
    q = tl.arange(0, BLOCK_Q)
    row_head = row.to(tl.int64) * heads + head
    logs += row_head * chunks * BLOCK_Q
    factors += row_head * chunks * BLOCK_Q
    ends += row_head * segments * (N * P)
    end_logs += row_head * segments
    if TO_END:
        S_NP = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    else:
        S_NP = state_from_other_segments(ends, end_logs, segment, segments, REVERSE, N, P, BLOCK_N, BLOCK_P)
    whole_log = 0.0
    for index in range(count):
        chunk = first + count - 1 - index if REVERSE else first + index
        left_QN = load_tile(left, row, group, chunk * BLOCK_Q, BLOCK_Q, BLOCK_N)
        right_QP = load_tile(right, row, head, chunk * BLOCK_Q, BLOCK_Q, BLOCK_P)
        s_Q = tl.load(logs + chunk * BLOCK_Q + q)
        total = tl.load(logs + chunk * BLOCK_Q + BLOCK_Q - 1)
        if not TO_END:
            store_tile(entering, row * chunks + chunk, head, 0, S_NP, BLOCK_N, BLOCK_P)
        if REVERSE:
            weight_Q = tl.exp2(s_Q)
        else:
            weight_Q = tl.exp2(total - s_Q) * tl.load(factors + chunk * BLOCK_Q + q)
        weighted_QP = (right_QP * weight_Q[:, None]).to(right.dtype)
        S_NP += S_NP * expm1_of_log2(total)
        S_NP = tl.dot(tl.trans(left_QN), weighted_QP, S_NP, input_precision="ieee")
        whole_log += total
    if TO_END:
        n = tl.arange(0, BLOCK_N)[:, None]
        p = tl.arange(0, BLOCK_P)[None, :]
        tl.store(ends + segment * (N * P) + n * P + p, S_NP, mask=(n < N) & (p < P))
        tl.store(end_logs + segment, whole_log)


@triton.jit
def outputs_kernel(
    v,
    b,
    c,
    y,
    entering,
    skip,
    logs,
    factors,
    heads,
    chunks,
    group_heads,
    head_block,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """y of one chunk over a block of its group's heads, from the states that enter it."""
    at_chunk = tl.program_id(0)
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
    scores_QQ = tl.dot(c_QN, tl.trans(b_QN), input_precision="ieee")
    scores_QQ = tl.where(q[:, None] >= q[None, :], scores_QQ, 0.0)
    for index in range(count):
        head = first + index
        at_head = at_row + head * chunks * BLOCK_Q
        v_QP = load_tile(v, row, head, token, BLOCK_Q, BLOCK_P)
        S_NP = load_tile(entering, at_chunk, head, 0, BLOCK_N, BLOCK_P)
        s_Q = tl.load(logs + at_head + q)
        f_Q = tl.load(factors + at_head + q)
        # A log above 0 is cut only where i < j, and there the scores are 0: no select in the loop.
        decay_QQ = tl.exp2(tl.minimum(s_Q[:, None] - s_Q[None, :], 0.0))
        mixing_QQ = (scores_QQ * (decay_QQ * f_Q[None, :])).to(v.dtype)
        y_QP = tl.dot(c_QN, S_NP, input_precision="ieee") * tl.exp2(s_Q)[:, None]
        y_QP = tl.dot(mixing_QQ, v_QP, y_QP, input_precision="ieee")
        y_QP += v_QP.to(tl.float32) * tl.load(skip + head).to(tl.float32)
        store_tile(y, row, head, token, y_QP, BLOCK_Q, BLOCK_P)


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


def by_head(tensor_BLHW: Tensor, sizes: Sizes) -> TensorDescriptor:
    """[B, L, H, W] (or groups for heads) as the kernels read and write it: tiles of a chunk of one head."""
    rows, tokens, heads, width = tensor_BLHW.shape
    strides = [tensor_BLHW.stride(dim) if tensor_BLHW.shape[dim] > 1 else width for dim in (0, 2, 1)]
    block = [1, 1, sizes.chunk, tile(width)]
    return TensorDescriptor(tensor_BLHW, [rows, heads, tokens, width], [*strides, 1], block)


def by_state(states: Tensor) -> TensorDescriptor:
    """States [B c, H, N, P] as the kernels read and write them: one state a tile."""
    return TensorDescriptor.from_tensor(states, [1, 1, tile(states.shape[2]), tile(states.shape[3])])


def segment_ends(
    left: TensorDescriptor, right: TensorDescriptor, logs: Tensor, factors: Tensor, sizes: Sizes, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Each segment's state from a zero one, [B, H, K, N, P], and its log2 decay, [B, H, K]; fp32.

    The segment that nothing follows (reverse: the first) is left unwritten; nobody reads it.
    """
    ends = logs.new_empty(sizes.rows, sizes.heads, sizes.segments, sizes.states, sizes.compartments)
    end_logs = logs.new_empty(sizes.rows, sizes.heads, sizes.segments)
    if sizes.segments > 1:
        _walk(left, right, logs, factors, ends, end_logs, None, sizes, reverse=reverse)
    return ends, end_logs


def state_gradients(
    c: TensorDescriptor, dy: TensorDescriptor, logs: Tensor, factors: Tensor, states: Tensor, sizes: Sizes
) -> Tensor:
    """The gradient of the state that leaves each chunk, like `states`."""
    ends, end_logs = segment_ends(c, dy, logs, factors, sizes, reverse=True)
    leaving = torch.empty_like(states)
    _walk(c, dy, logs, factors, ends, end_logs, by_state(leaving), sizes, reverse=True)
    return leaving


def _walk(
    left: TensorDescriptor,
    right: TensorDescriptor,
    logs: Tensor,
    factors: Tensor,
    ends: Tensor,
    end_logs: Tensor,
    entering: TensorDescriptor | None,
    sizes: Sizes,
    *,
    reverse: bool,
) -> None:
    """Write the state before each chunk to `entering`; without it, the segments' ends to `ends` and `end_logs`."""
    to_end = entering is None
    chosen = launch.pinned(f"dendritic_scan_states/{type_class(sizes.dtype)}", logs.device)
    walk_states_kernel[(sizes.heads, sizes.segments - to_end, sizes.rows)](
        left,
        right,
        logs,
        factors,
        ends,
        end_logs,
        entering,
        sizes.heads,
        sizes.chunks,
        sizes.segments,
        sizes.segment_chunks,
        sizes.heads // sizes.groups,
        REVERSE=reverse,
        TO_END=to_end,
        **sizes.blocks(),
        **chosen.options(),
    )


def outputs(
    v: Tensor, b: Tensor, c: Tensor, skip: Tensor, logs: Tensor, factors: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """(y, the states that enter the chunks [B c, H, N, P] in the dtype of v)."""
    v_tiles, b_tiles, c_tiles = (by_head(tensor, sizes) for tensor in (v, b, c))
    ends, end_logs = segment_ends(b_tiles, v_tiles, logs, factors, sizes, reverse=False)
    entering = v.new_empty(sizes.rows * sizes.chunks, sizes.heads, sizes.states, sizes.compartments)
    _walk(b_tiles, v_tiles, logs, factors, ends, end_logs, by_state(entering), sizes, reverse=False)
    y = v.new_empty(v.shape)
    head_block = block_heads(sizes, OUTPUT_PROGRAMS_WANTED)
    group_heads = sizes.heads // sizes.groups
    chosen = launch.pinned(f"dendritic_scan_outputs/{type_class(sizes.dtype)}", v.device)
    outputs_kernel[(sizes.rows * sizes.chunks, -(-group_heads // head_block), sizes.groups)](
        v_tiles,
        b_tiles,
        c_tiles,
        by_head(y, sizes),
        by_state(entering),
        skip,
        logs,
        factors,
        sizes.heads,
        sizes.chunks,
        group_heads,
        head_block,
        BLOCK_Q=sizes.chunk,
        BLOCK_N=tile(sizes.states),
        BLOCK_P=tile(sizes.compartments),
        **chosen.options(),
    )
    return y, entering
