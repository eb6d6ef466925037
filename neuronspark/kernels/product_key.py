"""Product-key memory: reading a large table of values by a few of its slots (Lample et al., 1907.05242).

A head has two half queries and two lists of K keys; slot i K + j stands for key i of the first list and key j of the
second, so that 2 K scores address K^2 slots:

    first_i = <q_1, key_1i>,  second_j = <q_2, key_2j>,  logit(i, j) = first_i + second_j
    slots   = the k largest logits among the pairs of each half's k largest scores (they hold the k largest of all)
    read    = sum over heads and slots of softmax(logit) * table[slot]

Ties take the lowest index, of keys and of slots. The gradient reaches the chosen keys and slots alone, and the choice
has none. Two functions, so that a layer can weigh what it reads: `product_key_address` gives slots and weights,
`product_key_read` reads. Both add the gradients of their parameters to `main_grad` (gradient.py); the table's is
dense only without one, and rows that nobody reads are not touched.

The passes have two implementations with one contract: product_key_reference.py and product_key_triton.py.

Shapes: T tokens, h heads, H = 2 halves, s = 2 h lists of keys (that of a head's half is 2 head + half), K keys a list,
Q width of a half query, S = K^2 slots, V width of a value, k slots a head reads, n = h k slots a token reads.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels import product_key_reference
from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32, deliver, main_gradient


def _passes(tensor: Tensor) -> ModuleType:
    """The implementation that runs for a tensor."""
    if use_triton(tensor):
        from neuronspark.kernels import product_key_triton

        return product_key_triton
    return product_key_reference


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Batched left @ right in at least fp32; 16-bit inputs are multiplied as they are, and not rounded after."""
    if left.is_cuda and left.element_size() == 2:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(at_least_fp32(left), at_least_fp32(right))


class _Address(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_ThHQ: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        query_sTQ = query_ThHQ.flatten(1, 2).transpose(0, 1)
        keys_sKQ = keys.unflatten(0, (query_sTQ.shape[0], -1))
        scores_sTK = _wide_product(query_sTQ, keys_sKQ.transpose(1, 2))
        slots_Thk, weights_Thk = _passes(query_ThHQ).select(scores_sTK, top_k)
        ctx.save_for_backward(query_ThHQ, slots_Thk, weights_Thk)
        ctx.keys = keys
        ctx.mark_non_differentiable(slots_Thk)
        ctx.set_materialize_grads(False)
        return slots_Thk, weights_Thk

    @staticmethod
    def backward(ctx: Any, _: None, dweights_Thk: Tensor) -> tuple[Tensor | None, ...]:
        query_ThHQ, slots_Thk, weights_Thk = ctx.saved_tensors
        query_TsQ = query_ThHQ.flatten(1, 2)
        keys_sKQ = ctx.keys.unflatten(0, (query_TsQ.shape[1], -1))
        dscores_sTK = _passes(query_ThHQ).score_gradients(
            slots_Thk, weights_Thk, dweights_Thk, keys_sKQ.shape[1], query_ThHQ.dtype
        )
        dquery_TsQ = torch.bmm(dscores_sTK, keys_sKQ).transpose(0, 1)
        dkeys_sKQ = _wide_product(dscores_sTK.transpose(1, 2), query_TsQ.transpose(0, 1))
        return dquery_TsQ.reshape(query_ThHQ.shape), deliver(ctx.keys, dkeys_sKQ.flatten(0, 1)), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_SV: Tensor, slots_Tn: Tensor, weights_Tn: Tensor) -> Tensor:
        ctx.save_for_backward(slots_Tn, weights_Tn)
        ctx.table = table_SV
        return _passes(table_SV).read(table_SV, slots_Tn, weights_Tn)

    @staticmethod
    def backward(ctx: Any, dread_TV: Tensor) -> tuple[Tensor | None, ...]:
        slots_Tn, weights_Tn = ctx.saved_tensors
        table: Tensor = ctx.table
        passes = _passes(table)
        dread_TV = dread_TV.contiguous()
        dweights_Tn = passes.weight_gradients(table, slots_Tn, dread_TV)
        main = main_gradient(table)
        target = at_least_fp32(torch.zeros_like(table)) if main is None else main
        passes.add_table_gradient(target, slots_Tn, weights_Tn, dread_TV)
        return target.to(table.dtype) if main is None else None, None, dweights_Tn


def product_key_address(query_ThHQ: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The slots a token reads and their softmax weights, [T, h, k] each, largest weight first.

    `keys` is the parameter [s K, Q] in the query's dtype; top_k is at most K. Slots are int32; weights are at least
    fp32, and carry the gradient to the queries and to the keys.
    """
    return _Address.apply(query_ThHQ, keys, top_k)


def product_key_read(table_SV: Tensor, slots_Thk: Tensor, weights_Thk: Tensor) -> Tensor:
    """The weighted sum of the table's rows over heads and slots: [T, V] in the table's dtype.

    `table_SV` is the parameter; the weights are at least fp32, of any sign and sum.
    """
    return _Read.apply(table_SV, slots_Thk.flatten(1), weights_Thk.flatten(1))
