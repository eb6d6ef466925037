"""Quantal neurons' release, alone or times a factor: neuron(u), neuron(u) * neuron(b), neuron(u) * b.

One forward and one backward kernel; FACTOR says what the second operand is. Each is one pass over [T, C]: a program
owns BLOCK_C channels, whose thresholds stay in its registers, and walks the tokens in steps of BLOCK_T times the number
of programs on its channels. The floor is bytes, with E bytes an element:

    neuron(u)             forward 2 E (read u, write out)      backward 3 E (read u, dout; write du)
    neuron(u) * factor    forward 3 E (read u, b; write out)   backward 5 E (read u, b, dout; write du, db)

The backward keeps no quanta from the forward: it divides again. Arithmetic is near its own limit: 4 bytes are the time
of some thirty instructions an element, and a division is ten, two of them on the slow unit, and a branch. So 1 / theta
is formed once a channel, and u / theta takes a product and two fused multiply-adds that make it the nearest number to
the quotient (Markstein, IBM J. Res. Dev. 34, 1990).

Values are the reference's to the bit: theta is torch's exp, u / theta is rounded to nearest, each neuron's theta * n is
rounded to the dtype before it enters a product, and the product is rounded once more. The gradients stay in fp32 until
they are stored. Those of the log thresholds are summed by each program over its tokens, then over programs
(partial_sums_triton.py): no atomics, the same bits each time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, CompileCase, Launch
from neuronspark.kernels.partial_sums_triton import sum_partials

NO_FACTOR = tl.constexpr(0)
PLAIN = tl.constexpr(1)
NEURON = tl.constexpr(2)

FAR = tl.constexpr(1048576.0)
"""More quanta than any neuron has levels."""
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: fp32 numbers of its size are whole, so that adding it rounds a small number half to even."""


def _tiles(tokens: int, channels: int, warps: int, programs_per_sm: int, stages: int = 1) -> Launch:
    blocks = {"BLOCK_T": tokens, "BLOCK_C": channels, "STAGES": stages, "PROGRAMS": 132 * programs_per_sm}
    return Launch(blocks, num_warps=warps)


RELEASE_FORWARD = launch.register("release_forward", {ANY: _tiles(2, 512, 4, 12, 3)})
RELEASE_BACKWARD = launch.register("release_backward", {ANY: _tiles(2, 512, 4, 8, 3)})
PRODUCT_FORWARD = launch.register("release_product_forward", {ANY: _tiles(2, 512, 4, 8, 3)})
PRODUCT_BACKWARD = launch.register("release_product_backward", {ANY: _tiles(2, 512, 4, 5, 3)})

CANDIDATES = {
    RELEASE_FORWARD: [
        _tiles(4, 512, 4, 10),
        _tiles(4, 512, 4, 40),
        _tiles(2, 1024, 4, 10),
        _tiles(2, 512, 4, 12, 3),
        _tiles(8, 512, 8, 6),
    ],
    RELEASE_BACKWARD: [
        _tiles(4, 512, 4, 7),
        _tiles(4, 512, 4, 20),
        _tiles(2, 512, 4, 10),
        _tiles(2, 512, 4, 8, 3),
        _tiles(2, 1024, 8, 4),
    ],
    PRODUCT_FORWARD: [
        _tiles(4, 512, 4, 6),
        _tiles(4, 512, 4, 24),
        _tiles(2, 512, 4, 7),
        _tiles(2, 1024, 8, 3),
        _tiles(2, 512, 4, 8, 3),
    ],
    PRODUCT_BACKWARD: [
        _tiles(2, 512, 4, 5, 3),
        _tiles(2, 512, 4, 4, 2),
        _tiles(2, 512, 4, 3),
        _tiles(2, 512, 4, 12),
        _tiles(2, 256, 2, 7),
        _tiles(2, 512, 8, 4, 2),
        _tiles(2, 512, 8, 4, 3),
    ],
}
"""Configurations to time for each pinned one."""


