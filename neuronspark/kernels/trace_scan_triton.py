# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
# ruff: noqa: RUF005 (Triton has no starred tuples)
"""The trace's Triton kernels: three short kernels forward, three backward, over chunks of a row.

With sigma = 1 - lambda (the share of the new input), formed from a logit (sigmoid(logit + bias)) or from log lambda:

    c_t = c_{t-1} + sigma_t (u_t - c_{t-1})
    g_t = dc_t + h_{t+1},  h_t = g_t - sigma_t g_t          from the right; h is what reaches the token before
    du = sigma g;  dlog_lambda = lambda g (c_{t-1} - u);  dlogit = -sigma dlog_lambda;  dbias = sum_t dlogit

Written with sigma, not with lambda, a step's rounding is that of its result alone: an fp32 lambda of 0.999996 (an
e-fold of 256K tokens) is off by 1 % of sigma, and one of 1 - 1e-9 is 1.

Forward: `_ends_kernel` runs every chunk from zero and keeps its last c and the sum of its log lambda; `_carry_kernel`
runs over the chunks' ends, [rows, chunks, K], and gives what enters each chunk; `_trace_kernel` runs every chunk again
from there and writes c. Backward: `_adjoint_ends_kernel`, `_carry_kernel` from the right, `_trace_backward_kernel`,
which needs c_{t-1} in fp32: the forward keeps c at every STEP-th token, and the backward runs STEP tokens forward from
it, keeps what it needs of them in registers, and comes back.

A program is one warp with BLOCK_K channels of one chunk; it takes STEP tokens at a time: all their loads first, so that
they are in flight together, then the recurrence. A thread owns its channels: there is no exchange and no barrier.
Nothing is summed across programs but dbias: a partial sum a chunk, then `sum_partials`.

Bytes a token and channel in bf16: the floor is 6 forward (u, logit, c) and 10 backward (u, logit, dc, du, dlogit), for
16,384 tokens of 640 channels 63 MB and 105 MB, 15 and 25 us at 4.2 TB/s. Moved are 10 and 14, and 1 for what is kept,
since two inputs are read twice; of 42 MB, the second reading finds a good part in the L2 cache.

Shapes: B rows, L tokens, C chunks, K channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels.exponential_kernels import one_minus_exp, sigmoids, softplus
from neuronspark.kernels.launch import ANY, CompileCase, Launch, pinned, register
from neuronspark.kernels.partial_sums_triton import sum_partials

_DEFAULT = Launch({"CHUNK": 64, "STEP": 8, "BLOCK_K": 64}, num_warps=1)
CONFIGURATION = register("trace_scan", {ANY: _DEFAULT})
"""One for the kernels over tokens: CHUNK tokens a program, STEP at a time; chunk ends pass from kernel to kernel."""
_CARRY = Launch({"STEP": 32, "BLOCK_K": 32}, num_warps=1)
CARRY_CONFIGURATION = register("trace_scan/carry", {ANY: _CARRY})
"""STEP chunk ends at a time; no choice changes a result."""
CANDIDATES = {
    CONFIGURATION: [
        _DEFAULT,
        Launch({"CHUNK": 128, "STEP": 16, "BLOCK_K": 64}, num_warps=1),
        Launch({"CHUNK": 64, "STEP": 8, "BLOCK_K": 128}, num_warps=1),
        Launch({"CHUNK": 64, "STEP": 16, "BLOCK_K": 64}, num_warps=1),
        Launch({"CHUNK": 64, "STEP": 16, "BLOCK_K": 128}, num_warps=2),
    ],
    CARRY_CONFIGURATION: [_CARRY, Launch({"STEP": 16, "BLOCK_K": 32}, num_warps=1)],
}


@triton.jit
def _shares(decay, bias, LOGIT: tl.constexpr):
    """(1 - lambda, lambda) of a decay logit, or of log lambda."""
    if LOGIT:
        share, keep = sigmoids(decay.to(tl.float32) + bias)
    else:
        share, keep = one_minus_exp(decay), tl.exp(decay)
    return share, keep


@triton.jit
def _log_keep(decay, bias, LOGIT: tl.constexpr):
    """log lambda."""
    if LOGIT:
        log_keep = -softplus(decay.to(tl.float32) + bias)
    else:
        log_keep = decay
    return log_keep


@triton.jit
def _place(tokens, chunks, CHUNK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(this program's chunk in [B C], its first token in [B L], tokens from there to the row's end, channels)."""
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    index = tl.program_id(0) // blocks
    row, chunk = index // chunks, index % chunks
    channel = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    return index.to(tl.int64), row.to(tl.int64) * tokens + chunk * CHUNK, tokens - chunk * CHUNK, channel


