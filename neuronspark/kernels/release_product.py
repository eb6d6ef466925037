"""A release times a factor: the feed-forward's neuron(g) * neuron(u), and the hippocampal gate's neuron(g) * mixed.

Each neuron releases as in quantal.py, with log thresholds of its own. Shapes: T tokens, C channels.
"""

from __future__ import annotations

from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.quantal import release


def release_product(
    a_TC: Tensor,
    log_theta_a_C: Tensor,
    a_levels: tuple[int, int],
    b_TC: Tensor,
    log_theta_b_C: Tensor,
    b_levels: tuple[int, int],
    margin: float,
) -> Tensor:
    """neuron(a) * neuron(b); `levels` are a neuron's lowest and highest quanta. The dtype of a stays."""
    if use_triton(a_TC):
        from neuronspark.kernels.release_triton import release_product_triton

        levels = tuple(float(level) for level in (*a_levels, *b_levels))
        return release_product_triton(a_TC, log_theta_a_C, b_TC, log_theta_b_C, levels, float(margin))
    return release(a_TC, log_theta_a_C, *a_levels, margin) * release(b_TC, log_theta_b_C, *b_levels, margin)


def release_times(a_TC: Tensor, log_theta_C: Tensor, levels: tuple[int, int], b_TC: Tensor, margin: float) -> Tensor:
    """neuron(a) * b for a plain b; `levels` are the neuron's lowest and highest quanta. The dtype of a stays."""
    if use_triton(a_TC):
        from neuronspark.kernels.release_triton import release_product_triton

        bounds = (float(levels[0]), float(levels[1]))
        return release_product_triton(a_TC, log_theta_C, b_TC, None, bounds, float(margin))
    return release(a_TC, log_theta_C, *levels, margin) * b_TC
