"""The dendritic scan in Triton: an autograd function with the contract of `dendritic_scan`.

PLACEHOLDER
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels import dendritic_scan_triton_backward as backward_kernels
from neuronspark.kernels import dendritic_scan_triton_forward as forward_kernels
from neuronspark.kernels.dendritic_scan_triton_forward import (
    LARGEST_COMPARTMENTS,
    LARGEST_STATES,
    Sizes,
    chunk_tokens,
    tile,
    type_class,
)
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.launch import CompileCase, Launch


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor, save: bool
    ) -> Tensor:
        sizes = Sizes(*v.shape, b.shape[3], b.shape[2], v.dtype)
        v, b, c = (_rows_of_channels(tensor) for tensor in (v, b, c))
        logs, factors = forward_kernels.sum_decays(log_decay, factor, sizes)
        y, states = forward_kernels.outputs(v, b, c, skip, logs, factors, sizes, save=save)
        if save:
            ctx.sizes = sizes
            ctx.save_for_backward(v, log_decay, b, c, skip, logs, factors, states)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = backward_kernels.gradients(*ctx.saved_tensors, _rows_of_channels(dy), ctx.sizes)
        return *found, None


def _rows_of_channels(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous; the others may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def dendritic_scan_triton(
    v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> Tensor:
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
    parts = _head_parts(v.shape[3])
    if parts == 1:
        inputs = (v, log_decay, factor, b, c, skip)
        return _Scan.apply(*inputs, torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
    narrow = (x.repeat_interleave(parts, -1) for x in (log_decay, factor, skip))
    log_decay, factor, skip = narrow
    by_part = v.unflatten(3, (parts, -1)).flatten(2, 3)
    return dendritic_scan_triton(by_part, log_decay, factor, b, c, skip).unflatten(2, (-1, parts)).flatten(3)


def _head_parts(compartments: int) -> int:
    """Parts of equal width that a head's compartments are split in; they share its decays, and do not mix."""
    return next(
        parts
        for parts in range(-(-compartments // LARGEST_COMPARTMENTS), compartments + 1)
        if compartments % parts == 0
    )


def compile_cases() -> Iterator[CompileCase]:
    """Every pinned kernel at the widths of the presets, in both classes of type."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        sizes = Sizes(4, 4096, 80, 64, 64, 1, dtype)
        blocks = {key: size for key, size in sizes.blocks().items()}
        # Strides, as a launch would specialise them: multiples of 16 that the compiler may rely on.
        strides = {
            f"{tensor}_{dimension}": stride
            for tensor, dimensions in _STRIDED.items()
            for dimension, stride in zip(dimensions, (1 << 20, 1 << 12, 64), strict=True)
        }
        types = {name_: kind.format(name) for name_, kind in _TYPES.items()}
        for kernel_name, kernel, constants in _kernels(blocks):
            arguments = set(kernel.arg_names)
            yield CompileCase(
                f"dendritic_scan_{kernel_name}/{type_class(dtype)}",
                kernel,
                {key: value for key, value in types.items() if key in arguments},
                {key: value for key, value in {**strides, **constants}.items() if key in arguments},
            )


def _kernels(blocks: dict[str, int]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, kernel, compile-time arguments) of every kernel in every use."""
    q = {"BLOCK_Q": blocks["BLOCK_Q"], "LOWEST": LOWEST_LOG}
    yield "decays", forward_kernels.sum_decays_kernel, q
    for reverse in (False, True):
        yield "states", forward_kernels.walk_states_kernel, {**blocks, "REVERSE": reverse, "TO_END": True}
    yield "states", forward_kernels.walk_states_kernel, {**blocks, "REVERSE": True, "TO_END": False}
    for save in (False, True):
        yield "outputs", forward_kernels.outputs_kernel, {**blocks, "SAVE": save}
    yield "gradients", backward_kernels.gradients_kernel, blocks
    yield "decay_gradients", backward_kernels.decay_gradients_kernel, q
    yield "part_sums", backward_kernels.part_sums_kernel, {}


_STRIDED = {
    tensor: ("row", "token", last)
    for tensor, last in (
        ("decay", "head"),
        ("factor", "head"),
        ("left", "group"),
        ("right", "head"),
        ("v", "head"),
        ("dy", "head"),
        ("b", "group"),
        ("c", "group"),
    )
}
_TYPES = {
    **dict.fromkeys(("v", "b", "c", "dy", "left", "right", "y", "dv", "entering", "states", "dstates", "sums"), "*{}"),
    **dict.fromkeys(("log_decay", "factor", "logs", "factors", "ends", "end_logs", "skip", "bc_parts"), "*fp32"),
    **dict.fromkeys(("column_sums", "column_sums_across", "row_sums", "row_sums_across", "end_flow", "skip_parts", "parts"), "*fp32"),
    **dict.fromkeys(("dlog_decay", "dfactor"), "*fp32"),
    **dict.fromkeys(("tokens", "heads", "chunks", "segments", "segment_chunks", "group_heads", "groups"), "i32"),
    **dict.fromkeys(("head_block", "part_size", "count", "size"), "i32"),
}
