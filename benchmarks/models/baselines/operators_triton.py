"""The baselines' operators in Triton: one pass over memory each way, as a baseline that is to be taken seriously needs.

Bytes are what they cost. The convolution's backward forms each sum s_t again for every token that had a part in it, k
times in all, instead of writing it down: what it reads for that is in the first-level cache. The gradients of its
weights are summed by each program over its tokens, then over programs (kernels/partial_sums_triton.py): no atomics, the
same bits each time.

Shapes: B rows, L tokens, T = B L, h heads of d channels, C channels, k taps, P programs.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, CompileCase, Launch
from neuronspark.kernels.partial_sums_triton import sum_partials


def _tiles(tokens: int, channels: int, programs_per_sm: int, warps: int = 4) -> Launch:
    return Launch({"BLOCK_T": tokens, "BLOCK_C": channels, "PROGRAMS": 132 * programs_per_sm}, num_warps=warps)


PRODUCT_FORWARD = launch.register("baseline_silu_product_forward", {ANY: Launch({"BLOCK": 2048}, num_warps=4)})
PRODUCT_BACKWARD = launch.register("baseline_silu_product_backward", {ANY: Launch({"BLOCK": 1024}, num_warps=4)})
TURN = launch.register("baseline_turn", {ANY: Launch({"BLOCK_T": 2, "BLOCK_P": 512}, num_warps=4)})
CONVOLUTION_FORWARD = launch.register("baseline_convolution_forward", {ANY: _tiles(8, 128, 8)})
CONVOLUTION_BACKWARD = launch.register("baseline_convolution_backward", {ANY: _tiles(8, 128, 3)})


@triton.jit
def _silu(x):
    """(silu(x), its derivative)."""
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1.0 - sigmoid)


# --- silu(gate) * x ------------------------------------------------------------------------------------------------


@triton.jit
def _product_forward_kernel(gate_ptr, x_ptr, y_ptr, elements, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    owned = i < elements
    silu, _ = _silu(tl.load(gate_ptr + i, mask=owned, other=0.0).to(tl.float32))
    x = tl.load(x_ptr + i, mask=owned, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, silu * x, mask=owned)


@triton.jit
def _product_backward_kernel(gate_ptr, x_ptr, dy_ptr, dgate_ptr, dx_ptr, elements, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    owned = i < elements
    silu, slope = _silu(tl.load(gate_ptr + i, mask=owned, other=0.0).to(tl.float32))
    x = tl.load(x_ptr + i, mask=owned, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=owned, other=0.0).to(tl.float32)
    tl.store(dgate_ptr + i, dy * x * slope, mask=owned)
    tl.store(dx_ptr + i, dy * silu, mask=owned)


def silu_product_forward(gate_TC: Tensor, x_TC: Tensor) -> Tensor:
    """silu(gate) * x."""
    gate_TC, x_TC = gate_TC.contiguous(), x_TC.contiguous()
    y_TC = torch.empty_like(x_TC)
    config = launch.pinned(PRODUCT_FORWARD, x_TC.device)
    grid = (triton.cdiv(x_TC.numel(), config.blocks["BLOCK"]),)
    _product_forward_kernel[grid](gate_TC, x_TC, y_TC, x_TC.numel(), **config.options())
    return y_TC


def silu_product_backward(gate_TC: Tensor, x_TC: Tensor, dy_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and x."""
    gate_TC, x_TC, dy_TC = gate_TC.contiguous(), x_TC.contiguous(), dy_TC.contiguous()
    dgate_TC, dx_TC = torch.empty_like(gate_TC), torch.empty_like(x_TC)
    config = launch.pinned(PRODUCT_BACKWARD, x_TC.device)
    grid = (triton.cdiv(x_TC.numel(), config.blocks["BLOCK"]),)
    _product_backward_kernel[grid](gate_TC, x_TC, dy_TC, dgate_TC, dx_TC, x_TC.numel(), **config.options())
    return dgate_TC, dx_TC


# --- rotary embedding ------------------------------------------------------------------------------------------------


