"""Which device a line can run on here; asking occupies none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
UNFIT_FOR_ARENA = re.compile(
    r"(?:^|[,\s])(max_split_size_mb|backend\s*:\s*cudaMallocAsync|expandable_segments\s*:\s*True)\b", re.IGNORECASE
)
"""Settings of torch's allocator with which the arena (nstrain/gpu/arena.py) does not hold: large blocks are not split
any more, pools are not known, or segments grow, so that nobody could count what is taken beyond the arena."""


def has_cuda() -> bool:
    """Whether torch finds a CUDA device on this machine."""
    return torch.cuda.is_available()


def refuse_missing_device(settings: RunSettings) -> None:
    """Raise `Refusal` if run.json names a device that this machine does not have, or whose memory cannot be held."""
    if settings.device == "cuda" and not has_cuda():
        raise Refusal("run.json: field 'device' is 'cuda', but torch finds no CUDA device here")
    if settings.device == "cuda":
        refuse_unfit_allocator()


def refuse_unfit_allocator(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `Refusal` for settings of torch's allocator, in the environment, under which the arena does not hold."""
    for variable in ALLOCATOR_VARIABLES:
        if found := UNFIT_FOR_ARENA.search(environment.get(variable, "")):
            raise Refusal(
                f"{variable} is {environment[variable]!r}: with {found[1]} a trainer cannot hold the GPU's memory in "
                "large blocks and serve all it needs from them; take it out of the environment, or of host.json's env"
            )