@triton.jit
def _load_rows(pointers, valid, first, left, other, STRIDE: tl.constexpr, STEP: tl.constexpr):
    """A tuple of STEP tokens' channels from token `first` on; `other` where there are not so many `left`."""
    rows = ()
    for i in tl.static_range(STEP):
        rows = rows + (tl.load(pointers + (first + i) * STRIDE, mask=valid & (first + i < left), other=other),)
    return rows


@triton.jit
def _load_bias(bias, channel, valid, BLOCK_K: tl.constexpr, LOGIT: tl.constexpr):
    if LOGIT:
        values = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    else:
        values = tl.zeros([BLOCK_K], tl.float32)
    return values


@triton.jit
def _ends_kernel(
    u, decay, bias, ends, log_sums, tokens, chunks,
    K: tl.constexpr, U_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, LOGIT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c at the end of each chunk that starts from zero, and the sum of the chunk's log lambda: [B, C, K] fp32."""
    index, first, left, channel = _place(tokens, chunks, CHUNK, K, BLOCK_K)
    valid = channel < K
    absent: tl.constexpr = float("-inf") if LOGIT else 0.0
    bias_K = _load_bias(bias, channel, valid, BLOCK_K, LOGIT)
    u += first * U_STRIDE + channel
    decay += first * DECAY_STRIDE + channel
    c = tl.zeros([BLOCK_K], tl.float32)
    log_sum = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, CHUNK, STEP):
        us = _load_rows(u, valid, start, left, 0.0, U_STRIDE, STEP)
        decays = _load_rows(decay, valid, start, left, absent, DECAY_STRIDE, STEP)
        for i in tl.static_range(STEP):
            share, _ = _shares(decays[i], bias_K, LOGIT)
            c += share * (us[i].to(tl.float32) - c)
            log_sum += _log_keep(decays[i], bias_K, LOGIT)
    tl.store(ends + index * K + channel, c, mask=valid)
    tl.store(log_sums + index * K + channel, log_sum, mask=valid)


@triton.jit
def _carry_kernel(
    ends, log_sums, carries, chunks, K: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr
):
    """What enters each chunk of a row: carry = end + exp(log_sum) carry of the chunk before (after, if REVERSE)."""
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    valid = channel < K
    stride: tl.constexpr = -K if REVERSE else K
    first = row * chunks * K + channel
    if REVERSE:
        first += (chunks - 1) * K
    carry = tl.zeros([BLOCK_K], tl.float32)
    done = 0
    while done < chunks:
        chunk_ends = _load_rows(ends + first, valid, done, chunks, 0.0, stride, STEP)
        chunk_logs = _load_rows(log_sums + first, valid, done, chunks, 0.0, stride, STEP)
        for i in tl.static_range(STEP):
            tl.store(carries + first + (done + i) * stride, carry, mask=valid & (done + i < chunks))
            carry += chunk_ends[i] - one_minus_exp(chunk_logs[i]) * carry
        done += STEP


