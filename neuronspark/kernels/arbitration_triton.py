# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The comparator's Triton kernels: one forward, one backward; `arbitration.py` has the equations.

Bytes of a token (bf16): forward 6 D + 8 h (r, v and two logits read, mixed written), backward 10 D + 16 h; at ns-2b (40
heads of 64) 15.7 KB and 26.2 KB, for 16,384 tokens 257 MB and 430 MB, 0.06 ms and 0.10 ms at 4.2 TB/s. Nothing but the
inputs is kept for the backward: cosine, pi and gain are formed again from r and v, which it reads anyway.

A program has one head and TILES tiles of BLOCK_T tokens, one warp: a thread has 16 channels, the sums over channels are
exchanges inside a warp, and the sums over tokens for the parameters' gradients are taken once, at the end. They go to a
buffer [3, B chunks, h], which `sum_partials` adds in a fixed order. Programs of neighbouring heads are neighbours, so
that mixed ([T, D]) is written, and its gradient read, in whole rows by programs that run together.

With o the gradient of mixed, a = o . r and b = o . v of one head and token,

    dpi = g a - b        dz = dpi pi (1 - pi)        dcopy = dz        dgain = pi a sigmoid(gain + bias)
    dcos = novelty_weight dz / 2
    dr = g pi o + dcos (v / (|r| |v|) - cos r / |r|^2)        dv likewise with 1 - pi; a norm below eps is a constant

Shapes: B rows, h heads, L tokens, T = B L, d channels of a head, D = h d.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels.arbitration import COSINE_EPS
from neuronspark.kernels.exponential_kernels import sigmoids, softplus
from neuronspark.kernels.launch import ANY, CompileCase, Launch, pinned, register
from neuronspark.kernels.partial_sums_triton import sum_partials


def _tiles(tokens: int, tiles: int, warps: int, stages: int = 1) -> Launch:
    return Launch({"BLOCK_T": tokens, "TILES": tiles, "STAGES": stages}, num_warps=warps)


_FORWARD = _tiles(32, 2, 4)
_BACKWARD = _tiles(8, 8, 1)
FORWARD = register("arbitration/forward", {ANY: _FORWARD, "sm_90": _tiles(16, 1, 2)})
BACKWARD = register("arbitration/backward", {ANY: _BACKWARD, "sm_90": _tiles(32, 4, 4, 3)})
CANDIDATES = {
    FORWARD: [_tiles(16, 1, 2), _tiles(32, 1, 4), _tiles(32, 4, 4, 3), _FORWARD],
    BACKWARD: [_tiles(32, 4, 4, 3), _tiles(16, 8, 2, 3), _tiles(32, 4, 4, 2), _BACKWARD],
}
"""Configurations to time for each pinned one, an H200's first."""
_EPS = tl.constexpr(COSINE_EPS)


