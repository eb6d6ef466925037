"""The passes of the product-key memory in PyTorch: right in every dtype, on any device, with the same bits each time.

The contract of each pass is here; product_key_triton.py has the same five for a GPU. Shapes: product_key.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuronspark.kernels.gradient import at_least_fp32


def select(scores_sTK: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The slots of the k largest sums of a first and a second score, and their softmax weights: both [T, h, k].

    Descending by sum; ties take the lowest index, of a half's keys as of slots. Slots are int32, weights have the
    scores' dtype. A score of NaN makes the head's weights NaN.
    """
    keys = scores_sTK.shape[-1]
    scores_hHTK = scores_sTK.unflatten(0, (-1, 2))
    _, order_hHTK = scores_hHTK.sort(dim=-1, descending=True, stable=True)
    # In ascending order of the keys the pairs below are in ascending order of slots, so that ties take the lowest.
    best_hHTk = order_hHTK[..., :top_k].sort(dim=-1).values
    score_hHTk = scores_hHTK.gather(-1, best_hHTk)
    first_hTk, second_hTk = score_hHTk.unbind(1)
    sum_hTp = (first_hTk[..., :, None] + second_hTk[..., None, :]).flatten(-2)
    slot_hTp = (best_hHTk[:, 0, :, :, None] * keys + best_hHTk[:, 1, :, None, :]).flatten(-2)
    logit_hTp, order_hTp = sum_hTp.sort(dim=-1, descending=True, stable=True)
    slots_hTk = slot_hTp.gather(-1, order_hTp[..., :top_k])
    weights_hTk = logit_hTp[..., :top_k].softmax(-1)
    return slots_hTk.transpose(0, 1).int().contiguous(), weights_hTk.transpose(0, 1).contiguous()


def score_gradients(
    slots_Thk: Tensor, weights_Thk: Tensor, dweights_Thk: Tensor, keys: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of all scores, [s, T, K] in `dtype`, from the weights': zero but at the keys of slots read."""
    logit_pull_Thk = weights_Thk * (dweights_Thk - (weights_Thk * dweights_Thk).sum(-1, keepdim=True))
    slots = slots_Thk.long()
    key_ThHk = torch.stack((slots // keys, slots % keys), 2)
    dscores_ThHK = weights_Thk.new_zeros(*slots.shape[:2], 2, keys)
    for rank in range(slots.shape[-1]):  # one slot at a time: a scattered sum has no fixed order on a GPU
        at = key_ThHk[..., rank : rank + 1]
        pull = logit_pull_Thk[:, :, None, rank : rank + 1].expand(at.shape)
        dscores_ThHK.scatter_(-1, at, dscores_ThHK.gather(-1, at) + pull)
    return dscores_ThHK.to(dtype).permute(1, 2, 0, 3).flatten(0, 1)


def read(table_SV: Tensor, slots_Tn: Tensor, weights_Tn: Tensor) -> Tensor:
    """sum over n of weights * table[slots]: [T, V] in the table's dtype, summed in the weights'."""
    read_TV = weights_Tn.new_zeros(slots_Tn.shape[0], table_SV.shape[1])
    for slot_T, weight_T in zip(slots_Tn.unbind(1), weights_Tn.unbind(1), strict=True):
        read_TV.addcmul_(table_SV.index_select(0, slot_T).to(read_TV.dtype), weight_T[:, None])
    return read_TV.to(table_SV.dtype)


def weight_gradients(table_SV: Tensor, slots_Tn: Tensor, dread_TV: Tensor) -> Tensor:
    """<table[slots], dread>: [T, n], at least fp32."""
    dread = at_least_fp32(dread_TV)
    return torch.stack(
        [(table_SV.index_select(0, slot_T).to(dread.dtype) * dread).sum(-1) for slot_T in slots_Tn.unbind(1)], 1
    )


def add_table_gradient(target_SV: Tensor, slots_Tn: Tensor, weights_Tn: Tensor, dread_TV: Tensor) -> None:
    """Add weights * dread to the rows `slots` of the target, in an order that the input alone decides."""
    for slot_T, weight_T in zip(slots_Tn.unbind(1), weights_Tn.unbind(1), strict=True):
        rows_TV = (dread_TV.to(weight_T.dtype) * weight_T[:, None]).to(target_SV.dtype)
        if target_SV.device.type == "cpu":
            target_SV.index_add_(0, slot_T, rows_TV)  # one token after another
        else:
            target_SV.index_put_((slot_T.long(),), rows_TV, accumulate=True)  # sorts the slots first
