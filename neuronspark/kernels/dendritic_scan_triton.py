"""The dendritic scan in Triton: an autograd function with the contract of `dendritic_scan`.

Forward. (1) A program walks over the chunks of one head's row with the state in registers, and writes the state that
enters each chunk. Where rows and heads are too few to fill a card (less than 256 walks), a row is cut in segments: a
first launch walks to every segment's end from a zero state, and the walks proper begin with the decayed sum of the ends
before theirs. (2) All chunks at once: a program takes one chunk and a block of its group's heads, makes the scores
C_i . B_j once, and of each head y by the masked product of `dendritic_scan` and the state. The states are what the
backward pass reads, and are saved for it as they are; without a backward pass they are given back. Sums of the decays
within a chunk, which every kernel reads, come from one small launch before ([B, H, tokens], fp32, to the base 2).

Backward. (1) A walk from the last chunk to the first writes the gradient of the state that leaves each chunk. (2) All
chunks at once: a program takes one chunk and a block of its group's heads. Pairs of tokens inside the chunk and pairs
through the states are two programs side by side, since the sums for db, dc and the scores of both do not fit in
registers; the second to read a tile finds it in the L2 cache. db and dc are sums over a block's heads in the order of
the heads; the blocks' parts are added up in their order (3). dskip is a part a chunk and head, added up by `sum`.
(4) The gradient of a_t is the flow of gradient over the edge before token t, the sum over tokens j < t <= i of
d log y_i / d log x_j. It is summed as such, from four terms none of which cancels another:

    sum_{i>=t} (row_i - column_i) inside the chunk, the same pairs in both, so that a pair on one side of t leaves
                                  nothing; a token's pair with itself is left out of both
  + sum_{i>=t} dy_i . (what the state gives y_i)  +  sum_{j<t} x_j . (what the state's gradient gives dx_j)
  + exp(s_Q) <dS', S>

Numbers. Products of 16-bit operands accumulate in fp32; a mixing weight exp(s_i - s_j) (C_i . B_j) f_j is rounded once.
A state is carried in fp32 by S + S expm1(s_Q), saved and used in products in the dtype of v. Nothing is added up by
atomics, no shape depends on data, and every order of summation follows from the shape and the pinned tiles alone.

Bytes, for bf16 at 4 x 4096 tokens, 80 heads, P = N = 64 (v: 168 MB): the floor is 355 MB forward (v, y, and 20 of the
rest) and 560 backward (v, dy, dv). Moved: forward 336 in (1) and 525 in (2); backward 336 in (1), 840 in (2) and 160 of
parts and sums. Held from the forward to the backward pass: the states, 168 MB (2 N P bytes a head and chunk; one walk
that also makes y moves less and is slower, for few programs then hide the latency of four products in a row).
Products: 43 GFLOP forward (32 as the model counts), 86 backward.

Tiles move by the tensor memory accelerator, which asks for 16-byte steps: widths that are not are padded with zeros.
Heads of more compartments than a tile has are split, since compartments do not mix. Triton 3.4 to 3.7.0 goes wrong on
Hopper where a transposed product is a register operand of the next (flash-linear-attention issue 640); no operand here
is one, tiles are computed in the orientation in which they are used. It also goes wrong where a state tile is narrower
than its states (`_least_compartments`): such heads are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels import dendritic_scan_triton_backward as backward_kernels
from neuronspark.kernels import dendritic_scan_triton_forward as forward_kernels
from neuronspark.kernels.dendritic_scan_triton_forward import (
    LARGEST_STATES,
    TRITON_TYPES,
    Sizes,
    largest_compartments,
    tile,
    type_class,
)
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.launch import CompileCase

ALIGNMENT_BYTES = 16
"""What the hardware that fetches tiles asks of every address and stride."""


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor, save: bool
    ) -> Tensor:
        rows, tokens, heads, compartments = v.shape
        sizes = Sizes(rows, tokens, heads, compartments, b.shape[3], b.shape[2], v.dtype)
        v, b, c, skip = *(_for_tiles(tensor) for tensor in (v, b, c)), skip.contiguous()
        logs, factors = forward_kernels.sum_decays(log_decay, factor, sizes)
        y, states = forward_kernels.outputs(v, b, c, skip, logs, factors, sizes)
        if save:
            ctx.sizes = sizes
            ctx.save_for_backward(v, log_decay, b, c, skip, logs, factors, states)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        v, log_decay, b, c, skip, logs, factors, states = ctx.saved_tensors
        dy = _for_tiles(dy)
        found = backward_kernels.gradients(v, log_decay, b, c, skip, logs, factors, states, dy, ctx.sizes)
        return *found, None


def _for_tiles(tensor_BLHW: Tensor) -> Tensor:
    """The tensor if tiles of it can be fetched as it lies (16-byte steps, channels side by side), else a copy."""
    unit = ALIGNMENT_BYTES // tensor_BLHW.element_size()
    steps = [stride for stride, size in zip(tensor_BLHW.stride()[:3], tensor_BLHW.shape[:3], strict=True) if size > 1]
    fits = tensor_BLHW.stride(3) == 1 and all(step > 0 and step % unit == 0 for step in steps)
    if fits and tensor_BLHW.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor_BLHW
    return tensor_BLHW.clone(memory_format=torch.contiguous_format)


def dendritic_scan_triton(v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """`dendritic_scan` by Triton kernels; same arguments, same meaning.

    ValueError for more than 128 states, or v, b and c of different or unknown types.
    """
    if not v.dtype == b.dtype == c.dtype or v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"dendritic scan: v, b and c are {v.dtype}, {b.dtype} and {c.dtype}: the kernels take one type for all "
            "three, bfloat16, float16 or float32"
        )
    if b.shape[3] > LARGEST_STATES:
        raise ValueError(
            f"dendritic scan: {b.shape[3]} states a compartment: the kernels take up to {LARGEST_STATES}; choose a "
            "smaller state_width, or set NEURONSPARK_KERNELS=reference"
        )
    unit = ALIGNMENT_BYTES // v.element_size()
    states, compartments = b.shape[3], v.shape[3]
    least = _least_compartments(states, v.dtype)
    if states % unit or compartments % unit or compartments < least:
        b, c = (functional.pad(tensor, (0, -states % unit)) for tensor in (b, c))
        v = functional.pad(v, (0, max(least - compartments, -compartments % unit)))
        return dendritic_scan_triton(v, log_decay, factor, b, c, skip)[..., :compartments]
    parts = _head_parts(compartments, unit, largest_compartments(v.dtype))
    if parts > 1:
        log_decay, factor, skip = (tensor.repeat_interleave(parts, -1) for tensor in (log_decay, factor, skip))
        by_part = v.unflatten(3, (parts, -1)).flatten(2, 3)
        return dendritic_scan_triton(by_part, log_decay, factor, b, c, skip).reshape(v.shape)
    inputs = (v, log_decay, factor, b, c, skip)
    return _Scan.apply(*inputs, torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))


def _least_compartments(states: int, dtype: torch.dtype) -> int:
    """The fewest compartments with which a head of so many states is computed rightly; 0 if any are.

    Products of 16-bit operands with a state tile of fewer compartments than states (P x N of 16 x 64, 32 x 64 or
    32 x 128) come out wrong on a Hopper GPU under Triton 3.6, in every launch configuration, or read where nothing is;
    tiles of 16 x 16, 32 x 32, 64 x 32, 64 x 64 and 64 x 128 are right.
    """
    return min(tile(states), largest_compartments(dtype)) if dtype.itemsize == 2 else 0


def _head_parts(compartments: int, unit: int, largest: int) -> int:
    """Parts of equal width that a head's compartments are split in; they share its decays, and do not mix."""
    units = compartments // unit
    return next(parts for parts in range(1, units + 1) if units % parts == 0 and compartments <= parts * largest)


