"""Which device a line can run on here; asking occupies none."""

from __future__ import annotations

import torch

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings


def has_cuda() -> bool:
    """Whether torch finds a CUDA device on this machine."""
    return torch.cuda.is_available()


def refuse_missing_device(settings: RunSettings) -> None:
    """Raise `Refusal` if run.json names a device that this machine does not have."""
    if settings.device == "cuda" and not has_cuda():
        raise Refusal("run.json: field 'device' is 'cuda', but torch finds no CUDA device here")
