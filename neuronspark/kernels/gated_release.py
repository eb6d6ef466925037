"""The dendritic soma as one operator: the read-out, gated, normalised a head at a time, and released.

The equations are those of gated_norm.py and quantal.py, composed. Shapes: T tokens, H heads, P compartments, I = H P.
"""

from __future__ import annotations

from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gated_norm import gated_norm
from neuronspark.kernels.quantal import release


def gated_release(
    y_THP: Tensor,
    z_THP: Tensor,
    gain_HP: Tensor,
    eps: float,
    log_theta_I: Tensor,
    levels: tuple[int, int],
    margin: float,
) -> Tensor:
    """release(gated_norm(y, z)): [T, I]; `levels` are the lowest and highest quanta. The dtype of y stays.

    The Triton kernel keeps the norm in fp32 where this rounds it to the dtype of y.
    """
    if use_triton(y_THP):
        from neuronspark.kernels.row_norm_triton import gated_release_triton

        bounds = (float(levels[0]), float(levels[1]))
        return gated_release_triton(y_THP, z_THP, gain_HP, log_theta_I, bounds, float(margin), eps).flatten(1)
    return release(gated_norm(y_THP, z_THP, gain_HP, eps).flatten(1), log_theta_I, *levels, margin)
