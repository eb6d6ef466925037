"""RMSNorm of groups of channels, with a gate before it and a signed neuron after it where a layer has them.

    m = x  or  y * silu(z);   u = gain * m / sqrt(mean(m^2) + eps);   out = u  or  neuron(u)

One forward and one backward kernel for rms_norm, norm_release and gated_release; GATED and RELEASES say which. A
token's channels are K groups of C, each normalised alone: K = 1 for the residual stream, the heads for a soma. The
floor is bytes, E an element's; the inverse rms is 4 bytes a group more:

    forward   2 E, gated 3 E;     backward   3 E (read x, dout; write dx), gated 5 E (read y, z, dout; write dy, dz)

A program owns some groups (all of a narrow one's channels in a few threads), keeps their gains and thresholds in
registers, and walks the tokens in steps of the number of programs; STAGES > 1 copies the next rows to shared memory
meanwhile. A row of 2,560 channels would waste three lanes in eight of a block of 4,096, so a row is a tuple of PIECE
channels each (5 of 512), all in registers: one read of the row, one reduction over the elementwise sum of the pieces.

The backward recomputes u and its quanta from x (or y, z) and the saved inverse rms. With du what of dout passes the
neuron: d gain = sum_t du m / rms, dm = gain du / rms - m mean(du u) / rms^2, and d log_theta = theta sum_t dout n -
gain d gain, so that the neuron's gradient takes one multiply-add an element. Gradients of gain and log thresholds are
summed by each program over its tokens, then over programs (partial_sums_triton.py), so that there are no atomics and
the bits are the same each time.

u stays in fp32 between norm and neuron: against float64, quanta differ only where u / theta is within fp32 rounding of
a tie. (The reference in bf16 rounds u there.) theta is formed here from its logarithm, once a program and channel, and
may differ from torch's exponential in the last place: a launch before this one would take a twentieth of its time.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
# ruff: noqa: RUF005 (Triton has no starred tuples)
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, CompileCase, Launch
from neuronspark.kernels.partial_sums_triton import sum_partials
from neuronspark.kernels.release_triton import passing, released


def _rows(
    rows: int, piece: int, warps: int, programs_per_sm: int, stages: int = 1, max_registers: int | None = None
) -> Launch:
    blocks = {"ROWS": rows, "LONGEST_PIECE": piece, "STAGES": stages, "PROGRAMS": 132 * programs_per_sm}
    return Launch(blocks, num_warps=warps, max_registers=max_registers)


HEAD_CHANNELS = 128
"""Groups of at most this many channels are heads, several to a program; longer ones are rows, one to a program."""
ROW_CHANNELS = 4096
"""Longer rows are spread over more warps; beyond 8,192 channels their backward spills registers."""

OPERATORS = ("rms_norm", "norm_release", "gated_release")
_PINNED = {
    "rms_norm_forward/heads": _rows(16, 128, 4, 12),
    "rms_norm_backward/heads": _rows(16, 128, 4, 6),
    "rms_norm_forward/row": _rows(1, 512, 4, 8),
    "rms_norm_backward/row": _rows(1, 512, 8, 2, 3),
    "norm_release_forward/heads": _rows(16, 128, 4, 9),
    "norm_release_backward/heads": _rows(16, 128, 4, 6),
    "norm_release_forward/row": _rows(1, 512, 4, 4, 3),
    "norm_release_backward/row": _rows(1, 512, 8, 2, 3),
    "gated_release_forward/heads": _rows(16, 128, 4, 8),
    "gated_release_backward/heads": _rows(16, 128, 4, 4, 3),
    "gated_release_forward/row": _rows(1, 512, 4, 4),
    "gated_release_backward/row": _rows(1, 512, 8, 2),
    **{f"{operator}_forward/long": _rows(1, 1024, 16, 2) for operator in OPERATORS},
    **{f"{operator}_backward/long": _rows(1, 1024, 16, 1) for operator in OPERATORS},
}
_HOPPER = {
    "rms_norm_backward/row": _rows(1, 512, 4, 3, 3),
    "norm_release_backward/row": _rows(1, 512, 4, 2, 4),
    "gated_release_forward/heads": _rows(16, 128, 4, 8, 3),
}
"""What was fastest on an H200 of CANDIDATES, where it is not the same."""
for _name, _launch in _PINNED.items():
    launch.register(_name, {ANY: _launch, "sm_90": _HOPPER.get(_name, _launch)})

CANDIDATES = {
    "rms_norm_forward/row": [_rows(1, 512, 4, 8), _rows(1, 512, 4, 16), _rows(1, 512, 2, 8), _rows(1, 512, 4, 8, 3)],
    "rms_norm_backward/row": [_rows(1, 512, 4, 3, 3), _rows(1, 512, 4, 4, 3, 128), _rows(1, 512, 8, 2, 4)],
    "norm_release_forward/row": [_rows(1, 512, 4, 4, 3), _rows(1, 512, 4, 4, 5), _rows(2, 512, 4, 3, 3)],
    "norm_release_backward/row": [_rows(1, 512, 4, 2, 4), _rows(1, 512, 4, 3, 3, 168), _rows(1, 512, 8, 2, 4)],
    "gated_release_forward/heads": [
        _rows(16, 128, 4, 8),
        _rows(16, 128, 4, 32),
        _rows(32, 128, 8, 4),
        _rows(16, 128, 4, 8, 3),
        _rows(8, 128, 2, 16),
    ],
    "gated_release_backward/heads": [
        _rows(16, 128, 4, 4, 3),
        _rows(16, 128, 4, 4, 2),
        _rows(16, 128, 4, 4),
        _rows(16, 128, 4, 8),
        _rows(8, 128, 4, 6),
        _rows(8, 128, 2, 8, 3),
    ],
}
"""Configurations to time for each pinned one."""


@triton.jit
def _gate(y, z, GATED: tl.constexpr):
    """(what is normalised, silu(z), its derivative)."""
    if GATED:
        sigmoid = tl.sigmoid(z)
        silu = z * sigmoid
        return y * silu, silu, sigmoid + silu * (1.0 - sigmoid)
    else:
        return y, y, y


@triton.jit
def _owned(
    t,
    tokens_T,
    k,
    c,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    i: tl.constexpr,
):
    """Which elements of piece i exist; comparisons that hold for all of them are left out."""
    owned = tl.full((1, 1, 1), 1, tl.int1)
    if BLOCK_T > 1:
        owned = owned & (t < tokens_T)
    if GROUPS % BLOCK_K != 0:
        owned = owned & (k < GROUPS)
    if (i + 1) * PIECE > CHANNELS:
        owned = owned & (c + i * PIECE < CHANNELS)
    return owned


@triton.jit
def _row_norm_forward_kernel(
    x_ptr,
    z_ptr,
    gain_ptr,
    log_theta_ptr,
    out_ptr,
    scale_ptr,
    tokens_T,
    x_stride: tl.constexpr,
    z_stride: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    RELEASES: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    c = tl.arange(0, PIECE)[None, None, :]
    gains = ()
    thetas = ()
    reciprocals = ()
    for i in tl.static_range(PIECES):
        here = (k < GROUPS) & (c + i * PIECE < CHANNELS)
        channel = k * CHANNELS + c + i * PIECE
        gains = gains + (tl.load(gain_ptr + channel, mask=here, other=0.0).to(tl.float32),)
        if RELEASES:
            thetas = thetas + (tl.exp(tl.load(log_theta_ptr + channel, mask=here, other=0.0).to(tl.float32)),)
            reciprocals = reciprocals + (tl.div_rn(1.0, thetas[i]),)
    for first in tl.range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK_T)[:, None, None]
        token = t.to(tl.int64)
        # One address a row and tensor; the pieces' lie at constant distances from it.
        x_row = x_ptr + token * x_stride + (k * CHANNELS + c)
        out_row = out_ptr + token * (GROUPS * CHANNELS) + (k * CHANNELS + c)
        if GATED:
            z_row = z_ptr + token * z_stride + (k * CHANNELS + c)
        squares = tl.zeros((BLOCK_T, BLOCK_K, PIECE), dtype=tl.float32)
        inputs = ()
        for i in tl.static_range(PIECES):
            owned = _owned(t, tokens_T, k, c, GROUPS, CHANNELS, BLOCK_T, BLOCK_K, PIECE, i)
            m = tl.load(x_row + i * PIECE, mask=owned, other=0.0).to(tl.float32)
            if GATED:
                z = tl.load(z_row + i * PIECE, mask=owned, other=0.0).to(tl.float32)
                m, _, _ = _gate(m, z, GATED)
            squares += m * m
            inputs = inputs + (m,)
        scale = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) * (1.0 / CHANNELS) + EPS)
        tl.store(scale_ptr + token * GROUPS + k, scale, mask=(t < tokens_T) & (k < GROUPS))
        for i in tl.static_range(PIECES):
            owned = _owned(t, tokens_T, k, c, GROUPS, CHANNELS, BLOCK_T, BLOCK_K, PIECE, i)
            out = inputs[i] * scale * gains[i]
            if RELEASES:
                _, quanta = released(out, thetas[i], reciprocals[i], LOWEST, HIGHEST)
                out = quanta * thetas[i]
            tl.store(out_row + i * PIECE, out.to(out_ptr.dtype.element_ty), mask=owned)


@triton.jit
def _row_norm_backward_kernel(
    dout_ptr,
    x_ptr,
    z_ptr,
    gain_ptr,
    log_theta_ptr,
    scale_ptr,
    dx_ptr,
    dz_ptr,
    partials_ptr,
    tokens_T,
    dout_stride: tl.constexpr,
    x_stride: tl.constexpr,
    z_stride: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
    RELEASES: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    c = tl.arange(0, PIECE)[None, None, :]
    gains = ()
    thetas = ()
    reciprocals = ()
    dgains = ()
    dquanta = ()
    for i in tl.static_range(PIECES):
        here = (k < GROUPS) & (c + i * PIECE < CHANNELS)
        channel = k * CHANNELS + c + i * PIECE
        gains = gains + (tl.load(gain_ptr + channel, mask=here, other=0.0).to(tl.float32),)
        dgains = dgains + (tl.zeros((BLOCK_T, BLOCK_K, PIECE), dtype=tl.float32),)
        if RELEASES:
            thetas = thetas + (tl.exp(tl.load(log_theta_ptr + channel, mask=here, other=0.0).to(tl.float32)),)
            reciprocals = reciprocals + (tl.div_rn(1.0, thetas[i]),)
            dquanta = dquanta + (tl.zeros((BLOCK_T, BLOCK_K, PIECE), dtype=tl.float32),)
    for first in tl.range(tl.program_id(1) * BLOCK_T, tokens_T, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK_T)[:, None, None]
        token = t.to(tl.int64)
        dout_row = dout_ptr + token * dout_stride + (k * CHANNELS + c)
        x_row = x_ptr + token * x_stride + (k * CHANNELS + c)
        dx_row = dx_ptr + token * (GROUPS * CHANNELS) + (k * CHANNELS + c)
        if GATED:
            z_row = z_ptr + token * z_stride + (k * CHANNELS + c)
            dz_row = dz_ptr + token * (GROUPS * CHANNELS) + (k * CHANNELS + c)
        scale = tl.load(scale_ptr + token * GROUPS + k, mask=(t < tokens_T) & (k < GROUPS), other=0.0)
        pulls = tl.zeros((BLOCK_T, BLOCK_K, PIECE), dtype=tl.float32)
        inputs = ()
        gates = ()
        passed = ()
        dgains_now = ()
        dquanta_now = ()
        for i in tl.static_range(PIECES):
            owned = _owned(t, tokens_T, k, c, GROUPS, CHANNELS, BLOCK_T, BLOCK_K, PIECE, i)
            du = tl.load(dout_row + i * PIECE, mask=owned, other=0.0).to(tl.float32)
            x = tl.load(x_row + i * PIECE, mask=owned, other=0.0).to(tl.float32)
            m = x
            if GATED:
                z = tl.load(z_row + i * PIECE, mask=owned, other=0.0).to(tl.float32)
                m, _, _ = _gate(x, z, GATED)
                gates = gates + (z,)
            normed = m * scale
            u = normed * gains[i]
            if RELEASES:
                ratio, quanta = released(u, thetas[i], reciprocals[i], LOWEST, HIGHEST)
                dquanta_now = dquanta_now + (dquanta[i] + du * quanta,)
                du = passing(du, ratio, LOWEST, HIGHEST, MARGIN)
            dgains_now = dgains_now + (dgains[i] + du * normed,)
            pulls += du * u
            inputs = inputs + (x,)
            passed = passed + (du,)
        dgains = dgains_now
        dquanta = dquanta_now
        pull = tl.sum(pulls, 2, keep_dims=True) * scale * scale * (-1.0 / CHANNELS)
        for i in tl.static_range(PIECES):
            owned = _owned(t, tokens_T, k, c, GROUPS, CHANNELS, BLOCK_T, BLOCK_K, PIECE, i)
            dx = passed[i] * gains[i] * scale
            if GATED:
                m, silu, slope = _gate(inputs[i], gates[i], GATED)
                dm = dx + m * pull
                tl.store(dz_row + i * PIECE, (dm * inputs[i] * slope).to(dz_ptr.dtype.element_ty), mask=owned)
                dx = dm * silu
            else:
                dx += inputs[i] * pull
            tl.store(dx_row + i * PIECE, dx.to(dx_ptr.dtype.element_ty), mask=owned)
    program = tl.program_id(1).to(tl.int64)
    own = partials_ptr + program * (GROUPS * CHANNELS)
    second = partials_ptr + (tl.num_programs(1) + program) * (GROUPS * CHANNELS)
    for i in tl.static_range(PIECES):
        here = (k < GROUPS) & (c + i * PIECE < CHANNELS)
        channel = k * CHANNELS + c + i * PIECE
        tl.store(own + channel, tl.sum(dgains[i], 0, keep_dims=True), mask=here)
        if RELEASES:
            # d log_theta = theta sum_t dout n - sum_t du u, and the latter is gain d gain.
            dlog_theta = thetas[i] * dquanta[i] - gains[i] * dgains[i]
            tl.store(second + channel, tl.sum(dlog_theta, 0, keep_dims=True), mask=here)


def _planned(operator: str, x: Tensor, groups: int, channels: int) -> tuple[dict[str, int], tuple[int, int]]:
    """A launch's keyword arguments and grid: (blocks of groups, programs on each)."""
    shape = "heads" if channels <= HEAD_CHANNELS else "row" if channels <= ROW_CHANNELS else "long"
    options = launch.pinned(f"{operator}/{shape}", x.device).options()
    programs = options.pop("PROGRAMS")
    options |= _tile(options.pop("ROWS"), options.pop("LONGEST_PIECE"), groups, channels)
    blocks = triton.cdiv(groups, options["BLOCK_K"])
    steps = triton.cdiv(x.shape[0], options["BLOCK_T"])
    return options, (blocks, min(max(programs // blocks, 1), max(steps, 1)))


def _tile(rows: int, longest_piece: int, groups: int, channels: int) -> dict[str, int]:
    """The tile of a program: ROWS rows as tokens times groups, and a row as pieces."""
    block_k = min(rows, triton.next_power_of_2(groups))
    piece = min(longest_piece, triton.next_power_of_2(channels))
    return {
        "BLOCK_T": rows // block_k,
        "BLOCK_K": block_k,
        "PIECE": piece,
        "PIECES": triton.cdiv(channels, piece),
    }


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """The tensor with each token's channels adjacent (a copy if they are not), and its tokens' stride."""
    if x.shape[0] == 0 or not x[0].is_contiguous():
        x = x.contiguous()
    return x, x.stride(0) if x.shape[0] > 1 else math.prod(x.shape[1:])


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: str,
        x: Tensor,
        z: Tensor | None,
        gain: Tensor,
        log_theta: Tensor | None,
        eps: float,
        levels: tuple[float, float],
        margin: float,
    ) -> Tensor:
        groups, channels = math.prod(gain.shape[:-1]), gain.shape[-1]
        tokens = x.shape[0]
        x, x_stride = _by_token(x)
        z_stride = 0
        if z is not None:
            z, z_stride = _by_token(z)
        gain = gain.contiguous()
        log_theta = None if log_theta is None else log_theta.contiguous()
        ctx.operator, ctx.margin = operator, margin
        ctx.constants = {
            "x_stride": x_stride,
            "z_stride": z_stride,
            "GROUPS": groups,
            "CHANNELS": channels,
            "GATED": z is not None,
            "RELEASES": log_theta is not None,
            "LOWEST": levels[0],
            "HIGHEST": levels[1],
        }
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
        options, grid = _planned(f"{operator}_forward", x, groups, channels)
        _row_norm_forward_kernel[grid](x, z, gain, log_theta, out, scale, tokens, EPS=eps, **ctx.constants, **options)
        ctx.save_for_backward(x, z, gain, log_theta, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, z, gain, log_theta, scale = ctx.saved_tensors
        groups, channels = ctx.constants["GROUPS"], ctx.constants["CHANNELS"]
        dout, dout_stride = _by_token(dout)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dz = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        options, grid = _planned(f"{ctx.operator}_backward", x, groups, channels)
        parameters = 1 if log_theta is None else 2
        partials = torch.empty(parameters, grid[1], groups * channels, dtype=torch.float32, device=x.device)
        _row_norm_backward_kernel[grid](
            dout,
            x,
            z,
            gain,
            log_theta,
            scale,
            dx,
            dz,
            partials,
            x.shape[0],
            dout_stride=dout_stride,
            MARGIN=ctx.margin,
            **ctx.constants,
            **options,
        )
        sums = sum_partials(partials)
        dlog_theta = None if log_theta is None else sums[1].view(log_theta.shape).to(log_theta.dtype)
        return None, dx, dz, sums[0].view(gain.shape), dlog_theta, None, None, None


def rms_norm_triton(x_TxC: Tensor, gain_xC: Tensor, eps: float) -> Tensor:
    """As `rmsnorm.rms_norm`."""
    return _RowNorm.apply("rms_norm", x_TxC, None, gain_xC, None, eps, (0.0, 0.0), 0.0)


def norm_release_triton(
    x_TxC: Tensor, gain_xC: Tensor, log_theta: Tensor, levels: tuple[float, float], margin: float, eps: float
) -> Tensor:
    """As `norm_release.norm_release`."""
    return _RowNorm.apply("norm_release", x_TxC, None, gain_xC, log_theta, eps, levels, margin)


def gated_release_triton(
    y_THP: Tensor,
    z_THP: Tensor,
    gain_HP: Tensor,
    log_theta: Tensor,
    levels: tuple[float, float],
    margin: float,
    eps: float,
) -> Tensor:
    """As `gated_release.gated_release`, but shaped as y."""
    return _RowNorm.apply("gated_release", y_THP, z_THP, gain_HP, log_theta, eps, levels, margin)


_COMPILED_SHAPES = {"heads": (80, 64), "row": (1, 2560), "long": (1, 5120)}


def compile_cases() -> list[CompileCase]:
    """Both kernels of each operator in each shape class, in bf16."""
    return [
        _compile_case(operator, direction, shape)
        for operator in OPERATORS
        for shape in _COMPILED_SHAPES
        for direction in ("forward", "backward")
    ]


def _compile_case(operator: str, direction: str, shape: str) -> CompileCase:
    types = dict.fromkeys(("x_ptr", "out_ptr", "dout_ptr", "dx_ptr"), "*bf16")
    types |= dict.fromkeys(("gain_ptr", "scale_ptr", "partials_ptr"), "*fp32")
    types["tokens_T"] = 16384
    gated, releases = operator == "gated_release", operator != "rms_norm"
    if gated:
        types |= {"z_ptr": "*bf16", "dz_ptr": "*bf16"}
    if releases:
        types["log_theta_ptr"] = "*fp32"
    groups, channels = _COMPILED_SHAPES[shape]
    stride = groups * channels
    blocks = _PINNED[f"{operator}_{direction}/{shape}"].blocks
    constants = {
        **dict.fromkeys(("x_stride", "z_stride", "dout_stride"), stride),
        **dict.fromkeys(("z_ptr", "dz_ptr", "log_theta_ptr"), None),
        "GROUPS": groups,
        "CHANNELS": channels,
        "EPS": 1e-6,
        "GATED": gated,
        "RELEASES": releases,
        "LOWEST": -4.0,
        "HIGHEST": 4.0,
        "MARGIN": 1.0,
        **_tile(blocks["ROWS"], blocks["LONGEST_PIECE"], groups, channels),
    }
    kernel = _row_norm_forward_kernel if direction == "forward" else _row_norm_backward_kernel
    return CompileCase(f"{operator}_{direction}/{shape}", kernel, types, constants)
