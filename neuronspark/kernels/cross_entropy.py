"""The head: logits, their cross-entropy and its gradient, a chunk of tokens at a time.

    logits = h E^T;  token loss = logsumexp(logits) - logits[target] + z_weight * logsumexp(logits)^2

The gradient is formed in the forward, while a chunk's logits are at hand, and scaled in the backward: the logits are
computed once and never held for more than one chunk. Shapes: T tokens, V vocabulary, d channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import at_least_fp32, main_gradient

IGNORED = -100
"""A target that carries no loss."""

CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits held at once: on a CPU as many as the cache takes, on a GPU as many as keep the products large."""


def _chunk_tokens(device: torch.device, vocabulary: int) -> int:
    return max(16, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cpu"]) // vocabulary)


def _softmax_in_place(logits_TV: Tensor, target_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities; return (cross-entropy [T], log-sum-exp [T])."""
    picked_T1 = logits_TV.gather(1, target_T1)
    highest_T1 = logits_TV.amax(1, keepdim=True)
    total_T1 = logits_TV.sub_(highest_T1).exp_().sum(1, keepdim=True)
    logits_TV.div_(total_T1)
    lse_T1 = total_T1.log_().add_(highest_T1)
    return (lse_T1 - picked_T1)[:, 0], lse_T1[:, 0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_Td: Tensor,
        table_Vd: Tensor,
        targets_T: Tensor,
        scale: Tensor,
        z_weight: float,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        accumulator = torch.promote_types(h_Td.dtype, torch.float32)
        real_T = targets_T != IGNORED
        clean_T1 = torch.where(real_T, targets_T, 0)[:, None]
        ce_T = torch.empty(targets_T.shape, dtype=accumulator, device=h_Td.device)
        lse_T = torch.empty_like(ce_T)
        weight_T1 = (real_T * scale).to(accumulator)[:, None]
        dh_Td = torch.empty_like(h_Td) if with_gradient else None
        dtable_Vd = torch.zeros(table_Vd.shape, dtype=accumulator, device=h_Td.device) if with_gradient else None
        step = _chunk_tokens(h_Td.device, table_Vd.shape[0])
        # One buffer for every chunk's logits: fresh pages cost a CPU more than the softmax on them.
        logits_TV = h_Td.new_empty(min(step, h_Td.shape[0]), table_Vd.shape[0])
        for first in range(0, h_Td.shape[0], step):
            part = slice(first, first + step)
            chunk_Td = h_Td[part]
            p_TV = at_least_fp32(torch.mm(chunk_Td, table_Vd.t(), out=logits_TV[: chunk_Td.shape[0]]))
            ce_T[part], lse_T[part] = _softmax_in_place(p_TV, clean_T1[part])
            if dh_Td is None or dtable_Vd is None:
                continue
            if z_weight:
                p_TV.mul_(lse_T[part, None].mul(2 * z_weight).add_(1))
            p_TV.scatter_add_(1, clean_T1[part], p_TV.new_full((p_TV.shape[0], 1), -1.0))
            # The token's weight multiplies the narrow side of both products instead of the logits.
            dlogits_TV = p_TV.to(h_Td.dtype)
            dh_Td[part] = torch.mm(dlogits_TV, table_Vd).mul_(weight_T1[part])
            weighted_Td = (chunk_Td * weight_T1[part]).to(h_Td.dtype)
            if dtable_Vd.dtype == h_Td.dtype:
                dtable_Vd.addmm_(dlogits_TV.t(), weighted_Td)
            else:
                dtable_Vd.add_(torch.mm(dlogits_TV.t(), weighted_Td))
        ctx.save_for_backward(*((dh_Td, dtable_Vd) if with_gradient else ()))
        ctx.table = table_Vd
        ce_sum = ce_T.mul_(real_T).sum()
        z_sum = lse_T.square_().mul_(real_T).sum().mul_(z_weight)
        loss = (ce_sum + z_sum) * scale
        ctx.mark_non_differentiable(ce_sum, z_sum)
        return loss, ce_sum, z_sum

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _ce: Tensor, _z: Tensor) -> tuple[Tensor | None, ...]:
        dh_Td, dtable_Vd = ctx.saved_tensors
        main = main_gradient(ctx.table)
        if main is None:
            dtable = (dtable_Vd * dloss).to(ctx.table.dtype)
        else:
            main.addcmul_(dtable_Vd, dloss.to(dtable_Vd.dtype))
            dtable = None
        return dh_Td * dloss.to(dh_Td.dtype), dtable, None, None, None, None


def linear_cross_entropy(
    h_Td: Tensor, table_Vd: Tensor, targets_T: Tensor, scale: Tensor, z_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale * sum of token losses, sum of cross-entropies, weighted sum of squared log-sum-exps).

    The last two are readings without a gradient. A target of -100 carries no loss; `scale` is a one-element tensor and
    takes no gradient. Nothing but the backward changes the table's main_grad.
    """
    if use_triton(h_Td):
        from neuronspark.kernels.cross_entropy_triton import linear_cross_entropy_triton

        return linear_cross_entropy_triton(h_Td, table_Vd, targets_T, scale, z_weight)
    return _LinearCrossEntropy.apply(h_Td, table_Vd, targets_T, scale, z_weight, torch.is_grad_enabled())


@torch.no_grad()
def token_cross_entropy(h_Td: Tensor, table_Vd: Tensor, targets_T: Tensor) -> Tensor:
    """The cross-entropy of each token in fp32, 0 where the target is -100; no gradient."""
    if use_triton(h_Td):
        from neuronspark.kernels.cross_entropy_triton import token_cross_entropy_triton

        return token_cross_entropy_triton(h_Td, table_Vd, targets_T)
    real_T = targets_T != IGNORED
    clean_T1 = torch.where(real_T, targets_T, 0)[:, None]
    ce_T = torch.empty(targets_T.shape, dtype=torch.promote_types(h_Td.dtype, torch.float32), device=h_Td.device)
    step = _chunk_tokens(h_Td.device, table_Vd.shape[0])
    for first in range(0, h_Td.shape[0], step):
        part = slice(first, first + step)
        logits_TV = at_least_fp32(torch.mm(h_Td[part], table_Vd.t()))
        ce_T[part] = _softmax_in_place(logits_TV, clean_T1[part])[0]
    return ce_T.mul_(real_T)