@triton.jit
def released(u, theta, reciprocal, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """(u / theta, the whole quanta released), both fp32; NaN where u is NaN. `reciprocal` is 1 / theta, rounded."""
    # The product is a unit or two in the last place off, and the multiply-adds, which round once, find by how much. Its
    # bounds keep the remainder of an infinite u infinite.
    near = tl.clamp(u * reciprocal, -FAR, FAR)
    ratio = tl.fma(tl.fma(near, -theta, u), reciprocal, near)
    # Clamping to whole numbers before rounding gives what clamping after it gives, and keeps the sum in range.
    clamped = tl.clamp(ratio, LOWEST, HIGHEST, propagate_nan=tl.PropagateNan.ALL)
    return ratio, (clamped + ROUNDER) - ROUNDER


@triton.jit
def passing(gradient, ratio, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, MARGIN: tl.constexpr):
    """The gradient strictly inside the straight-through window, 0 elsewhere."""
    if LOWEST == -HIGHEST:
        return tl.where(tl.abs(ratio) < HIGHEST + MARGIN, gradient, 0.0)
    else:
        return tl.where((ratio > LOWEST - MARGIN) & (ratio < HIGHEST + MARGIN), gradient, 0.0)


@triton.jit
def _release_forward_kernel(
    u_ptr,
    theta_ptr,
    b_ptr,
    theta_b_ptr,
    out_ptr,
    tokens_T,
    u_stride: tl.constexpr,
    b_stride: tl.constexpr,
    CHANNELS: tl.constexpr,
    FACTOR: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    LOWEST_B: tl.constexpr,
    HIGHEST_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    theta = tl.load(theta_ptr + c, mask=c < CHANNELS, other=1.0)
    reciprocal = tl.div_rn(1.0, theta)
    if FACTOR == NEURON:
        theta_b = tl.load(theta_b_ptr + c, mask=c < CHANNELS, other=1.0)
        reciprocal_b = tl.div_rn(1.0, theta_b)
    for first in tl.range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK_T)[:, None]
        owned = (t < tokens_T) & (c < CHANNELS)
        token = t.to(tl.int64)
        u = tl.load(u_ptr + token * u_stride + c, mask=owned, other=0.0)
        _, quanta = released(u.to(tl.float32), theta, reciprocal, LOWEST, HIGHEST)
        out = (quanta * theta).to(out_ptr.dtype.element_ty)
        if FACTOR != NO_FACTOR:
            b = tl.load(b_ptr + token * b_stride + c, mask=owned, other=0.0).to(tl.float32)
            if FACTOR == NEURON:
                _, quanta_b = released(b, theta_b, reciprocal_b, LOWEST_B, HIGHEST_B)
                b = (quanta_b * theta_b).to(out_ptr.dtype.element_ty).to(tl.float32)
            out = (out.to(tl.float32) * b).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * CHANNELS + c, out, mask=owned)


