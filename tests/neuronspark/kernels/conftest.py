"""The kernels' tests: on the card where there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before a kernel's module is imported, so it is chosen here (`triton_here`).
"""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from triton_here import DEVICE


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return DEVICE


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """On a card a fresh seed each run, in the interpreter the test's own; shown with a failure.

    NEURONSPARK_TEST_SEED repeats one, and "fresh" draws one here too.
    """
    wanted = os.environ.get("NEURONSPARK_TEST_SEED", "fresh" if DEVICE.type == "cuda" else "own")
    drawn = {"fresh": os.urandom(4), "own": hashlib.sha256(request.node.nodeid.encode()).digest()[:4]}
    found = int.from_bytes(drawn[wanted], "little") if wanted in drawn else int(wanted)
    print(f"NEURONSPARK_TEST_SEED={found}")
    torch.manual_seed(found)
    return found


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty gives is full of NaN, so that an element that no kernel writes is seen."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


def _poisoned(make):  # type: ignore[no-untyped-def]
    def made(*args, **kwargs):  # type: ignore[no-untyped-def]
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype in (torch.int32, torch.int64) else tensor

    return made
