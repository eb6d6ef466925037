"""The operators that the baselines need beside those of `neuronspark.kernels`.

Each runs its Triton kernel (operators_triton.py) where NeuronSpark's operators do, and is in plain torch elsewhere,
right on any device and in float64. None has sums whose order could vary.

Shapes: B rows, L tokens, T = B L, h heads, d channels of a head, C channels, k taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32, deliver
from neuronspark.parameters import Initialiser

# --- the gate of a SwiGLU and of a state space -----------------------------------------------------------------


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TC: Tensor, x_TC: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TC, x_TC)
        if use_triton(x_TC):
            from baselines.operators_triton import silu_product_forward

            return silu_product_forward(gate_TC, x_TC)
        return functional.silu(at_least_fp32(gate_TC)).mul_(x_TC).to(x_TC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor, Tensor]:
        gate_TC, x_TC = ctx.saved_tensors
        if use_triton(x_TC):
            from baselines.operators_triton import silu_product_backward

            return silu_product_backward(gate_TC, x_TC, dy_TC)
        gate, dy = at_least_fp32(gate_TC), at_least_fp32(dy_TC)
        dgate_TC = torch.ops.aten.silu_backward(dy * x_TC, gate)
        return dgate_TC.to(gate_TC.dtype), functional.silu(gate).mul_(dy).to(x_TC.dtype)


def silu_product(gate_TC: Tensor, x_TC: Tensor) -> Tensor:
    """silu(gate) * x, formed in fp32."""
    return _SiluProduct.apply(gate_TC, x_TC)


# --- rotary embedding ------------------------------------------------------------------------------------------


def _turn(x_BLhd: Tensor, table: Tensor, forwards: bool) -> Tensor:
    """Every pair (channel i of the first half, channel i of the second) turned by its angle, or back."""
    if use_triton(x_BLhd):
        from baselines.operators_triton import turn

        return turn(x_BLhd, table, forwards)
    first, second = at_least_fp32(x_BLhd).chunk(2, -1)
    cos_L1d, sin_L1d = table[:, : x_BLhd.shape[1], None].to(first.dtype)
    sin_L1d = sin_L1d if forwards else -sin_L1d
    return torch.cat((first * cos_L1d - second * sin_L1d, second * cos_L1d + first * sin_L1d), -1).to(x_BLhd.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLhd: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return _turn(x_BLhd, table, forwards=True)

    @staticmethod
    def backward(ctx: Any, dy_BLhd: Tensor) -> tuple[Tensor, None]:
        return _turn(dy_BLhd, ctx.table, forwards=False), None


def rotate(x_BLhd: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2104.09864), half-split pairs; `table` is rotary.rotary_table's."""
    return _Rotate.apply(x_BLhd, table)


# --- the short convolution ---------------------------------------------------------------------------------------


def taps_uniform(taps: int) -> Initialiser:
    """Starting values of a convolution over so many tokens: uniform within 1 / sqrt(taps)."""
    return lambda generator, shape: (torch.rand(shape, generator=generator) * 2 - 1) * taps**-0.5


def _later(x_BLC: Tensor, tokens: int) -> Tensor:
    """The row moved `tokens` tokens later; zeros come in, what leaves the row is lost. Negative: earlier."""
    length = x_BLC.shape[1]
    moved = min(abs(tokens), length)
    if tokens >= 0:
        return functional.pad(x_BLC[:, : length - moved], (0, 0, moved, 0))
    return functional.pad(x_BLC[:, moved:], (0, 0, 0, moved))


