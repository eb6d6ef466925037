"""The baselines' layers against plain readings of their equations in float64, one token or one sum at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from baselines.operators import causal_attention, convolved_silu, flash_attention, rotate, silu_product
from contract_models import BASELINES, away_from_the_start, rows_of, scale_of
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels.rotary import rotary_table

EPS = 1e-6
Weights = Callable[[str], Tensor]


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turned(x_Lhd: Tensor, base: float) -> Tensor:
    """Pairs as complex numbers, times exp(i t base^(-2 i / d))."""
    first, second = x_Lhd.chunk(2, -1)
    pair = torch.arange(first.shape[-1], dtype=torch.float64)
    angle_Lp = torch.arange(len(x_Lhd), dtype=torch.float64)[:, None] * base ** (-2 * pair / x_Lhd.shape[-1])
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angle_Lp), angle_Lp)[:, None]
    return torch.cat((product.real, product.imag), -1)


def attended(q_Lhd: Tensor, k_Lhd: Tensor, v_Lhd: Tensor) -> Tensor:
    logits_hLL = torch.einsum("ihd,jhd->hij", q_Lhd, k_Lhd) / math.sqrt(q_Lhd.shape[-1])
    later = torch.ones(logits_hLL.shape[-2:]).triu(1).bool()
    return torch.einsum("hij,jhd->ihd", logits_hLL.masked_fill(later, -math.inf).softmax(-1), v_Lhd)


def attention_layer(w: Weights, h_Lw: Tensor, config: object) -> Tensor:
    heads = (-1, config.heads, config.head_width)  # type: ignore[attr-defined]
    x = normed(h_Lw, w("norm"))
    q, k, v = (functional.linear(x, w(name)).view(heads) for name in ("w_q", "w_k", "w_v"))
    base = config.rope_base  # type: ignore[attr-defined]
    q, k = turned(normed(q, w("q_norm")), base), turned(normed(k, w("k_norm")), base)
    h_Lw = h_Lw + functional.linear(attended(q, k, v).flatten(1), w("w_o"))
    x = normed(h_Lw, w("ffn_norm"))
    inner = functional.silu(functional.linear(x, w("w_gate"))) * functional.linear(x, w("w_up"))
    return h_Lw + functional.linear(inner, w("w_down"))


def state_space_layer(w: Weights, h_Lw: Tensor, config: object) -> Tensor:
    heads, width = config.state_heads, config.state_head_width  # type: ignore[attr-defined]
    groups, states, inner = config.state_groups, config.state_width, config.inner_width  # type: ignore[attr-defined]
    x = normed(h_Lw, w("norm"))
    z, vbc, dt = (functional.linear(x, w(name)) for name in ("w_z", "w_vbc", "w_dt"))
    taps = w("convolution")
    padded = functional.pad(vbc.t()[None], (taps.shape[1] - 1, 0))
    vbc = functional.silu(functional.conv1d(padded, taps[:, None], w("convolution_bias"), groups=len(taps)))[0].t()
    v_LHP = vbc[:, :inner].unflatten(1, (heads, width))
    b_LHN, c_LHN = (
        part.unflatten(1, (groups, states)).repeat_interleave(heads // groups, 1)
        for part in (vbc[:, inner : inner + groups * states], vbc[:, inner + groups * states :])
    )
    dt_LH = functional.softplus(dt + w("dt_bias"))
    decay_LH = (-w("a_log").exp() * dt_LH).exp()
    state_HPN, outputs = torch.zeros(heads, width, states, dtype=h_Lw.dtype), []
    for t in range(len(h_Lw)):
        drive = (dt_LH[t, :, None] * v_LHP[t])[..., None] * b_LHN[t, :, None]
        state_HPN = decay_LH[t, :, None, None] * state_HPN + drive
        outputs.append((state_HPN * c_LHN[t, :, None]).sum(-1) + w("skip")[:, None] * v_LHP[t])
    u = normed(torch.stack(outputs).flatten(1) * functional.silu(z), w("gated_norm"))
    return h_Lw + functional.linear(u, w("w_out"))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_losses_and_gradients_are_the_equations(name: str, tokens: int) -> None:
    model, rows = BASELINES[name].build(compute_dtype=torch.float64), rows_of(2, tokens)
    away_from_the_start(model)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = []
    for row in rows:
        h_Lw = leaves["embedding"][row[:-1]]
        for index, letter in enumerate(model.config.layers):
            layer = attention_layer if letter == "A" else state_space_layer
            h_Lw = layer(lambda n, i=index: leaves[f"layer{i:02d}.{n}"], h_Lw, model.config)  # type: ignore[misc]
        logits = functional.linear(normed(h_Lw, leaves["norm"]), leaves["embedding"])
        expected.append(functional.cross_entropy(logits, row[1:], reduction="none"))
    expected_BL = torch.stack(expected)
    assert torch.allclose(model.token_losses(rows), expected_BL, rtol=1e-9, atol=1e-9)
    theirs = torch.autograd.grad(expected_BL.sum(), list(leaves.values()), materialize_grads=True)
    ours = torch.autograd.grad(model.loss(rows, scale_of())[0], list(model.parameters()), materialize_grads=True)
    for parameter, mine, other in zip(leaves, ours, theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-8 * other.abs().max().clamp(min=1e-3), parameter


# --- the operators alone ----------------------------------------------------------------------------------------


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_silu_product_has_its_gradients() -> None:
    assert torch.autograd.gradcheck(silu_product, (drawn(5, 7), drawn(5, 7)))


def test_a_turn_has_its_gradient_and_keeps_lengths() -> None:
    table = rotary_table(12, 6, 100.0, torch.device("cpu"), torch.float64)
    x_BLhd = drawn(2, 9, 3, 6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), x_BLhd)
    assert torch.allclose(rotate(x_BLhd, table).norm(dim=-1), x_BLhd.norm(dim=-1))
    assert torch.allclose(rotate(x_BLhd, table)[1], turned(x_BLhd[1], 100.0))


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("taps", [1, 4])
def test_the_convolution_has_its_gradients(tokens: int, taps: int) -> None:
    inputs = drawn(2, tokens, 3), drawn(3, taps), drawn(3)
    assert torch.autograd.gradcheck(convolved_silu, inputs)
    padded = functional.pad(inputs[0].transpose(1, 2), (taps - 1, 0))
    expected = functional.silu(functional.conv1d(padded, inputs[1][:, None], inputs[2], groups=3)).transpose(1, 2)
    assert torch.allclose(convolved_silu(*inputs), expected)


def test_attention_is_its_equation() -> None:
    inputs = [drawn(2, tokens, 3, 8) for tokens in (9, 9, 9)]
    expected = torch.stack([attended(*(x[row] for x in inputs)) for row in range(2)])
    assert torch.allclose(causal_attention(*inputs), expected)


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_the_flash_operator_runs_in_deterministic_mode_and_puts_the_callers_back(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes alone, on the meta device; what a card computes is tested on a card."""
    modes, operator = [], torch.ops.aten._scaled_dot_product_flash_attention_backward

    def noted(*arguments: object) -> tuple[Tensor, ...]:
        modes.append(torch.get_deterministic_debug_mode())
        return operator(*arguments)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", noted)
    inputs = [torch.empty(2, 3, 40, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        gradients = torch.autograd.grad(flash_attention(*inputs).sum(), inputs)
        assert torch.get_deterministic_debug_mode() == ["default", "warn", "error"].index(mode)
    finally:
        torch.set_deterministic_debug_mode(before)
    assert modes == [2]
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
