"""The GPU that a trainer holds: its lease for the process's life, and a look, now and then, at who else is on it.

`HeldGpu.take` comes before the first touch of CUDA: whoever does not get the lease, or finds another process there, has
disturbed nobody. Looks are taken every few updates by a process of their own and cost the training nothing: one is
started after an update and its answer is taken after a later one. A look that fails is told and passed over - training
that was alone goes on - while a start that cannot look does not begin.

Some containers list processes by numbers of the host, or not at all. A single number that nobody else explains, while
this process is not listed under its own, is this process. Where nothing is listed although this process is on the GPU,
memory tells: what is used beyond what was used when we last took any is somebody's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nstrain.base.disk import FileLock
from nstrain.base.errors import GpuTaken, NstrainError, Refusal
from nstrain.gpu.lease import gpu_lease, refuse_other_gpu
from nstrain.gpu.readings import (
    CONTEXT_BYTES,
    Gpu,
    GpuProcess,
    GpuSource,
    ReadingProcess,
    Unreadable,
    describe,
    is_ours,
    read_gpus,
    visible_gpu,
)

START_READINGS = 3
"""How often a trainer that starts tries to read the GPUs."""


class HeldGpu:
    """A leased GPU. Not given back before the process ends: what a process has on a GPU ends with it."""

    def __init__(
        self, gpu: Gpu, lease: FileLock, line: Path, source: GpuSource, every: int, own_bytes: Callable[[], int]
    ) -> None:
        """See `take`."""
        self.uuid = gpu.uuid
        self.others: str | None = None
        """The other processes at the last look, in words."""
        self._lease, self._line, self._source, self._every = lease, line, source, every
        self._own_bytes = own_bytes
        self._reading: ReadingProcess | None = None
        self._next_look = 0
        self._alias: int | None = None
        self._alias_settled = False
        self._baseline: tuple[int, int] | None = None
        self._trouble: str | None = None

    @classmethod
    def take(cls, line: Path, source: GpuSource, every: int, own_bytes: Callable[[], int]) -> HeldGpu:
        """Take the lease of the GPU that CUDA would use, if nobody else is on it.

        `every` is how many updates lie between two looks, `own_bytes` what this process has allocated there. Raises
        `GpuTaken` if somebody is there or nobody can tell, and `Refusal` if this machine lacks a GPU or the reader.
        """
        gpu = _gpu_at_start(source)
        lease = gpu_lease(gpu.uuid, source.leases)
        try:
            # Not tried once alone: a line that waits looks at the lease, which holds it for an instant.
            lease.acquire(gpu.uuid)
        except NstrainError:
            raise GpuTaken(f"{gpu.uuid} is held by process {lease.holder()}") from None
        others = [process for process in gpu.processes if not is_ours(process.pid, line)]
        if others:
            lease.release()
            raise GpuTaken(describe(gpu, others))
        return cls(gpu, lease, line, source, every, own_bytes)

    def confirm(self, uuid: str) -> None:
        """Raise `Refusal` unless the GPU that torch uses is the one that is leased."""
        refuse_other_gpu(self.uuid, uuid)

    def taken_by(self, update: int) -> str | None:
        """Who else is on the GPU, as of the newest look, after an update; None if nobody. Never waits."""
        if self._reading is None and update >= self._next_look:
            self._next_look = update + self._every
            try:
                self._reading = ReadingProcess(self._source.reader)
            except Unreadable as error:
                self._pass_over(str(error))
        elif self._reading is not None:
            try:
                gpus = self._reading.poll()
            except (Unreadable, Refusal) as error:
                self._reading = None
                self._pass_over(str(error))
                return self.others
            if gpus is not None:
                self._reading = None
                self.others = self._judge(gpus)
        return self.others

    def _judge(self, gpus: Sequence[Gpu]) -> str | None:
        gpu = next((gpu for gpu in gpus if gpu.uuid == self.uuid), None)
        if gpu is None:
            return self._pass_over(f"{self.uuid} is not among the GPUs that the reader finds")
        if gpu.trouble is not None:
            return self._pass_over(f"{self.uuid}: {gpu.trouble}")
        if self._trouble is not None:
            print("the GPU's other processes can be read again", flush=True)
            self._trouble = None
        if not gpu.processes:
            return self._by_memory(gpu)
        others = self._strangers(gpu)
        return describe(gpu, others) if others else None

    def _strangers(self, gpu: Gpu) -> list[GpuProcess]:
        """Listed processes that are not the line's; settles at the first look which number is this process's."""
        strangers = [process for process in gpu.processes if not is_ours(process.pid, self._line)]
        if not self._alias_settled:
            self._alias_settled = True
            listed = any(process.pid == os.getpid() for process in gpu.processes)
            if not listed and len(strangers) == 1 and self._own_bytes() > 0:
                self._alias = strangers[0].pid
        return [process for process in strangers if process.pid != self._alias]

    def _by_memory(self, gpu: Gpu) -> str | None:
        """Who is there by the memory in use, where no process is listed."""
        own = self._own_bytes()
        if own == 0 or not gpu.memory_tells:
            return None
        if self._baseline is None or self._baseline[0] != own:
            self._baseline = own, gpu.used_bytes
            return None
        foreign = gpu.used_bytes - self._baseline[1]
        if foreign < CONTEXT_BYTES:
            return None
        return f"a process that is not listed took {foreign / 2**30:.1f} GiB of {gpu.uuid}"

    def _pass_over(self, trouble: str) -> str | None:
        if trouble != self._trouble:
            self._trouble = trouble
            print(f"the GPU's other processes cannot be read, training goes on: {trouble}", flush=True)
        return self.others


def _gpu_at_start(source: GpuSource) -> Gpu:
    for _ in range(START_READINGS - 1):
        try:
            return visible_gpu(read_gpus(source.reader))
        except Unreadable as error:
            print(f"{error}; trying again", flush=True)
    try:
        return visible_gpu(read_gpus(source.reader))
    except Unreadable as error:
        raise GpuTaken(f"nobody can tell whether the GPU is free: {error}") from error