@triton.jit
def _trace_kernel(
    u, decay, bias, carries, c_out, starts, tokens, chunks,
    K: tl.constexpr, U_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, LOGIT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c [B, L, K] from what enters each chunk, and c before every STEP-th token, [B, C, CHUNK / STEP, K] fp32."""
    index, first, left, channel = _place(tokens, chunks, CHUNK, K, BLOCK_K)
    valid = channel < K
    absent: tl.constexpr = float("-inf") if LOGIT else 0.0
    bias_K = _load_bias(bias, channel, valid, BLOCK_K, LOGIT)
    u += first * U_STRIDE + channel
    decay += first * DECAY_STRIDE + channel
    c_out += first * K + channel
    starts += index * (CHUNK // STEP) * K + channel
    c = tl.load(carries + index * K + channel, mask=valid, other=0.0)
    for start in range(0, CHUNK, STEP):
        us = _load_rows(u, valid, start, left, 0.0, U_STRIDE, STEP)
        decays = _load_rows(decay, valid, start, left, absent, DECAY_STRIDE, STEP)
        tl.store(starts + start // STEP * K, c, mask=valid)
        for i in tl.static_range(STEP):
            share, _ = _shares(decays[i], bias_K, LOGIT)
            c += share * (us[i].to(tl.float32) - c)
            tl.store(c_out + (start + i) * K, c.to(c_out.dtype.element_ty), mask=valid & (start + i < left))


@triton.jit
def _adjoint_ends_kernel(
    dc, decay, bias, ends, tokens, chunks,
    K: tl.constexpr, DC_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, LOGIT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h that leaves each chunk to the left when nothing enters it from the right: [B, C, K] fp32."""
    index, first, left, channel = _place(tokens, chunks, CHUNK, K, BLOCK_K)
    valid = channel < K
    absent: tl.constexpr = float("-inf") if LOGIT else 0.0
    bias_K = _load_bias(bias, channel, valid, BLOCK_K, LOGIT)
    dc += first * DC_STRIDE + channel
    decay += first * DECAY_STRIDE + channel
    h = tl.zeros([BLOCK_K], tl.float32)
    for done in range(0, CHUNK, STEP):
        start = CHUNK - STEP - done
        dcs = _load_rows(dc, valid, start, left, 0.0, DC_STRIDE, STEP)
        decays = _load_rows(decay, valid, start, left, absent, DECAY_STRIDE, STEP)
        for i in tl.static_range(STEP - 1, -1, -1):
            share, _ = _shares(decays[i], bias_K, LOGIT)
            g = dcs[i].to(tl.float32) + h
            h = g - share * g
    tl.store(ends + index * K + channel, h, mask=valid)


@triton.jit
def _trace_backward_kernel(
    u, decay, bias, dc, starts, carries, du, ddecay, dbias, tokens, chunks,
    K: tl.constexpr, U_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, DC_STRIDE: tl.constexpr, LOGIT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """du and the decays' gradient [B, L, K], and the chunk's share of dbias [B, C, K] fp32."""
    index, first, left, channel = _place(tokens, chunks, CHUNK, K, BLOCK_K)
    valid = channel < K
    absent: tl.constexpr = float("-inf") if LOGIT else 0.0
    bias_K = _load_bias(bias, channel, valid, BLOCK_K, LOGIT)
    u += first * U_STRIDE + channel
    decay += first * DECAY_STRIDE + channel
    dc += first * DC_STRIDE + channel
    du += first * K + channel
    ddecay += first * K + channel
    starts += index * (CHUNK // STEP) * K + channel
    h = tl.load(carries + index * K + channel, mask=valid, other=0.0)
    dbias_K = tl.zeros([BLOCK_K], tl.float32)
    for done in range(0, CHUNK, STEP):
        start = CHUNK - STEP - done
        us = _load_rows(u, valid, start, left, 0.0, U_STRIDE, STEP)
        decays = _load_rows(decay, valid, start, left, absent, DECAY_STRIDE, STEP)
        dcs = _load_rows(dc, valid, start, left, 0.0, DC_STRIDE, STEP)
        c = tl.load(starts + start // STEP * K, mask=valid, other=0.0)
        shares, slopes = (), ()
        for i in tl.static_range(STEP):
            share, keep = _shares(decays[i], bias_K, LOGIT)
            new = us[i].to(tl.float32) - c
            c += share * new
            shares, slopes = shares + (share,), slopes + (keep * new,)
        for i in tl.static_range(STEP - 1, -1, -1):
            share = shares[i]
            g = dcs[i].to(tl.float32) + h
            h = g - share * g
            slope = g * slopes[i]
            if LOGIT:
                slope = slope * share
                dbias_K += slope
            else:
                slope = -slope
            mask = valid & (start + i < left)
            tl.store(du + (start + i) * K, (share * g).to(du.dtype.element_ty), mask=mask)
            tl.store(ddecay + (start + i) * K, slope.to(ddecay.dtype.element_ty), mask=mask)
    if LOGIT:
        tl.store(dbias + index * K + channel, dbias_K, mask=valid)


def _by_rows(x_BLK: Tensor) -> Tensor:
    """The tensor, copied if its channels are not neighbours or its rows do not follow each other at one stride."""
    rows, tokens, _ = x_BLK.shape
    one_stride = rows == 1 or x_BLK.stride(0) == tokens * x_BLK.stride(1)
    return x_BLK if x_BLK.stride(2) == 1 and one_stride else x_BLK.contiguous()


class _Grid:
    """How many chunks and programs a [B, L, K] tensor has under a launch configuration."""

    def __init__(self, x_BLK: Tensor) -> None:
        self.rows, self.tokens, self.channels = x_BLK.shape
        self.launch = pinned(CONFIGURATION, x_BLK.device)
        self.chunks = triton.cdiv(self.tokens, self.launch.blocks["CHUNK"])
        self.programs = self.rows * self.chunks * triton.cdiv(self.channels, self.launch.blocks["BLOCK_K"])
        self.ends_shape = (self.rows, self.chunks, self.channels)
        self.starts_shape = (
            self.rows,
            self.chunks,
            self.launch.blocks["CHUNK"] // self.launch.blocks["STEP"],
            self.channels,
        )

    def carry(self, ends_BCK: Tensor, log_sums_BCK: Tensor, *, reverse: bool) -> Tensor:
        """What enters every chunk from its left, or from its right."""
        carries_BCK = torch.empty_like(ends_BCK)
        launch = pinned(CARRY_CONFIGURATION, ends_BCK.device)
        programs = self.rows * triton.cdiv(self.channels, launch.blocks["BLOCK_K"])
        _carry_kernel[(programs,)](
            ends_BCK, log_sums_BCK, carries_BCK, self.chunks, K=self.channels, REVERSE=reverse, **launch.options()
        )
        return carries_BCK


class _Trace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_BLK: Tensor, decay_BLK: Tensor, bias_K: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        u_BLK, decay_BLK = _by_rows(u_BLK), _by_rows(decay_BLK)
        grid = _Grid(u_BLK)
        ends_BCK = torch.empty(grid.ends_shape, dtype=torch.float32, device=u_BLK.device)
        log_sums_BCK = torch.empty_like(ends_BCK)
        starts = torch.empty(grid.starts_shape, dtype=torch.float32, device=u_BLK.device)
        c_BLK = torch.empty(u_BLK.shape, dtype=out_dtype, device=u_BLK.device)
        constants = {
            "K": grid.channels,
            "U_STRIDE": u_BLK.stride(1),
            "DECAY_STRIDE": decay_BLK.stride(1),
            "LOGIT": bias_K is not None,
            **grid.launch.options(),
        }
        sizes = (grid.tokens, grid.chunks)
        _ends_kernel[(grid.programs,)](u_BLK, decay_BLK, bias_K, ends_BCK, log_sums_BCK, *sizes, **constants)
        carries_BCK = grid.carry(ends_BCK, log_sums_BCK, reverse=False)
        _trace_kernel[(grid.programs,)](u_BLK, decay_BLK, bias_K, carries_BCK, c_BLK, starts, *sizes, **constants)
        ctx.save_for_backward(u_BLK, decay_BLK, bias_K, log_sums_BCK, starts)
        return c_BLK

    @staticmethod
    def backward(ctx: Any, dc_BLK: Tensor) -> tuple[Tensor | None, ...]:
        u_BLK, decay_BLK, bias_K, log_sums_BCK, starts = ctx.saved_tensors
        dc_BLK = _by_rows(dc_BLK)
        grid = _Grid(u_BLK)
        ends_BCK = torch.empty_like(log_sums_BCK)
        du_BLK = torch.empty(u_BLK.shape, dtype=u_BLK.dtype, device=u_BLK.device)
        ddecay_BLK = torch.empty(u_BLK.shape, dtype=decay_BLK.dtype, device=u_BLK.device)
        dbias_BCK = None if bias_K is None else torch.empty_like(log_sums_BCK)
        constants = {
            "K": grid.channels,
            "DECAY_STRIDE": decay_BLK.stride(1),
            "DC_STRIDE": dc_BLK.stride(1),
            "LOGIT": bias_K is not None,
            **grid.launch.options(),
        }
        sizes = (grid.tokens, grid.chunks)
        _adjoint_ends_kernel[(grid.programs,)](dc_BLK, decay_BLK, bias_K, ends_BCK, *sizes, **constants)
        carries_BCK = grid.carry(ends_BCK, log_sums_BCK, reverse=True)
        _trace_backward_kernel[(grid.programs,)](
            u_BLK, decay_BLK, bias_K, dc_BLK, starts, carries_BCK, du_BLK, ddecay_BLK, dbias_BCK, *sizes,
            U_STRIDE=u_BLK.stride(1), **constants,
        )  # fmt: skip
        dbias_K = None if dbias_BCK is None else sum_partials(dbias_BCK.flatten(0, 1)[None])[0].to(bias_K.dtype)
        return du_BLK, ddecay_BLK, dbias_K, None


def trace_scan_triton(u_BLK: Tensor, log_decay_BLK: Tensor) -> Tensor:
    """`trace_scan.trace_scan` on the kernels."""
    return _Trace.apply(u_BLK, log_decay_BLK, None, log_decay_BLK.dtype)


def trace_of_logits_triton(u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
    """`trace_scan.trace_of_logits` on the kernels."""
    return _Trace.apply(u_BLK, logit_BLK, bias_K, u_BLK.dtype)


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel at the trace width of ns-2b: from bf16 logits, and from fp32 log decays."""
    channels = 640
    for reverse in (False, True):
        carry: dict[str, str | int] = {"ends": "*fp32", "log_sums": "*fp32", "carries": "*fp32", "chunks": 64}
        yield CompileCase(CARRY_CONFIGURATION, _carry_kernel, carry, {"K": channels, "REVERSE": reverse})
    for logit, kernel in itertools.product((True, False), _KERNELS):
        dense = "*bf16" if logit else "*fp32"
        types: dict[str, str | int] = dict.fromkeys(("bias", "ends", "log_sums", "carries", "starts", "dbias"), "*fp32")
        types |= dict.fromkeys(("u", "decay", "c_out", "dc", "du", "ddecay"), dense)
        types |= {"tokens": 4096, "chunks": 64}
        constants: dict[str, Any] = {"K": channels, "U_STRIDE": channels, "DECAY_STRIDE": channels, "LOGIT": logit}
        constants["DC_STRIDE"] = channels + 2560  # a part of the gradient of [x ; c]
        if not logit:
            constants |= {"bias": None, "dbias": None}
        names = set(kernel.arg_names)
        yield CompileCase(
            CONFIGURATION,
            kernel,
            {name: kind for name, kind in types.items() if name in names and name not in constants},
            {name: value for name, value in constants.items() if name in names},
        )


_KERNELS = (_ends_kernel, _trace_kernel, _adjoint_ends_kernel, _trace_backward_kernel)