def compile_cases() -> Iterator[CompileCase]:
    """Every pinned kernel at the widths of the presets, in both classes of type."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        sizes = Sizes(4, 4096, 80, largest_compartments(dtype), 64, 1, dtype)
        types: dict[str, str | int] = {
            **dict.fromkeys(_HEAD_TILES, f"tensordesc<{name}[1, 1, {sizes.chunk}, {tile(sizes.compartments)}]>"),
            **dict.fromkeys(_GROUP_TILES, f"tensordesc<{name}[1, 1, {sizes.chunk}, {tile(sizes.states)}]>"),
            **dict.fromkeys(
                _STATE_TILES, f"tensordesc<{name}[1, 1, {tile(sizes.states)}, {tile(sizes.compartments)}]>"
            ),
            **dict.fromkeys(_POINTERS, "*fp32"),
            "sums": f"*{name}",
        }
        for kernel_name, kernel, constants in _kernels(sizes):
            types |= _counts(sizes, kernel_name)
            yield CompileCase(
                f"dendritic_scan_{kernel_name}/{type_class(dtype)}",
                kernel,
                {key: types[key] for key in kernel.arg_names if key in types and key not in constants},
                {"LOWEST": LOWEST_LOG, **constants},
            )


def _kernels(sizes: Sizes) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, kernel, compile-time arguments) of every kernel in every use."""
    blocks = sizes.blocks()
    yield "decays", forward_kernels.sum_decays_kernel, blocks
    for reverse in (False, True):
        ends = {**blocks, "REVERSE": reverse, "TO_END": True, "entering": None}
        yield "states", forward_kernels.walk_states_kernel, ends
        yield "states", forward_kernels.walk_states_kernel, {**blocks, "REVERSE": reverse, "TO_END": False}
    yield "outputs", forward_kernels.outputs_kernel, {key: blocks[key] for key in ("BLOCK_Q", "BLOCK_N", "BLOCK_P")}
    yield "gradients", backward_kernels.gradients_kernel, blocks
    rounded = {"ROUNDED": TRITON_TYPES[sizes.dtype]}
    yield "decay_gradients", backward_kernels.decay_gradients_kernel, {**blocks, **rounded}
    yield "part_sums", backward_kernels.part_sums_kernel, {}


