"""How far a kernel's results are from a reference's."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, in float64; NaN never passes a comparison."""
    difference = (found.double().cpu() - expected.double().cpu()).norm()
    return float(difference / expected.double().cpu().norm().clamp(min=1e-30))
