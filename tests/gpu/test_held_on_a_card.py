"""A real card: its lease between two holders, and a foreign process that appears on it and leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_process import in_its_own_process

from nstrain.base.errors import GpuTaken
from nstrain.gpu.held import HeldGpu
from nstrain.gpu.lease import this_gpu
from nstrain.gpu.readings import READER_COMMAND, GpuSource

pytestmark = [pytest.mark.gpu, pytest.mark.card_alone]

FOREIGN = "import torch, time; x = torch.zeros(1 << 30, device='cuda'); print('on', flush=True); time.sleep(600)"
WAIT_S = 60.0


def test_leased_seen_by_others_and_yielded(tmp_path: Path) -> None:
    in_its_own_process(take_and_yield, tmp_path)


def take_and_yield(tmp_path: Path) -> None:
    import torch

    source = GpuSource(READER_COMMAND, tmp_path / "leases")
    gpu = HeldGpu.take(tmp_path, source, 1, torch.cuda.memory_reserved)
    gpu.confirm(this_gpu())
    with pytest.raises(GpuTaken, match=f"held by process {os.getpid()}"):
        HeldGpu.take(tmp_path, source, 1, torch.cuda.memory_reserved)
    torch.zeros(1 << 28, device="cuda")
    assert not _becomes(gpu, True, 3.0), "we are taken for somebody else"
    foreign = subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True)
    assert foreign.stdout is not None
    try:
        assert foreign.stdout.readline() == "on\n"
        assert _becomes(gpu, True, WAIT_S), "the other process was not seen"
    finally:
        foreign.kill()
        foreign.wait()
        foreign.stdout.close()
    assert _becomes(gpu, False, WAIT_S), "it has left, and is still seen"


def _becomes(gpu: HeldGpu, taken: bool, within_s: float) -> bool:
    """Whether looks, one after the other, come to find the card taken, or free."""
    deadline, update = time.monotonic() + within_s, 0
    while time.monotonic() < deadline:
        update += 1
        if (gpu.taken_by(update) is not None) == taken and (not taken or gpu.others):
            return True
        time.sleep(0.1)
    return False