_HEAD_TILES = ("v", "dy", "right", "y", "dv")
_GROUP_TILES = ("b", "c", "left")
_STATE_TILES = ("entering", "states", "dstates")
_POINTERS = (
    *("log_decay", "factor", "logs", "factors", "ends", "end_logs", "skip", "bc_parts", "parts", "skip_parts"),
    *(
        "column_sums",
        "column_sums_across",
        "own_products",
        "row_sums",
        "row_sums_across",
        "skip_products",
        "end_flow",
        "dlog_decay",
        "dfactor",
    ),
)


def _counts(sizes: Sizes, name: str) -> dict[str, int]:
    """Every integer argument's value in a launch of the kernel `name`."""
    group_heads = sizes.heads // sizes.groups
    outputs_block = forward_kernels.block_heads(sizes, forward_kernels.OUTPUT_PROGRAMS_WANTED)
    gradients_block = backward_kernels.gradient_head_block(sizes)
    part_size = sizes.rows * sizes.tokens * sizes.groups * sizes.states
    strides = {"row": sizes.tokens * sizes.heads, "token": sizes.heads, "head": 1}
    return {
        "tokens": sizes.tokens,
        "heads": sizes.heads,
        "chunks": sizes.chunks,
        "segments": sizes.segments,
        "segment_chunks": sizes.segment_chunks,
        "groups": sizes.groups,
        "group_heads": group_heads,
        "head_block": outputs_block if name == "outputs" else gradients_block,
        "part_size": part_size,
        "size": 2 * part_size,
        "count": 2 * -(-group_heads // gradients_block),
        **{f"{tensor}_{step}": stride for tensor in ("decay", "factor") for step, stride in strides.items()},
    }
