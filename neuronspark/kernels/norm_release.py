"""RMSNorm and the neurons that read it, as one: the feed-forward's input, neuron(RMSNorm(h)).

The equations are those of rmsnorm.py and quantal.py, composed. Shapes: T tokens, C channels.
"""

from __future__ import annotations

from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.quantal import release
from neuronspark.kernels.rmsnorm import rms_norm


def norm_release(
    x_TC: Tensor,
    gain_C: Tensor,
    eps: float,
    log_theta_C: Tensor,
    levels: tuple[int, int],
    margin: float,
) -> Tensor:
    """release(rms_norm(x)); `levels` are the lowest and highest quanta. The dtype of x stays.

    The Triton kernel keeps the norm in fp32 where this rounds it to the dtype of x.
    """
    if use_triton(x_TC):
        from neuronspark.kernels.row_norm_triton import norm_release_triton

        bounds = (float(levels[0]), float(levels[1]))
        return norm_release_triton(x_TC, gain_C, log_theta_C, bounds, float(margin), eps)
    return release(rms_norm(x_TC, gain_C, eps), log_theta_C, *levels, margin)
