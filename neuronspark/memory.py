"""The product-key memory of a hippocampal layer: facts of the weights, beside the pool's events of the row.

    q = RMSNorm of each half of W_q x, a head         slots, weights = the k best products of keys, their softmax
    gate = sigmoid(w_g . x + b)                       read = sum over heads and slots of weight * table[slot]
    h <- h + W_o(gate * read)

x is the layer's normalised input, as for the pool; the memory's output joins the stream right after the pool's, so
that the feed-forward sees both. The gate is one number a token, so it is put on the weights instead of the output:
then no pass over the stream is spent on it. The operator is kernels/product_key.py.

Starting values: keys give scores of unit variance (a logit is the sum of two); values are of about unit length (Lample
et al., 1907.05242); the gate is half open. A read over k near-equal weights has a length of about k^-1/2, and W_o has
the scale of every other output: so at the start the memory adds less than a hundredth of what the pool adds, and under
AdamW, whose steps have one size for small values and large ones, it soon holds what the loss asks for.

Shapes: T tokens, d width, h memory heads, H = 2 halves, Q width of a half query, k slots a head reads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuronspark import parameters
from neuronspark.config import ModelConfig
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.linear import project, project_onto
from neuronspark.kernels.product_key import product_key_address, product_key_read
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.parameters import ParameterModule, ParameterSpec

GATE_STD = 0.05
"""Standard deviation of the gate's input at the start, beside its bias."""
GATE_BIAS = 0.0


def memory_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The parameters that a memory adds to a hippocampal layer."""
    d, heads, value = config.width, config.memory_heads, config.memory_value_width
    half_query = config.memory_query_width // 2
    out_scale = 1 / math.sqrt(2 * len(config.layers))
    unit_length = parameters.normal(1 / math.sqrt(value))
    return {
        "w_memory_query": ParameterSpec((heads * 2 * half_query, d), "matrix", parameters.fan_in_normal()),
        "w_memory_keys": ParameterSpec(
            (heads * 2 * config.memory_keys, half_query), "matrix", parameters.fan_in_normal()
        ),
        "memory_table": ParameterSpec((config.memory_slots, value), "memory", unit_length),
        "w_memory_gate": ParameterSpec((1, d), "matrix", parameters.fan_in_normal(GATE_STD)),
        "memory_gate_bias": ParameterSpec((1,), "neuron", parameters.constant(GATE_BIAS)),
        "w_memory_out": ParameterSpec((d, value), "matrix", parameters.fan_in_normal(out_scale)),
    }


def address_memory(layer: ParameterModule, x_Td: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """What a token asks of the layer's memory: slots and their weights, [T, h, k], and the gate, [T]."""
    query_Tq, gate_T1 = project(x_Td, layer.w_memory_query, layer.w_memory_gate)
    half_query = config.memory_query_width // 2
    unit_gain_Q = torch.ones(half_query, dtype=layer.memory_gate_bias.dtype, device=x_Td.device)
    query_xQ = rms_norm(query_Tq.view(-1, half_query), unit_gain_Q, config.norm_eps)
    query_ThHQ = query_xQ.view(-1, config.memory_heads, 2, half_query)
    slots_Thk, weights_Thk = product_key_address(query_ThHQ, layer.w_memory_keys, config.memory_top_k)
    gate_T = torch.sigmoid(at_least_fp32(gate_T1[:, 0]) + tapped(layer.memory_gate_bias))
    return slots_Thk, weights_Thk, gate_T


def add_memory(layer: ParameterModule, h_Td: Tensor, x_Td: Tensor, config: ModelConfig) -> Tensor:
    """The residual stream h with what the layer's memory answers to the layer's normalised input x."""
    return answer_memory(layer, h_Td, *address_memory(layer, x_Td, config))


def answer_memory(
    layer: ParameterModule, h_Td: Tensor, slots_Thk: Tensor, weights_Thk: Tensor, gate_T: Tensor
) -> Tensor:
    """The residual stream h with what the layer's memory holds at the addresses: h + W_o (gate * read)."""
    read_TV = product_key_read(layer.memory_table, slots_Thk, weights_Thk * gate_T[:, None, None])
    return project_onto(h_Td, read_TV, layer.w_memory_out)
