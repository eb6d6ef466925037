"""The attention layer of a Llama: rotary attention with normalised queries and keys, then a SwiGLU feed-forward.

    x = RMSNorm(h);  q, k = RoPE(RMSNorm(W_q x)), RoPE(RMSNorm(W_k x))  a head;  h <- h + W_o attention(q, k, W_v x)
    x = RMSNorm(h);  h <- h + W_down(silu(W_gate x) * W_up x)

With a short convolution the attention's x is x + convolution(x), over k tokens and a channel alone (Allen-Zhu, "Physics
of Language Models: Part 4.1", calls such a layer Canon-A): attention then sees the tokens before each key.

Llama (Touvron et al., 2302.13971) with QK norm (Dehghani et al., 2302.05442) and a gain a head and channel; SwiGLU is
Shazeer's, 2002.05202. Shapes: B rows, L tokens, T = B L, w width, h heads of d channels, f feed-forward.
"""

from __future__ import annotations

import math

from torch import Tensor

from baselines.config import ModelConfig
from baselines.operators import causal_attention, convolved, rotate, silu_product, taps_uniform
from neuronspark import parameters
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.parameters import ParameterModule, ParameterSpec


def attention_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The parameters of one attention layer."""
    width, ffn = config.width, config.ffn_width
    out_scale = 1 / math.sqrt(2 * len(config.layers))
    head_gain = ParameterSpec((config.heads, config.head_width), "norm", parameters.constant(1.0))

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> ParameterSpec:
        return ParameterSpec((outputs, inputs), "matrix", parameters.fan_in_normal(scale))

    taps = config.attention_convolution_tokens
    convolution = {
        "convolution": ParameterSpec((width, taps), "matrix", taps_uniform(taps)),
        "convolution_bias": ParameterSpec((width,), "neuron", parameters.constant(0.0)),
    }
    return {
        "norm": ParameterSpec((width,), "norm", parameters.constant(1.0)),
        **(convolution if taps else {}),
        "w_q": matrix(width, width),
        "w_k": matrix(width, width),
        "w_v": matrix(width, width),
        "q_norm": head_gain,
        "k_norm": head_gain,
        "w_o": matrix(width, width, out_scale),
        "ffn_norm": ParameterSpec((width,), "norm", parameters.constant(1.0)),
        "w_gate": matrix(ffn, width),
        "w_up": matrix(ffn, width),
        "w_down": matrix(width, ffn, out_scale),
    }


class AttentionLayer(ParameterModule):
    """One attention layer; its parameters are those of `attention_specs`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, h_Tw: Tensor, row_tokens: int, rotary: Tensor) -> Tensor:
        """The residual stream after the layer; T is a whole number of rows of `row_tokens` tokens."""
        eps = self.config.norm_eps
        x_Tw = rms_norm(h_Tw, tapped(self.norm), eps)
        if self.config.attention_convolution_tokens:
            x_BLw = x_Tw.unflatten(0, (-1, row_tokens))
            x_Tw = x_Tw + convolved(x_BLw, self.convolution, tapped(self.convolution_bias)).flatten(0, 1)
        q_Tw, k_Tw, v_Tw = project(x_Tw, self.w_q, self.w_k, self.w_v)
        q_BLhd = rotate(self._heads(q_Tw, row_tokens, self.q_norm), rotary)
        k_BLhd = rotate(self._heads(k_Tw, row_tokens, self.k_norm), rotary)
        read_BLhd = causal_attention(q_BLhd, k_BLhd, self._heads(v_Tw, row_tokens))
        h_Tw = project_onto(h_Tw, read_BLhd.reshape(h_Tw.shape), self.w_o)
        x_Tw = rms_norm(h_Tw, tapped(self.ffn_norm), eps)
        gate_Tf, up_Tf = project(x_Tw, self.w_gate, self.w_up)
        return project_onto(h_Tw, silu_product(gate_Tf, up_Tf), self.w_down)

    def _heads(self, x_Tw: Tensor, row_tokens: int, gain_hd: Tensor | None = None) -> Tensor:
        """[T, w] -> [B, L, h, d], each head RMS-normalised if there is a gain for it."""
        x_Thd = x_Tw.view(-1, self.config.heads, self.config.head_width)
        if gain_hd is not None:
            x_Thd = rms_norm(x_Thd, tapped(gain_hd), self.config.norm_eps)
        return x_Thd.unflatten(0, (-1, row_tokens))
