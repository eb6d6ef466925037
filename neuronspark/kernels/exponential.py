"""Exponentials of logarithms that may be far below zero: decays and attention weights.

On a CPU the exponential of -1000 takes 40 times as long as that of -1, and a product with numbers too small for fp32's
normal range (below 1e-38) 140 times as long as with ordinary ones. Both come up on long rows and after a flush. What is
below e^-60 is therefore 0: beside the largest weight of a softmax, or beside an undecayed state, it is far below
rounding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

LOWEST_LOG = -60.0
"""A logarithm at or below this stands for 0."""
_SMALLEST = 1e-26


def exp_or_zero_(log: Tensor) -> Tensor:
    """exp(log) in place, exactly 0 where log <= -60 (minus infinity included)."""
    small: Tensor = functional.threshold(log.clamp_(min=LOWEST_LOG).exp_(), _SMALLEST, 0.0, inplace=True)
    return small
