# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The addresses' Triton kernels: one forward, one backward, each touching every number once.

Bytes of a token (bf16): forward 2 (2 D + r) read and 4 h a written, at ns-2b (40 heads of 64, r = 32) 25.7 KB, 421 MB
for 16,384 tokens, 0.10 ms at 4.2 TB/s; backward 4 h a + 2 (2 D + r) read and the last again written, 36 KB, 0.14 ms.
The rotary table and p are read once a block of tokens.

Forward: a program has BLOCK_T tokens of a row and HEADS_PER_PROGRAM heads, and loops over the heads with cosines, sines
and both p in registers. The halves of a head that are turned against each other are two tiles, so a turn needs no
exchange; sums over channels stay inside four threads.

Backward: nothing but q, k and p is kept; norms are formed again. With e the gradient turned back, x the input, and
s = 1 / rms(x), all of one head and token,

    dx = s gain (e - s^2 x (e . x) / d)          dgain = sum over tokens of s (e . x)

A program has BLOCK_T tokens and loops over all heads, so that p's gradient (a sum over heads; key's part comes from the
token after) is summed in registers, in the heads' order. The gains' sums over a program's tokens go to a buffer of
[2, programs, h], which `sum_partials` adds in a fixed order. One warp a program keeps those sums inside a warp.

Shapes: B rows, L tokens, T = B L, h heads of d channels in two halves, D = h d, r match width, a = d + r.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels.addresses import MATCH_SHARPNESS, QUERY_SHARPNESS
from neuronspark.kernels.launch import ANY, CompileCase, Launch, pinned, register
from neuronspark.kernels.partial_sums_triton import sum_partials


def _forward(tokens: int, heads: int, warps: int, stages: int = 1) -> Launch:
    return Launch({"BLOCK_T": tokens, "HEADS_PER_PROGRAM": heads, "STAGES": stages}, num_warps=warps)


def _backward(tokens: int, warps: int, stages: int = 1) -> Launch:
    return Launch({"BLOCK_T": tokens, "STAGES": stages}, num_warps=warps)


_FORWARD = _forward(32, 4, 4)
_BACKWARD = _backward(8, 1)
FORWARD = register("addresses/forward", {ANY: _FORWARD, "sm_90": _forward(8, 4, 1, 2)})
BACKWARD = register("addresses/backward", {ANY: _BACKWARD})
CANDIDATES = {
    FORWARD: [_forward(8, 4, 1, 2), _forward(32, 4, 4, 2), _forward(16, 4, 2), _FORWARD],
    BACKWARD: [_BACKWARD, _backward(16, 2, 2), _backward(8, 1, 2)],
}
"""Configurations to time for each pinned one, an H200's first."""


