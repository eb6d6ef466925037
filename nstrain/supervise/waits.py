"""Waits that may be long: which of them is notified, and the wait for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.gpu.lease import gpu_lease
from nstrain.gpu.readings import (
    CONTEXT_BYTES,
    Gpu,
    GpuSource,
    ReadingProcess,
    Unreadable,
    describe,
    is_ours,
    read_gpus,
    visible_gpu,
)
from nstrain.line.notices import Event
from nstrain.supervise.failures import CLEAN_LOOKS
from nstrain.supervise.pace import Pace


class Stalls:
    """Notices of waits that last: one a stall, however long it goes on, and another one for the next."""

    def __init__(
        self, after_s: float, notify: Callable[[Event, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A wait is notified once it has lasted `after_s`."""
        self._after_s, self._notify, self._clock = after_s, notify, clock
        self._since: dict[Event, float] = {}
        self._told: set[Event] = set()

    def see(self, event: Event, what: str | None) -> None:
        """Take in what is waited for now, in words; None: nothing of this kind."""
        if what is None:
            self._since.pop(event, None)
            self._told.discard(event)
            return
        since = self._since.setdefault(event, self._clock())
        if event not in self._told and self._clock() - since >= self._after_s:
            self._told.add(event)
            self._notify(event, what)


class GpuGate:
    """Whether a line's GPU is free, asked again and again; no question waits for its answer.

    The lease of another line is looked at often and costs nothing. Once it is free, `clean_looks` readings in a row
    must find no process of others; after one that found some, CLEAN_LOOKS.

    A GPU that is not there is a wrong setting, but for a line that was launched on it before: it fell off the bus, or
    its driver is exchanged, and is waited for.
    """

    def __init__(
        self, line: Path, source: GpuSource, pace: Pace, clean_looks: int, launched_before: bool = False
    ) -> None:
        """`source` says how the GPUs are read and where their leases are."""
        self._launched_before = launched_before
        self._line, self._source, self._pace = line, source, pace
        self._wanted = clean_looks
        self._clean = 0
        self._uuid: str | None = None
        self._reading: ReadingProcess | None = None
        self._next = 0.0
        self.taken: str | None = None
        """By whom it is taken, or why nobody can tell, as of the newest look."""

    def free(self) -> bool:
        """Whether it is free now. Raises `Refusal` if this machine never had such a GPU or cannot read it at all."""
        if self._reading is not None:
            return self._answered()
        if time.monotonic() < self._next:
            return False
        if self._uuid is not None and self._leased(self._uuid):
            return False
        try:
            self._reading = ReadingProcess(self._source.reader)
        except Unreadable as error:
            self._not_free(str(error))
        return False

    def _answered(self) -> bool:
        assert self._reading is not None
        try:
            gpus = self._reading.poll()
            gpu = None if gpus is None else visible_gpu(gpus)
        except Unreadable as error:
            self._reading = None
            self._not_free(str(error))
            return False
        except Refusal as error:
            self._reading = None
            if not self._launched_before:
                raise
            self._not_free(str(error))
            return False
        if gpu is None:
            return False
        self._reading = None
        self._uuid = gpu.uuid
        if self._leased(gpu.uuid):
            return False
        if (others := others_on(gpu, self._line)) is not None:
            self._not_free(others)
            return False
        self._clean += 1
        self._next = time.monotonic() + self._pace.gpu_poll_s
        return self._clean >= self._wanted

    def _leased(self, uuid: str) -> bool:
        lease = gpu_lease(uuid, self._source.leases)
        if not lease.held_elsewhere():
            return False
        self.taken = f"{uuid}, held by process {lease.holder()}"
        self._next = time.monotonic() + self._pace.lease_poll_s
        return True

    def _not_free(self, why: str) -> None:
        self.taken, self._clean, self._wanted = why, 0, CLEAN_LOOKS
        self._next = time.monotonic() + self._pace.gpu_poll_s

    def close(self) -> None:
        """End a reading that is under way."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None


def others_on(gpu: Gpu, line: Path) -> str | None:
    """Processes on a GPU that are not the line's, in words; also one that is not listed but has taken memory."""
    others = [process for process in gpu.processes if not is_ours(process.pid, line)]
    if others:
        return describe(gpu, others)
    taken = gpu.used_bytes - gpu.reserved_bytes
    if not gpu.processes and gpu.memory_tells and taken > 2 * CONTEXT_BYTES:
        return f"a process that is not listed has {taken / 2**30:.1f} GiB of {gpu.uuid}"
    return None


def others_now(line: Path, source: GpuSource) -> str | None:
    """Who else is on the line's GPU now, in words; None if nobody is, or nobody can tell. Waits, bounded."""
    try:
        return others_on(visible_gpu(read_gpus(source.reader)), line)
    except (Unreadable, Refusal):  # also of a GPU that has gone: what the trainer died of is told, and not this
        return None