@triton.jit
def _place(tokens, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """This program's (row, head, first token)."""
    block = tl.program_id(0) // HEADS
    chunks = (tokens + SPAN - 1) // SPAN
    return (block // chunks).to(tl.int64), tl.program_id(0) % HEADS, block % chunks * SPAN


@triton.jit
def _load(base, token, valid, stride, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens of one head; the stride between tokens is in units of WIDTH, so that alignment is known."""
    channel = tl.arange(0, BLOCK_D)
    pointers = base + (token.to(tl.int64) * stride)[:, None] * WIDTH + channel[None, :]
    return tl.load(pointers, mask=valid[:, None] & (channel < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(base, token, valid, stride, value, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    pointers = base + (token.to(tl.int64) * stride)[:, None] * WIDTH + channel[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=valid[:, None] & (channel < WIDTH)[None, :])


@triton.jit
def _compare(r, v):
    """(cosine, |r|, |v|) of every token, norms no smaller than eps."""
    r_norm = tl.maximum(tl.sqrt(tl.sum(r * r, 1)), _EPS)
    v_norm = tl.maximum(tl.sqrt(tl.sum(v * v, 1)), _EPS)
    return tl.sum(r * v, 1) / r_norm / v_norm, r_norm, v_norm


@triton.jit
def _arbitration_forward_kernel(
    r, v, copy, gain, copy_bias, novelty_weight, gain_bias, mixed, tokens,
    r_row, r_head, r_token, v_row, v_head, v_token, copy_row, copy_head, copy_token, gain_row, gain_head, gain_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """mixed of one head and some tokens."""
    row, head, first = _place(tokens, HEADS, BLOCK_T * TILES)
    r += (row * r_row + head.to(tl.int64) * r_head) * WIDTH
    v += (row * v_row + head.to(tl.int64) * v_head) * WIDTH
    copy += row * copy_row + head.to(tl.int64) * copy_head
    gain += row * gain_row + head.to(tl.int64) * gain_head
    mixed += (row * tokens * HEADS + head) * WIDTH
    copy_bias_ = tl.load(copy_bias + head)
    weight = tl.load(novelty_weight + head)
    gain_bias_ = tl.load(gain_bias + head)
    for tile in tl.range(TILES, num_stages=STAGES):
        token = first + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = token < tokens
        r_tile = _load(r, token, valid, r_token, WIDTH, BLOCK_D)
        v_tile = _load(v, token, valid, v_token, WIDTH, BLOCK_D)
        copy_tile = tl.load(copy + token.to(tl.int64) * copy_token, mask=valid, other=0.0)
        gain_tile = tl.load(gain + token.to(tl.int64) * gain_token, mask=valid, other=0.0)
        cosine, _, _ = _compare(r_tile, v_tile)
        pi, not_pi = sigmoids(copy_tile + copy_bias_ - weight * (1.0 - cosine) * 0.5)
        read_factor = softplus(gain_tile + gain_bias_) * pi
        out = r_tile * read_factor[:, None] + v_tile * not_pi[:, None]
        _store(mixed, token, valid, HEADS, out, WIDTH, BLOCK_D)


@triton.jit
def _arbitration_backward_kernel(
    r, v, copy, gain, copy_bias, novelty_weight, gain_bias, dmixed, dr, dv, dcopy, dgain, dparameters, tokens,
    r_row, r_head, r_token, v_row, v_head, v_token, copy_row, copy_head, copy_token, gain_row, gain_head, gain_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dr, dv [B, h, L, d], dcopy and dgain [B, h, L] of one head and some tokens, and their share of dparameters."""
    row, head, first = _place(tokens, HEADS, BLOCK_T * TILES)
    r += (row * r_row + head.to(tl.int64) * r_head) * WIDTH
    v += (row * v_row + head.to(tl.int64) * v_head) * WIDTH
    copy += row * copy_row + head.to(tl.int64) * copy_head
    gain += row * gain_row + head.to(tl.int64) * gain_head
    dmixed += (row * tokens * HEADS + head) * WIDTH
    row_start = (row * HEADS + head) * tokens
    dr += row_start * WIDTH
    dv += row_start * WIDTH
    dcopy += row_start
    dgain += row_start
    copy_bias_ = tl.load(copy_bias + head)
    weight = tl.load(novelty_weight + head)
    gain_bias_ = tl.load(gain_bias + head)
    copy_sum = tl.zeros([BLOCK_T], tl.float32)
    weight_sum = tl.zeros([BLOCK_T], tl.float32)
    gain_sum = tl.zeros([BLOCK_T], tl.float32)
    for tile in tl.range(TILES, num_stages=STAGES):
        token = first + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = token < tokens
        r_tile = _load(r, token, valid, r_token, WIDTH, BLOCK_D)
        v_tile = _load(v, token, valid, v_token, WIDTH, BLOCK_D)
        o_tile = _load(dmixed, token, valid, HEADS, WIDTH, BLOCK_D)
        copy_tile = tl.load(copy + token.to(tl.int64) * copy_token, mask=valid, other=0.0)
        gain_tile = tl.load(gain + token.to(tl.int64) * gain_token, mask=valid, other=0.0)
        cosine, r_norm, v_norm = _compare(r_tile, v_tile)
        novelty = (1.0 - cosine) * 0.5
        pi, not_pi = sigmoids(copy_tile + copy_bias_ - weight * novelty)
        gain_logit = gain_tile + gain_bias_
        read_gain = softplus(gain_logit)
        gain_slope, _ = sigmoids(gain_logit)
        o_r = tl.sum(o_tile * r_tile, 1)
        o_v = tl.sum(o_tile * v_tile, 1)
        dz = (read_gain * o_r - o_v) * pi * not_pi
        dgain_tile = pi * o_r * gain_slope
        dcosine = 0.5 * weight * dz
        cross = dcosine / r_norm / v_norm
        r_pull = tl.where(r_norm > _EPS, dcosine * cosine / r_norm / r_norm, 0.0)
        v_pull = tl.where(v_norm > _EPS, dcosine * cosine / v_norm / v_norm, 0.0)
        dr_tile = o_tile * (read_gain * pi)[:, None] + v_tile * cross[:, None] - r_tile * r_pull[:, None]
        dv_tile = o_tile * not_pi[:, None] + r_tile * cross[:, None] - v_tile * v_pull[:, None]
        _store(dr, token, valid, 1, dr_tile, WIDTH, BLOCK_D)
        _store(dv, token, valid, 1, dv_tile, WIDTH, BLOCK_D)
        tl.store(dcopy + token, dz, mask=valid)
        tl.store(dgain + token, dgain_tile, mask=valid)
        # A token past the row's end has r = v = o = 0, and so adds 0.
        copy_sum += dz
        weight_sum -= dz * novelty
        gain_sum += dgain_tile
    blocks = tl.num_programs(0).to(tl.int64)
    tl.store(dparameters + tl.program_id(0), tl.sum(copy_sum, 0))
    tl.store(dparameters + blocks + tl.program_id(0), tl.sum(weight_sum, 0))
    tl.store(dparameters + 2 * blocks + tl.program_id(0), tl.sum(gain_sum, 0))


def _by_heads(x_BhLd: Tensor) -> Tensor:
    """The tensor, copied unless its channels are neighbours and its other strides multiples of their number."""
    *outer, channel = x_BhLd.stride()
    aligned = all(stride % x_BhLd.shape[3] == 0 for stride in outer)
    return x_BhLd if channel == 1 and aligned else x_BhLd.contiguous()


def _strides(r: Tensor, v: Tensor, copy: Tensor, gain: Tensor) -> dict[str, int]:
    """Strides as the kernels name them: those of r and v in units of the head's width."""
    width = r.shape[3]
    found = {}
    for name, tensor, unit in (("r", r, width), ("v", v, width), ("copy", copy, 1), ("gain", gain, 1)):
        for axis, stride in zip(("row", "head", "token"), tensor.stride(), strict=False):
            found[f"{name}_{axis}"] = stride // unit
    return found


def _programs(r: Tensor, launch: Launch) -> int:
    rows, heads, tokens, _ = r.shape
    return rows * triton.cdiv(tokens, launch.blocks["BLOCK_T"] * launch.blocks["TILES"]) * heads


class _Arbitrate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, v: Tensor, copy: Tensor, gain: Tensor, *parameters_h: Tensor) -> Tensor:
        r, v = _by_heads(r), _by_heads(v)
        rows, heads, tokens, width = r.shape
        mixed = torch.empty((rows * tokens, heads * width), dtype=r.dtype, device=r.device)
        launch = pinned(FORWARD, r.device)
        constants = {"HEADS": heads, "WIDTH": width, "BLOCK_D": triton.next_power_of_2(width)}
        strides = _strides(r, v, copy, gain)
        _arbitration_forward_kernel[(_programs(r, launch),)](
            r, v, copy, gain, *parameters_h, mixed, tokens, **strides, **constants, **launch.options()
        )
        ctx.save_for_backward(r, v, copy, gain, *parameters_h)
        ctx.constants = {**strides, **constants}
        return mixed

    @staticmethod
    def backward(ctx: Any, dmixed: Tensor) -> tuple[Tensor, ...]:
        r, v, copy, gain, *parameters_h = ctx.saved_tensors
        tokens = r.shape[2]
        dr = torch.empty(r.shape, dtype=r.dtype, device=r.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        dcopy = torch.empty(copy.shape, dtype=copy.dtype, device=r.device)
        dgain = torch.empty(gain.shape, dtype=gain.dtype, device=r.device)
        launch = pinned(BACKWARD, r.device)
        programs = _programs(r, launch)
        dparameters = torch.empty((3, programs // r.shape[1], r.shape[1]), dtype=torch.float32, device=r.device)
        _arbitration_backward_kernel[(programs,)](
            r, v, copy, gain, *parameters_h, dmixed.contiguous(), dr, dv, dcopy, dgain, dparameters, tokens,
            **ctx.constants, **launch.options(),
        )  # fmt: skip
        sums = sum_partials(dparameters)
        return dr, dv, dcopy, dgain, *(s.to(p.dtype) for s, p in zip(sums, parameters_h, strict=True))


def arbitrate_triton(
    r_BhLd: Tensor,
    v_BhLd: Tensor,
    copy_BhL: Tensor,
    gain_BhL: Tensor,
    copy_bias_h: Tensor,
    novelty_weight_h: Tensor,
    read_gain_bias_h: Tensor,
) -> Tensor:
    """`arbitration.arbitrate` on the kernels."""
    parameters_h = (x.contiguous() for x in (copy_bias_h, novelty_weight_h, read_gain_bias_h))
    return _Arbitrate.apply(r_BhLd, v_BhLd, copy_BhL, gain_BhL, *parameters_h)


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at the widths of ns-2b, in bf16."""
    dense = dict.fromkeys(("r", "v", "mixed", "dmixed", "dr", "dv"), "*bf16")
    logits = ("copy", "gain", "copy_bias", "novelty_weight", "gain_bias", "dcopy", "dgain", "dparameters")
    types: dict[str, str | int] = {**dense, **dict.fromkeys(logits, "*fp32"), "tokens": 4096}
    for names, units in ((("r", "v"), 1), (("copy", "gain"), 80)):  # in units of WIDTH, and two logits a head and token
        strides = {"row": 4096 * 40 * units, "head": 1, "token": 40 * units}
        types |= {f"{name}_{axis}": stride for name in names for axis, stride in strides.items()}
    constants = {"HEADS": 40, "WIDTH": 64, "BLOCK_D": 64}
    for name, kernel in ((FORWARD, _arbitration_forward_kernel), (BACKWARD, _arbitration_backward_kernel)):
        arguments = {argument: kind for argument, kind in types.items() if argument in kernel.arg_names}
        yield CompileCase(name, kernel, arguments, constants)