@triton.jit
def _tile(base, token, valid, offset, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to channels offset ... offset + WIDTH of tokens, and where they are."""
    channel = tl.arange(0, BLOCK)
    place = base + token.to(tl.int64)[:, None] * STRIDE + (offset + channel)[None, :]
    return place, valid[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def _load(base, token, valid, offset, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pointers, mask = _tile(base, token, valid, offset, STRIDE, WIDTH, BLOCK)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(base, token, valid, offset, value, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pointers, mask = _tile(base, token, valid, offset, STRIDE, WIDTH, BLOCK)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _block(index, tokens, BLOCK_T: tl.constexpr):
    """A block's (row, its row's tokens before it in all [B L], its tokens inside the row)."""
    blocks = (tokens + BLOCK_T - 1) // BLOCK_T
    row = (index // blocks).to(tl.int64)
    return row, row * tokens, index % blocks * BLOCK_T + tl.arange(0, BLOCK_T)


@triton.jit
def _inverse_rms(sum_of_squares, EPS: tl.constexpr, WIDTH: tl.constexpr):
    return 1.0 / tl.sqrt(sum_of_squares / WIDTH + EPS)


@triton.jit
def _addresses_forward_kernel(
    q, k, p, p_before, cos, sin, query_gain, match_gain, query, key, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, MATCH: tl.constexpr, EPS: tl.constexpr,
    QUERY_SCALE: tl.constexpr, MATCH_SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, P_STRIDE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_MATCH: tl.constexpr, BLOCK_T: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Queries and keys of a block of tokens and some heads."""
    WIDTH: tl.constexpr = 2 * HALF
    ADDRESS: tl.constexpr = WIDTH + MATCH
    groups: tl.constexpr = (HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    first_head = tl.program_id(0) % groups * HEADS_PER_PROGRAM
    row, row_start, token = _block(tl.program_id(0) // groups, tokens, BLOCK_T)
    in_row = token < tokens
    q += row_start * Q_STRIDE
    k += row_start * K_STRIDE
    p += row_start * P_STRIDE
    cosine = _load(cos, token, in_row, 0, HALF, HALF, BLOCK_HALF)
    sine = _load(sin, token, in_row, 0, HALF, HALF, BLOCK_HALF)
    now = _load(p, token, in_row, 0, P_STRIDE, MATCH, BLOCK_MATCH)
    now *= _inverse_rms(tl.sum(now * now, 1), EPS, MATCH)[:, None]
    before = _load(p, token - 1, in_row & (token > 0), 0, P_STRIDE, MATCH, BLOCK_MATCH)
    if p_before is not None:
        before += _load(p_before + row * MATCH, token, token == 0, 0, MATCH, MATCH, BLOCK_MATCH)
    before *= _inverse_rms(tl.sum(before * before, 1), EPS, MATCH)[:, None]
    for i in tl.range(HEADS_PER_PROGRAM, num_stages=STAGES):
        head = first_head + i
        valid = in_row & (head < HEADS)
        out = (row * HEADS + head) * tokens * ADDRESS
        channel = head * WIDTH
        q1 = _load(q, token, valid, channel, Q_STRIDE, HALF, BLOCK_HALF)
        q2 = _load(q, token, valid, channel + HALF, Q_STRIDE, HALF, BLOCK_HALF)
        k1 = _load(k, token, valid, channel, K_STRIDE, HALF, BLOCK_HALF)
        k2 = _load(k, token, valid, channel + HALF, K_STRIDE, HALF, BLOCK_HALF)
        gain = tl.load(query_gain + head, mask=head < HEADS, other=0.0).to(tl.float32) * QUERY_SCALE
        beta = tl.load(match_gain + head, mask=head < HEADS, other=0.0).to(tl.float32) * MATCH_SCALE
        q_scale = (_inverse_rms(tl.sum(q1 * q1 + q2 * q2, 1), EPS, WIDTH) * gain)[:, None]
        k_scale = _inverse_rms(tl.sum(k1 * k1 + k2 * k2, 1), EPS, WIDTH)[:, None]
        _store(query + out, token, valid, 0, (q1 * cosine - q2 * sine) * q_scale, ADDRESS, HALF, BLOCK_HALF)
        _store(query + out, token, valid, HALF, (q2 * cosine + q1 * sine) * q_scale, ADDRESS, HALF, BLOCK_HALF)
        _store(query + out, token, valid, WIDTH, now * beta, ADDRESS, MATCH, BLOCK_MATCH)
        _store(key + out, token, valid, 0, (k1 * cosine - k2 * sine) * k_scale, ADDRESS, HALF, BLOCK_HALF)
        _store(key + out, token, valid, HALF, (k2 * cosine + k1 * sine) * k_scale, ADDRESS, HALF, BLOCK_HALF)
        _store(key + out, token, valid, WIDTH, before, ADDRESS, MATCH, BLOCK_MATCH)


@triton.jit
def _turn_back(
    x, dx, dout, token, valid, channel, cosine, sine, gain,
    STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, DOUT_STRIDE: tl.constexpr,
    HALF: tl.constexpr, EPS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one head's norm and turn; returns the sum over channels of dout times the turned norm."""
    WIDTH: tl.constexpr = 2 * HALF
    x1 = _load(x, token, valid, channel, STRIDE, HALF, BLOCK_HALF)
    x2 = _load(x, token, valid, channel + HALF, STRIDE, HALF, BLOCK_HALF)
    d1 = _load(dout, token, valid, 0, DOUT_STRIDE, HALF, BLOCK_HALF)
    d2 = _load(dout, token, valid, HALF, DOUT_STRIDE, HALF, BLOCK_HALF)
    e1 = d1 * cosine + d2 * sine
    e2 = d2 * cosine - d1 * sine
    scale = _inverse_rms(tl.sum(x1 * x1 + x2 * x2, 1), EPS, WIDTH)
    inner = tl.sum(e1 * x1 + e2 * x2, 1) * scale
    pull = (inner * scale / WIDTH)[:, None]
    factor = (scale * gain)[:, None]
    _store(dx, token, valid, channel, (e1 - x1 * pull) * factor, OUT_STRIDE, HALF, BLOCK_HALF)
    _store(dx, token, valid, channel + HALF, (e2 - x2 * pull) * factor, OUT_STRIDE, HALF, BLOCK_HALF)
    return inner


@triton.jit
def _addresses_backward_kernel(
    q, k, p, cos, sin, query_gain, match_gain, dquery, dkey, dq, dk, dp, dgains, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, MATCH: tl.constexpr, EPS: tl.constexpr,
    QUERY_SCALE: tl.constexpr, MATCH_SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, P_STRIDE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_MATCH: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk and dp of a block of tokens, and the block's share of the gains' gradients: dgains [2, programs, h]."""
    WIDTH: tl.constexpr = 2 * HALF
    ADDRESS: tl.constexpr = WIDTH + MATCH
    row, row_start, token = _block(tl.program_id(0), tokens, BLOCK_T)
    in_row = token < tokens
    followed = token + 1 < tokens
    q += row_start * Q_STRIDE
    k += row_start * K_STRIDE
    p += row_start * P_STRIDE
    dq += row_start * (HEADS * WIDTH)
    dk += row_start * (HEADS * WIDTH)
    dp += row_start * MATCH
    dgains += tl.program_id(0).to(tl.int64) * HEADS
    programs = tl.num_programs(0).to(tl.int64)
    cosine = _load(cos, token, in_row, 0, HALF, HALF, BLOCK_HALF)
    sine = _load(sin, token, in_row, 0, HALF, HALF, BLOCK_HALF)
    now = _load(p, token, in_row, 0, P_STRIDE, MATCH, BLOCK_MATCH)
    p_scale = _inverse_rms(tl.sum(now * now, 1), EPS, MATCH)
    now *= p_scale[:, None]
    dnow = tl.zeros([BLOCK_T, BLOCK_MATCH], tl.float32)
    for head in tl.range(HEADS, num_stages=STAGES):
        out = (row * HEADS + head) * tokens * ADDRESS
        gain = tl.load(query_gain + head).to(tl.float32) * QUERY_SCALE
        beta = tl.load(match_gain + head).to(tl.float32) * MATCH_SCALE
        dmatch = _load(dquery + out, token, in_row, WIDTH, ADDRESS, MATCH, BLOCK_MATCH)
        dpreceding = _load(dkey + out, token + 1, followed, WIDTH, ADDRESS, MATCH, BLOCK_MATCH)
        inner = _turn_back(
            q, dq, dquery + out, token, in_row, head * WIDTH, cosine, sine, gain,
            Q_STRIDE, HEADS * WIDTH, ADDRESS, HALF, EPS, BLOCK_HALF,
        )  # fmt: skip
        _turn_back(
            k, dk, dkey + out, token, in_row, head * WIDTH, cosine, sine, 1.0,
            K_STRIDE, HEADS * WIDTH, ADDRESS, HALF, EPS, BLOCK_HALF,
        )  # fmt: skip
        dnow += dmatch * beta + dpreceding
        tl.store(dgains + head, tl.sum(inner, 0) * QUERY_SCALE)
        tl.store(dgains + programs * HEADS + head, tl.sum(tl.sum(dmatch * now, 1), 0) * MATCH_SCALE)
    pull = tl.sum(dnow * now, 1) / MATCH
    _store(dp, token, in_row, 0, (dnow - now * pull[:, None]) * p_scale[:, None], MATCH, MATCH, BLOCK_MATCH)


def _constants(
    heads: int, head_width: int, match_width: int, eps: float, strides: tuple[int, int, int]
) -> dict[str, Any]:
    """The compile-time arguments that both kernels have, beside their blocks; strides are those of q, k and p."""
    return {
        "HEADS": heads,
        "HALF": head_width // 2,
        "MATCH": match_width,
        "EPS": eps,
        "QUERY_SCALE": QUERY_SHARPNESS / math.sqrt(head_width),
        "MATCH_SCALE": MATCH_SHARPNESS / match_width,
        "Q_STRIDE": strides[0],
        "K_STRIDE": strides[1],
        "P_STRIDE": strides[2],
        "BLOCK_HALF": triton.next_power_of_2(head_width // 2),
        "BLOCK_MATCH": triton.next_power_of_2(match_width),
    }


def _dense(x_TC: Tensor) -> Tensor:
    """The tensor, copied if its channels are not neighbours."""
    return x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()


class _Addresses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        p: Tensor,
        query_gain: Tensor,
        match_gain: Tensor,
        rotary: Tensor,
        tokens: int,
        eps: float,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, p = _dense(q), _dense(k), _dense(p)
        before = before if before is None else before.contiguous()
        query_gain, match_gain = query_gain.contiguous(), match_gain.contiguous()
        heads, rows = len(query_gain), q.shape[0] // tokens
        head_width, match_width = q.shape[1] // heads, p.shape[1]
        constants = _constants(heads, head_width, match_width, eps, (q.stride(0), k.stride(0), p.stride(0)))
        query = torch.empty((rows, heads, tokens, head_width + match_width), dtype=q.dtype, device=q.device)
        key = torch.empty_like(query)
        launch = pinned(FORWARD, q.device)
        blocks = rows * triton.cdiv(tokens, launch.blocks["BLOCK_T"])
        programs = blocks * triton.cdiv(heads, launch.blocks["HEADS_PER_PROGRAM"])
        cos, sin = rotary.contiguous()
        _addresses_forward_kernel[(programs,)](
            q, k, p, before, cos, sin, query_gain, match_gain, query, key, tokens, **constants, **launch.options()
        )
        ctx.save_for_backward(q, k, p, rotary, query_gain, match_gain)
        ctx.tokens, ctx.constants = tokens, constants
        return query, key

    @staticmethod
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor) -> tuple[Tensor | None, ...]:
        q, k, p, rotary, query_gain, match_gain = ctx.saved_tensors
        dquery, dkey = dquery.contiguous(), dkey.contiguous()
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dp = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        launch = pinned(BACKWARD, q.device)
        programs = q.shape[0] // ctx.tokens * triton.cdiv(ctx.tokens, launch.blocks["BLOCK_T"])
        dgains = torch.empty((2, programs, len(query_gain)), dtype=torch.float32, device=q.device)
        cos, sin = rotary.contiguous()
        _addresses_backward_kernel[(programs,)](
            q, k, p, cos, sin, query_gain, match_gain, dquery, dkey, dq, dk, dp, dgains, ctx.tokens,
            **ctx.constants, **launch.options(),
        )  # fmt: skip
        dquery_gain, dmatch_gain = sum_partials(dgains)
        gains = dquery_gain.to(query_gain.dtype), dmatch_gain.to(match_gain.dtype)
        return dq, dk, dp, *gains, None, None, None, None


def addresses_triton(
    q_TD: Tensor,
    k_TD: Tensor,
    p_Tr: Tensor,
    query_gain_h: Tensor,
    match_gain_h: Tensor,
    rotary: Tensor,
    row_tokens: int,
    eps: float,
    before_Br: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`addresses.addresses` on the kernels."""
    return _Addresses.apply(q_TD, k_TD, p_Tr, query_gain_h, match_gain_h, rotary, row_tokens, eps, before_Br)


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at the widths of ns-2b, in bf16."""
    dense = dict.fromkeys(("q", "k", "p", "query", "key", "dquery", "dkey", "dq", "dk", "dp"), "*bf16")
    types: dict[str, str | int] = {
        **dense,
        **dict.fromkeys(("cos", "sin", "query_gain", "match_gain", "dgains"), "*fp32"),
        "tokens": 4096,
    }
    constants = _constants(40, 64, 32, 1e-6, (2560, 2560, 32))
    for name, kernel in ((FORWARD, _addresses_forward_kernel), (BACKWARD, _addresses_backward_kernel)):
        arguments = {argument: kind for argument, kind in types.items() if argument in kernel.arg_names}
        if kernel is _addresses_forward_kernel:  # decoding goes on from a token before
            yield CompileCase(name, kernel, {**arguments, "p_before": "*bf16"}, constants)
        yield CompileCase(name, kernel, arguments, {**constants, "p_before": None})
