"""What a card does at best, measured now: shares of these are what a speed says."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

COPIED_BYTES = 1 << 31
PRODUCT_SIDE = 8192


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Two rates of a card."""

    copy_tb_s: float
    """Bytes read plus bytes written by a device-to-device copy, in 1e12 a second."""
    bf16_tflop_s: float
    """A bf16 matrix product of 8192 x 8192 x 8192 on random numbers, in 1e12 operations a second."""


def milliseconds(work: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a call on the device, after three calls to warm up."""
    times = []
    for index in range(3 + repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if index >= 3:
            times.append(began.elapsed_time(ended))
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Both, on random data (on zeros a product is a tenth faster than real data will be); takes 5 GiB and 0.1 s."""
    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source))
    left, right = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right)
    return Ceilings(2 * COPIED_BYTES / copy_ms / 1e9, 2 * PRODUCT_SIDE**3 / product_ms / 1e9)