@triton.jit
def _release_backward_kernel(
    dout_ptr,
    u_ptr,
    theta_ptr,
    b_ptr,
    theta_b_ptr,
    du_ptr,
    db_ptr,
    partials_ptr,
    tokens_T,
    dout_stride: tl.constexpr,
    u_stride: tl.constexpr,
    b_stride: tl.constexpr,
    CHANNELS: tl.constexpr,
    FACTOR: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    LOWEST_B: tl.constexpr,
    HIGHEST_B: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    theta = tl.load(theta_ptr + c, mask=c < CHANNELS, other=1.0)
    reciprocal = tl.div_rn(1.0, theta)
    dtheta = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if FACTOR == NEURON:
        theta_b = tl.load(theta_b_ptr + c, mask=c < CHANNELS, other=1.0)
        reciprocal_b = tl.div_rn(1.0, theta_b)
        dtheta_b = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for first in tl.range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK_T)[:, None]
        owned = (t < tokens_T) & (c < CHANNELS)
        token = t.to(tl.int64)
        dout = tl.load(dout_ptr + token * dout_stride + c, mask=owned, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + token * u_stride + c, mask=owned, other=0.0).to(tl.float32)
        ratio, quanta = released(u, theta, reciprocal, LOWEST, HIGHEST)
        dfired = dout
        if FACTOR != NO_FACTOR:
            b = tl.load(b_ptr + token * b_stride + c, mask=owned, other=0.0).to(tl.float32)
            db = dout * (quanta * theta)
            if FACTOR == NEURON:
                ratio_b, quanta_b = released(b, theta_b, reciprocal_b, LOWEST_B, HIGHEST_B)
                dfired = dout * (quanta_b * theta_b)
                passed_b = passing(db, ratio_b, LOWEST_B, HIGHEST_B, MARGIN)
                dtheta_b += db * quanta_b - passed_b * ratio_b
                db = passed_b
            else:
                dfired = dout * b
            tl.store(db_ptr + token * CHANNELS + c, db.to(db_ptr.dtype.element_ty), mask=owned)
        passed = passing(dfired, ratio, LOWEST, HIGHEST, MARGIN)
        # d theta: dfired times n - u / theta inside the window, times n outside.
        dtheta += dfired * quanta - passed * ratio
        tl.store(du_ptr + token * CHANNELS + c, passed.to(du_ptr.dtype.element_ty), mask=owned)
    program = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    dlog_theta = tl.sum(dtheta * theta, 0)
    tl.store(partials_ptr + program * CHANNELS + c, dlog_theta, mask=c < CHANNELS)
    if FACTOR == NEURON:
        second = partials_ptr + (tl.num_programs(1) + program) * CHANNELS
        tl.store(second + c, tl.sum(dtheta_b * theta_b, 0), mask=c < CHANNELS)


