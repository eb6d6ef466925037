# mypy: disable-error-code="no-untyped-def"
"""Functions of a logarithm or logit that the Triton kernels share, in fp32, right where the plain formula cancels.

No call into libdevice, so that the interpreter runs them too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_of_one_plus(e):
    """log(1 + e) for 0 <= e <= 1, right also where 1 + e rounds: what the rounding takes is added to first order."""
    w = 1.0 + e
    return tl.log(w) + (e - (w - 1.0)) / w


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + log_of_one_plus(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoids(x):
    """(sigmoid(x), sigmoid(-x)): each right relative to its own size, however close the other is to 1."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x > 0, large, small), tl.where(x > 0, small, large)


@triton.jit
def one_minus_exp(x):
    """1 - e^x for x <= 0: Taylor's sum to x^8 / 8! above -1/2 (the next term is below 1e-8 of it)."""
    tail = 1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0))
    near = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * tail))))
    return tl.where(x > -0.5, near, 1.0 - tl.exp(x))