@triton.jit
def _turn_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    tokens_T,
    row_tokens,
    PAIRS: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    SIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A program turns some pairs of some tokens; PAIRS a token, HEAD_PAIRS a head."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    owned = (t < tokens_T) & (p < PAIRS)
    pair = p % HEAD_PAIRS
    angle = (t % row_tokens) * HEAD_PAIRS + pair
    cos = tl.load(cos_ptr + angle, mask=owned, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=owned, other=0.0) * SIGN
    place = t.to(tl.int64) * (2 * PAIRS) + (p // HEAD_PAIRS) * (2 * HEAD_PAIRS) + pair
    first = tl.load(x_ptr + place, mask=owned, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + HEAD_PAIRS, mask=owned, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, first * cos - second * sin, mask=owned)
    tl.store(y_ptr + place + HEAD_PAIRS, second * cos + first * sin, mask=owned)


def turn(x_BLhd: Tensor, table: Tensor, forwards: bool) -> Tensor:
    """Every pair turned by its angle, or back; `table` is rotary.rotary_table's, in fp32."""
    rows, row_tokens, heads, width = x_BLhd.shape
    x_BLhd = x_BLhd.contiguous()
    y_BLhd = torch.empty_like(x_BLhd)
    config = launch.pinned(TURN, x_BLhd.device)
    pairs, tokens = heads * width // 2, rows * row_tokens
    grid = (triton.cdiv(tokens, config.blocks["BLOCK_T"]), triton.cdiv(pairs, config.blocks["BLOCK_P"]))
    sign = 1.0 if forwards else -1.0
    _turn_kernel[grid](
        x_BLhd, table[0], table[1], y_BLhd, tokens, row_tokens, pairs, width // 2, sign, **config.options()
    )
    return y_BLhd


# --- the short convolution -------------------------------------------------------------------------------------------


@triton.jit
def _sums(x_ptr, weight_ptr, bias, token, position, c, owned, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """bias + sum_j w_j x_{t - (k - 1 - j)} of the tokens at `token`, which lie at `position` in their rows."""
    total = tl.zeros(owned.shape, dtype=tl.float32) + bias
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        weight = tl.load(weight_ptr + c * TAPS + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + (token - back) * CHANNELS + c, mask=owned & (position >= back), other=0.0)
        total += weight * x.to(tl.float32)
    return total


@triton.jit
def _convolution_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    tokens_T,
    row_tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WITH_SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    bias = tl.load(bias_ptr + c, mask=c < CHANNELS, other=0.0)
    for first in range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)[:, None]
        owned = (t < tokens_T) & (c < CHANNELS)
        token = t.to(tl.int64)
        sums = _sums(x_ptr, weight_ptr, bias, token, t % row_tokens, c, owned, CHANNELS, TAPS)
        if WITH_SILU:
            sums, _ = _silu(sums)
        tl.store(y_ptr + token * CHANNELS + c, sums, mask=owned)


@triton.jit
def _convolution_backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    dy_ptr,
    dx_ptr,
    partials_ptr,
    tokens_T,
    row_tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WITH_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dx, and one program's sums of the gradients of the taps and, in row TAPS, of the bias; ROWS is above TAPS."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    bias = tl.load(bias_ptr + c, mask=c < CHANNELS, other=0.0)
    totals = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    for first in range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)[:, None]
        position = t % row_tokens
        dx = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
        for ahead in tl.static_range(TAPS):
            owned = (t < tokens_T) & (c < CHANNELS) & (position + ahead < row_tokens)
            token = t.to(tl.int64) + ahead
            ds = tl.load(dy_ptr + token * CHANNELS + c, mask=owned, other=0.0).to(tl.float32)
            if WITH_SILU:
                sums = _sums(x_ptr, weight_ptr, bias, token, position + ahead, c, owned, CHANNELS, TAPS)
                _, slope = _silu(sums)
                ds *= slope
            weight = tl.load(weight_ptr + c * TAPS + (TAPS - 1 - ahead), mask=c < CHANNELS, other=0.0)
            dx += weight.to(tl.float32) * ds
            if ahead == 0:
                for tap in tl.static_range(TAPS):
                    back = TAPS - 1 - tap
                    x = tl.load(x_ptr + (token - back) * CHANNELS + c, mask=owned & (position >= back), other=0.0)
                    totals += tl.where(row == tap, tl.sum(x.to(tl.float32) * ds, 0)[None, :], 0.0)
                totals += tl.where(row == TAPS, tl.sum(ds, 0)[None, :], 0.0)
        tl.store(dx_ptr + t.to(tl.int64) * CHANNELS + c, dx, mask=(t < tokens_T) & (c < CHANNELS))
    place = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHANNELS + c
    tl.store(partials_ptr + place, totals, mask=(row <= TAPS) & (c < CHANNELS))


