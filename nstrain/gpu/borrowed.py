"""The GPU of a command that uses it for a while (tune, bench, generate): leased before it is touched, if it is free.

A command that began without looking would make a trainer that is alone on its GPU stop: it takes every other process
for one that wants the memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from nstrain.base.errors import GpuTaken, NstrainError
from nstrain.gpu.lease import gpu_lease
from nstrain.gpu.readings import Gpu, GpuSource, describe, read_gpus, visible_gpu

LEASE_WAIT_S = 5.0
"""How long a GPU's last user may take to go."""

LOOK_S = 0.5
"""How often that is looked at."""


@contextlib.contextmanager
def borrowed_gpu(source: GpuSource | None, wait_s: float | None = None) -> Iterator[Gpu | None]:
    """The GPU that CUDA would use, ours until the block ends; without a source (on a CPU) nothing is taken.

    Waits `wait_s` (LEASE_WAIT_S) at most. Raises `GpuTaken` if somebody holds the lease or is on the GPU, and `Refusal`
    if this machine lacks a GPU or the reader.
    """
    if source is None:
        yield None
        return
    deadline = time.monotonic() + (LEASE_WAIT_S if wait_s is None else wait_s)
    gpu = visible_gpu(read_gpus(source.reader))
    lease = gpu_lease(gpu.uuid, source.leases)
    try:
        lease.acquire(f"the GPU {gpu.uuid}", max(0.0, deadline - time.monotonic()))
    except NstrainError as error:
        raise GpuTaken(str(error)) from None
    with lease:
        while gpu.processes and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            gpu = visible_gpu(read_gpus(source.reader))
        if gpu.processes:
            raise GpuTaken(f"{describe(gpu, gpu.processes)}: wait until it has gone, or end it")
        yield gpu
