"""The copy of a line's tensors in host memory that a checkpoint is written from, while the line trains on.

- On a CPU: a copy of every buffer, made for each checkpoint.
- On a GPU: pinned buffers of the size of the device's, taken once. The copy runs on a stream of its own at the speed of
  the bus, and the GPU goes on with the forward and backward passes of the next update; only the writing of AdamW waits
  for it (`Engine.before_apply`), since nothing else writes masters, moments or their average.
- On a GPU of a host without the room for that: no copy. The tensors come to the host one by one as they are written,
  and the line stands still until the checkpoint is on disk.
- On a GPU whose driver does not pin memory though there is room: as on a CPU; the line stands still for the copy.

Which way it is, if it is a slow one, is said at the start.

The pinned buffers are pages of this process that are registered with the driver: torch's own pinned memory comes in
powers of two, up to twice of what is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nstrain.base.errors import NstrainError
from nstrain.base.host_memory import available_host_bytes
from nstrain.base.units import human_bytes
from nstrain.line.tensor_file import Array, LazyTensors, Tensors
from nstrain.train.engine import Engine
from nstrain.train.flat import FlatParameters, TensorKind

KEPT_FREE_BYTES = 4 << 30
"""Memory of the host that is left to everything else: rows, the journal, pages of files that are being written."""


@dataclasses.dataclass(frozen=True)
class HostTensors:
    """Tensors of a checkpoint as they are now."""

    by_kind: Mapping[str, Tensors]
    """By kind (`FlatParameters.kinds`), then by parameter name."""
    ready: Callable[[], None]
    """Returns once they are in host memory; called before they are read."""


class HostCopy:
    """A copy of the buffers in memory of its own, made anew each time."""

    in_background = True
    """Whether the line may train on while a checkpoint is written."""

    def __init__(self, engine: Engine, slow: str | None = None) -> None:
        self._flat = engine.flat
        self.slow = slow
        """For how long and why the line stands still at every checkpoint, for people; None if it does not."""

    def take(self) -> HostTensors:
        """The tensors as they are after the last update. Those taken before must not be in use any more."""
        return HostTensors({kind: self._flat.export(kind) for kind in self._flat.kinds}, lambda: None)

    def close(self) -> None:
        """Give the memory back."""


class LazyCopy(HostCopy):
    """No copy: tensors are read from the device while they are written."""

    in_background = False

    def take(self) -> HostTensors:
        """As `HostCopy.take`; the state must not change until they have been written."""
        torch.cuda.synchronize()
        shapes = {cut.name: cut.shape for group in self._flat.groups for cut in group.slices}
        tensors: dict[str, Tensors] = {k: LazyTensors(shapes, self._reader(k)) for k in self._flat.kinds}
        return HostTensors(tensors, lambda: None)

    def _reader(self, kind: TensorKind) -> Callable[[str], Any]:
        places = {cut.name: (group, cut) for group in self._flat.groups for cut in group.slices}

        def read(name: str) -> Any:
            group, cut = places[name]
            return cut.of(group.buffer(kind)).detach().cpu().numpy()

        return read


class PinnedCopy(HostCopy):
    """A copy in pinned memory, made while the GPU computes. Needs a CUDA device."""

    def __init__(self, engine: Engine) -> None:
        """Takes the memory. Raises `NstrainError` if the driver refuses to pin it."""
        super().__init__(engine)
        self._stream = torch.cuda.Stream()
        self._copied = torch.cuda.Event(blocking=True)  # the thread that waits for it leaves the processor to others
        self._engine = engine
        self._pages: list[Tensor] = []
        self._buffers: dict[tuple[str, str], Tensor] = {}
        try:
            for kind in kinds_ever(self._flat):
                for group in self._flat.groups:
                    self._buffers[kind, group.name] = self._pin(group.buffer(kind).numel())
        except BaseException:
            self.close()
            raise
        engine.before_apply = self._hold_back

    def take(self) -> HostTensors:
        """Begin the copy of the state after the last update; it is whole once `ready` returns."""
        torch.cuda.synchronize()
        by_kind: dict[str, Tensors] = {}
        with torch.cuda.stream(self._stream):
            for kind in self._flat.kinds:
                tensors: dict[str, Array] = {}
                for group in self._flat.groups:
                    host = self._buffers[kind, group.name]
                    host.copy_(group.buffer(kind), non_blocking=True)
                    tensors |= {cut.name: cut.of(host).numpy() for cut in group.slices}
                by_kind[kind] = tensors
            self._copied.record()
        return HostTensors(by_kind, self._copied.synchronize)

    def close(self) -> None:
        """Give the memory back; what was taken from it must not be in use."""
        torch.cuda.synchronize()
        self._buffers.clear()
        while self._pages:
            pages = self._pages.pop()  # named, or they would be unmapped before the driver lets go of them
            torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())

    def _hold_back(self) -> None:
        """The writing of the next update, on the current stream, comes after the copy (at once, if there is none)."""
        torch.cuda.current_stream().wait_event(self._copied)

    def _pin(self, elements: int) -> Tensor:
        pages = mmap.mmap(-1, 4 * elements)
        with contextlib.suppress(AttributeError, OSError):  # where the kernel knows of none
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger pages to pin
        buffer = torch.frombuffer(pages, dtype=torch.float32)
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), 4 * elements, 0)
        if error != torch.cuda.cudart().cudaError.success:
            _forget_last_error()
            why = torch.cuda.cudart().cudaGetErrorString(error)
            raise NstrainError(f"the driver does not pin {human_bytes(4 * elements)} of host memory ({why})")
        self._pages.append(buffer)
        return buffer


def _forget_last_error() -> None:
    """Take back the error that the runtime keeps after a failed call, or the next kernel's launch would report it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def kinds_ever(flat: FlatParameters) -> tuple[TensorKind, ...]:
    """What a checkpoint of this line will hold at most."""
    return (*(kind for kind in flat.kinds if kind != "ema"), *(("ema",) if flat.has_ema else ()))


def host_copy_bytes(elements: int, kinds: int) -> int:
    """Host memory that the copy of so many parameters takes (the gaps of the flat layout add less than a percent)."""
    return 4 * elements * kinds


def refusal_of_pinned(needed_bytes: int) -> str | None:
    """Why this host has no room for a pinned copy, for people; None if it has."""
    free_bytes = available_host_bytes()
    if free_bytes >= needed_bytes + KEPT_FREE_BYTES:
        return None
    return (
        f"a copy for checkpoints needs {human_bytes(needed_bytes)} of host memory, {human_bytes(free_bytes)} are "
        f"available and {human_bytes(KEPT_FREE_BYTES)} of them are left to everything else"
    )


def open_host_copy(engine: Engine) -> HostCopy:
    """The best copy that this host has room for."""
    flat = engine.flat
    if flat.device.type != "cuda":
        return HostCopy(engine)
    needed_bytes = sum(4 * group.buffer(kind).numel() for kind in kinds_ever(flat) for group in flat.groups)
    if why := refusal_of_pinned(needed_bytes):
        return LazyCopy(engine, f"until each is written: {why}")
    try:
        return PinnedCopy(engine)
    except NstrainError as error:
        return HostCopy(engine, f"until each is copied: {error}")
