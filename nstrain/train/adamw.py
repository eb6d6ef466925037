"""Clipped AdamW over a group's flat buffers, with the skip of a non-finite update built in.

    m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2        g the clipped gradient
    w <- w - rate decay w - rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

(Loshchilov and Hutter, arXiv 1711.05101, as torch.optim.AdamW computes it.) Rate, decay, clipping, step and the skip
are device scalars, so that nothing waits for the device. A skipped update stores nothing: the operator returns before
its first store, since 0 * NaN is NaN and a multiplication by zero would let a bad gradient through. The step that
corrects the moments' bias counts the updates that were not skipped. On a CPU it is the operator behind
torch.optim.AdamW(fused=True), on a GPU a kernel of our own: one pass over memory either way.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nstrain.settings.run import OptimizerSettings
from nstrain.train.ema import move_ema
from nstrain.train.flat import FlatGroup


@dataclasses.dataclass(frozen=True)
class Clip:
    """What the global norm says of an update; both fields are fp32 0-d tensors on the device."""

    divisor: Tensor
    """The gradient is divided by this: 1 up to the clipping norm, norm / clip_norm above it."""
    skip: Tensor
    """1.0 if the update must not be applied, since its norm is not finite; else 0.0."""


def by_kernels(device: torch.device) -> bool:
    """Whether the optimizer runs its own Triton kernels (optimizer_kernels.py) there."""
    return device.type == "cuda"


def clip_by_norm(total_norm: Tensor, clip_norm: float) -> Clip:
    """How the gradient is clipped, and whether the update is skipped, from the global norm (0-d, fp64)."""
    # clamp keeps NaN as it is; a norm too large for fp32 becomes an infinity here and is skipped as well.
    divisor = (total_norm / clip_norm).clamp(min=1.0).float()
    return Clip(divisor, torch.logical_not(torch.isfinite(divisor)).float())


def advance_step(step: Tensor, clip: Clip) -> None:
    """Count an update that is not skipped (`step` is an fp32 0-d tensor, exact up to 2^24 updates)."""
    step.add_(1.0 - clip.skip)


def adamw_update(
    group: FlatGroup,
    settings: OptimizerSettings,
    clip: Clip,
    step: Tensor,
    rate: Tensor,
    decay: Tensor | None,
    move: Tensor,
) -> None:
    """One AdamW update of a group from its main gradient, or nothing if `clip.skip` is 1; then the gradient is zero.

    `step` (already advanced), `rate` and `move` are fp32 0-d tensors on the device, `decay` an fp64 one, or None for a
    group whose weights do not decay. The parameters' compute copies follow the masters, and so does their moving
    average, if the group has one, by a share `move` of the way (0: not at all).
    """
    if by_kernels(group.master.device):
        _update_by_kernel(group, settings, clip, step, rate, decay, move)
        return
    torch._fused_adamw_(
        [group.master],
        [group.main_grad],
        [group.exp_avg],
        [group.exp_avg_sq],
        [],
        [step],
        lr=rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=0.0 if decay is None else decay.item(),
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=clip.divisor,
        found_inf=clip.skip,
    )
    group.refresh_compute()
    group.main_grad.zero_()
    if group.ema is not None:
        move_ema(group, move, clip.skip)


def _update_by_kernel(
    group: FlatGroup,
    settings: OptimizerSettings,
    clip: Clip,
    step: Tensor,
    rate: Tensor,
    decay: Tensor | None,
    move: Tensor,
) -> None:
    from nstrain.train.optimizer_kernels import adamw

    steps = step.double()
    corrections = torch.stack((1 - settings.beta1**steps, 1 - settings.beta2**steps))
    adamw(
        group.master,
        group.main_grad,
        group.exp_avg,
        group.exp_avg_sq,
        None if group.compute is group.master else group.compute,
        group.ema,
        clip.divisor,
        clip.skip,
        rate,
        decay,
        move,
        corrections,
        settings.beta1,
        settings.beta2,
        settings.eps,
    )