def _planned(name: str, u_TC: Tensor) -> tuple[dict[str, int], tuple[int, int]]:
    """A launch's keyword arguments and grid: (blocks of channels, programs on each)."""
    options = launch.pinned(name, u_TC.device).options()
    columns = triton.cdiv(u_TC.shape[1], options["BLOCK_C"])
    steps = triton.cdiv(u_TC.shape[0], options["BLOCK_T"])
    return options, (columns, min(max(options.pop("PROGRAMS") // columns, 1), max(steps, 1)))


def _by_token(x_TC: Tensor) -> tuple[Tensor, int]:
    """The tensor with each token's channels adjacent (a copy if they are not), and its tokens' stride."""
    tokens, channels = x_TC.shape
    if x_TC.stride(1) != 1 and channels > 1:
        x_TC = x_TC.contiguous()
    return x_TC, x_TC.stride(0) if tokens > 1 else channels


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u_TC: Tensor,
        log_theta_C: Tensor,
        b_TC: Tensor | None,
        log_theta_b_C: Tensor | None,
        levels: tuple[float, ...],
        margin: float,
    ) -> Tensor:
        """`levels` are the lowest and highest quanta of the neuron, and of the factor's if it is one."""
        u_TC, u_stride = _by_token(u_TC)
        theta_C, theta_b_C, b_stride, factor = log_theta_C.float().exp(), None, 0, NO_FACTOR
        if b_TC is not None:
            b_TC, b_stride = _by_token(b_TC)
            factor = PLAIN
        if log_theta_b_C is not None:
            theta_b_C, factor = log_theta_b_C.float().exp(), NEURON
        lowest, highest, lowest_b, highest_b = (*levels, 0.0, 0.0)[:4]
        ctx.constants = {
            "u_stride": u_stride,
            "b_stride": b_stride,
            "CHANNELS": u_TC.shape[1],
            "FACTOR": factor.value,
            "LOWEST": lowest,
            "HIGHEST": highest,
            "LOWEST_B": lowest_b,
            "HIGHEST_B": highest_b,
        }
        ctx.margin = margin
        ctx.save_for_backward(u_TC, theta_C, b_TC, theta_b_C)
        out_TC = torch.empty(u_TC.shape, dtype=u_TC.dtype, device=u_TC.device)
        options, grid = _planned(RELEASE_FORWARD if b_TC is None else PRODUCT_FORWARD, u_TC)
        _release_forward_kernel[grid](u_TC, theta_C, b_TC, theta_b_C, out_TC, u_TC.shape[0], **ctx.constants, **options)
        return out_TC

    @staticmethod
    def backward(ctx: Any, dout_TC: Tensor) -> tuple[Tensor | None, ...]:
        u_TC, theta_C, b_TC, theta_b_C = ctx.saved_tensors
        dout_TC, dout_stride = _by_token(dout_TC)
        tokens, channels = u_TC.shape
        options, grid = _planned(RELEASE_BACKWARD if b_TC is None else PRODUCT_BACKWARD, u_TC)
        du_TC = torch.empty(u_TC.shape, dtype=u_TC.dtype, device=u_TC.device)
        db_TC = None if b_TC is None else torch.empty(b_TC.shape, dtype=b_TC.dtype, device=b_TC.device)
        neurons = 1 if theta_b_C is None else 2
        partials = torch.empty(neurons, grid[1], channels, dtype=torch.float32, device=u_TC.device)
        _release_backward_kernel[grid](
            dout_TC,
            u_TC,
            theta_C,
            b_TC,
            theta_b_C,
            du_TC,
            db_TC,
            partials,
            tokens,
            dout_stride=dout_stride,
            MARGIN=ctx.margin,
            **ctx.constants,
            **options,
        )
        dlog_theta = sum_partials(partials)
        return du_TC, dlog_theta[0], db_TC, dlog_theta[1] if neurons == 2 else None, None, None


def release_triton(u_TC: Tensor, log_theta_C: Tensor, lowest: float, highest: float, margin: float) -> Tensor:
    """As `quantal.release`."""
    return _Release.apply(u_TC, log_theta_C, None, None, (lowest, highest), margin)


def release_product_triton(
    u_TC: Tensor,
    log_theta_C: Tensor,
    b_TC: Tensor,
    log_theta_b_C: Tensor | None,
    levels: tuple[float, ...],
    margin: float,
) -> Tensor:
    """neuron(u) * neuron(b), or neuron(u) * b without thresholds for b; `levels` as lowest, highest of each neuron."""
    return _Release.apply(u_TC, log_theta_C, b_TC, log_theta_b_C, levels, margin)


def compile_cases() -> list[CompileCase]:
    """Both kernels with every kind of factor, at a feed-forward's width in bf16."""
    types: dict[str, str | int] = dict.fromkeys(("u_ptr", "out_ptr", "dout_ptr", "du_ptr"), "*bf16")
    types |= {"theta_ptr": "*fp32", "partials_ptr": "*fp32", "tokens_T": 16384}
    plain = types | {"b_ptr": "*bf16", "db_ptr": "*bf16"}
    neuron = plain | {"theta_b_ptr": "*fp32"}
    channels = 7040
    constants: dict[str, Any] = dict.fromkeys(("u_stride", "b_stride", "dout_stride", "CHANNELS"), channels)
    constants |= {"LOWEST": 0.0, "HIGHEST": 4.0, "LOWEST_B": -4.0, "HIGHEST_B": 4.0, "MARGIN": 1.0}
    constants |= dict.fromkeys(("b_ptr", "db_ptr", "theta_b_ptr"))
    uses = [
        (RELEASE_FORWARD, _release_forward_kernel, NO_FACTOR, types),
        (RELEASE_BACKWARD, _release_backward_kernel, NO_FACTOR, types),
        (PRODUCT_FORWARD, _release_forward_kernel, PLAIN, plain),
        (PRODUCT_BACKWARD, _release_backward_kernel, PLAIN, plain),
        (PRODUCT_FORWARD, _release_forward_kernel, NEURON, neuron),
        (PRODUCT_BACKWARD, _release_backward_kernel, NEURON, neuron),
    ]
    return [
        CompileCase(name, kernel, use_types, {**constants, "FACTOR": factor.value})
        for name, kernel, factor, use_types in uses
    ]