def _programs(config: Launch, tokens: int, channels: int) -> tuple[dict[str, int], tuple[int, int]]:
    """(the launch's other options, the grid): PROGRAMS in all, but never one without tokens."""
    options = config.options()
    wanted, blocks_C = options.pop("PROGRAMS"), triton.cdiv(channels, options["BLOCK_C"])
    blocks_T = triton.cdiv(tokens, options["BLOCK_T"])
    return options, (blocks_C, max(1, min(blocks_T, wanted // blocks_C)))


def convolution_forward(x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor, with_silu: bool) -> Tensor:
    """The causal convolution, or its silu."""
    rows, row_tokens, channels = x_BLC.shape
    x_BLC, weight_Ck = x_BLC.contiguous(), weight_Ck.contiguous()
    y_BLC = torch.empty_like(x_BLC)
    tokens = rows * row_tokens
    options, grid = _programs(launch.pinned(CONVOLUTION_FORWARD, x_BLC.device), tokens, channels)
    _convolution_forward_kernel[grid](
        x_BLC, weight_Ck, bias_C, y_BLC, tokens, row_tokens, channels, weight_Ck.shape[1], with_silu, **options
    )
    return y_BLC


def convolution_backward(
    x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor, dy_BLC: Tensor, with_silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in its dtype, and of weight [C, k] and bias [C], in fp32."""
    (rows, row_tokens, channels), taps = x_BLC.shape, weight_Ck.shape[1]
    x_BLC, weight_Ck, dy_BLC = x_BLC.contiguous(), weight_Ck.contiguous(), dy_BLC.contiguous()
    dx_BLC = torch.empty_like(x_BLC)
    tokens = rows * row_tokens
    options, grid = _programs(launch.pinned(CONVOLUTION_BACKWARD, x_BLC.device), tokens, channels)
    partials = torch.empty(taps + 1, grid[1], channels, dtype=torch.float32, device=x_BLC.device)
    _convolution_backward_kernel[grid](
        x_BLC,
        weight_Ck,
        bias_C,
        dy_BLC,
        dx_BLC,
        partials,
        tokens,
        row_tokens,
        channels,
        taps,
        with_silu,
        triton.next_power_of_2(taps + 1),
        **options,
    )
    sums = sum_partials(partials)
    return dx_BLC, sums[:taps].t().contiguous(), sums[taps]


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel at the widths of the 2B presets, in bf16."""
    pointers = {f"{name}_ptr": "*bf16" for name in ("gate", "x", "y", "dy", "dgate", "dx", "weight")}
    pointers |= {f"{name}_ptr": "*fp32" for name in ("cos", "sin", "bias", "partials")}
    types = {**pointers, "elements": "i32", "tokens_T": "i32", "row_tokens": "i32"}
    convolution = {"CHANNELS": 5376, "TAPS": 4, "WITH_SILU": True}
    for name, kernel, constants in (
        (PRODUCT_FORWARD, _product_forward_kernel, {}),
        (PRODUCT_BACKWARD, _product_backward_kernel, {}),
        (TURN, _turn_kernel, {"PAIRS": 1280, "HEAD_PAIRS": 64, "SIGN": 1.0}),
        (CONVOLUTION_FORWARD, _convolution_forward_kernel, convolution),
        (CONVOLUTION_BACKWARD, _convolution_backward_kernel, {**convolution, "ROWS": 8}),
    ):
        yield CompileCase(name, kernel, {n: t for n, t in types.items() if n in kernel.arg_names}, constants)