def _convolved(x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor) -> Tensor:
    """bias + sum_j w_j x_{t - (k - 1 - j)}."""
    last = weight_Ck.shape[1] - 1
    total_BLC = x_BLC * weight_Ck[:, last] + bias_C
    for tap in range(last):
        total_BLC.addcmul_(_later(x_BLC, last - tap), weight_Ck[:, tap])
    return total_BLC


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor, with_silu: bool) -> Tensor:
        ctx.save_for_backward(x_BLC, bias_C)
        ctx.weight, ctx.with_silu = weight_Ck, with_silu
        if use_triton(x_BLC):
            from baselines.operators_triton import convolution_forward

            return convolution_forward(x_BLC, weight_Ck, bias_C, with_silu)
        sums_BLC = _convolved(at_least_fp32(x_BLC), at_least_fp32(weight_Ck), bias_C)
        return (functional.silu(sums_BLC) if with_silu else sums_BLC).to(x_BLC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BLC: Tensor) -> tuple[Tensor | None, ...]:
        x_BLC, bias_C = ctx.saved_tensors
        weight_Ck: Tensor = ctx.weight
        if use_triton(x_BLC):
            from baselines.operators_triton import convolution_backward

            dx_BLC, dweight_Ck, dbias_C = convolution_backward(x_BLC, weight_Ck, bias_C, dy_BLC, ctx.with_silu)
            return dx_BLC, deliver(weight_Ck, dweight_Ck), dbias_C, None
        x, weight, last = at_least_fp32(x_BLC), at_least_fp32(weight_Ck), weight_Ck.shape[1] - 1
        ds_BLC = at_least_fp32(dy_BLC)
        if ctx.with_silu:
            ds_BLC = torch.ops.aten.silu_backward(ds_BLC, _convolved(x, weight, bias_C))
        dx_BLC = torch.zeros_like(x)
        dweight_Ck = torch.empty_like(weight)
        for tap in range(last + 1):
            dx_BLC.addcmul_(_later(ds_BLC, tap - last), weight[:, tap])
            dweight_Ck[:, tap] = (_later(x, last - tap) * ds_BLC).sum((0, 1))
        return dx_BLC.to(x_BLC.dtype), deliver(weight_Ck, dweight_Ck), ds_BLC.sum((0, 1)), None


def convolved(x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor) -> Tensor:
    """Each channel's causal convolution over its row's last k tokens; zeros stand before a row's first token.

    The weight is the parameter itself, whose gradient goes where kernels/gradient.py says.
    """
    return _Convolution.apply(x_BLC, weight_Ck, bias_C, False)


def convolved_silu(x_BLC: Tensor, weight_Ck: Tensor, bias_C: Tensor) -> Tensor:
    """silu of `convolved`, as one operator."""
    return _Convolution.apply(x_BLC, weight_Ck, bias_C, True)


# --- attention -----------------------------------------------------------------------------------------------------


@contextmanager
def _deterministic() -> Iterator[None]:
    """Torch's flash backward adds up the queries' gradient in a fixed order only when this mode is on."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class _FlashAttention(torch.autograd.Function):
    """The operator behind scaled_dot_product_attention, so that its backward is deterministic for any caller."""

    @staticmethod
    def forward(ctx: Any, q_BhLd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
        # Arguments: no dropout, causal.
        out, lse, *marks, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BhLd, k_BhLd, v_BhLd, 0.0, True
        )
        ctx.save_for_backward(q_BhLd, k_BhLd, v_BhLd, out, lse, seed, offset)
        ctx.marks = marks
        return out

    @staticmethod
    def backward(ctx: Any, dout_BhLd: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        with _deterministic():
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                dout_BhLd, q, k, v, out, lse, *ctx.marks, 0.0, True, seed, offset
            )


def flash_attention(q_BhLd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
    """Causal attention by torch's flash kernels, [B, h, L, d] in 16 bits on a GPU; the same bits each time."""
    return _FlashAttention.apply(q_BhLd, k_BhLd, v_BhLd)


def causal_attention(q_BLhd: Tensor, k_BLhd: Tensor, v_BLhd: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v over the row's tokens so far, [B, L, h, d]: torch's scaled dot product attention."""
    q, k, v = (x_BLhd.transpose(1, 2) for x_BLhd in (q_BLhd, k_BLhd, v_BLhd))
    if q.is_cuda and q.element_size() == 2:
        return flash_attention(q, k, v).transpose(1, 2)
    # In fp32 a card has no flash kernel, and its memory-efficient one is not deterministic.
    backends = [SDPBackend.MATH] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
