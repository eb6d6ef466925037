"""All of a GPU's memory but a slack, held in one pool, from which everything transient of a trainer is served.

Taking it beforehand has two uses: other processes cannot take what a capture or a long validation row will need, and
no allocation of the trainer has to wait for the driver. The pool holds what large blocks it can get - one, if the
driver gives it - and some small segments, since the allocator never serves tensors up to 1 MiB from large ones. They
are allocated on the arena's stream and freed again at once: the allocator keeps the blocks of a living pool, and it
serves a stream only from blocks of that stream.

What lives in it must not outlive a replay: a graph writes its intermediates wherever it wrote them in the capture,
whoever has been given that memory since. So persistent tensors are made before, in the default pool.

All arenas of a process have one stream, since every stream that multiplies matrices keeps a workspace of 32 MiB for
good. An arena lives once: to change its size it is closed, which gives all of it back, and another is made; a pool's id
cannot be used again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch

from nstrain.base.errors import NstrainError

GIB = 1 << 30
SLACK_BYTES = 4 * GIB
"""What a capture may take outside the allocator: graphs' own buffers, modules that are loaded, libraries' handles."""
LARGE_GRAIN_BYTES = 2 << 20
SMALLEST_BLOCK_BYTES = 256 << 20
"""Below this the remainder of the memory is left."""
SMALL_SEGMENTS = 64
"""Segments of 2 MiB that are held for small tensors."""


class ArenaNotEmpty(NstrainError):
    """Something still lives in an arena that is to be closed; the message says how much."""


class ArenaTooSmall(NstrainError):
    """Work took more memory from the driver than its arena held."""


@functools.cache
def arena_stream() -> torch.cuda.Stream:
    """The stream of all arenas of this process."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Workspaces of this stream's matrix products are kept for good and must not come to lie in a pool.
        for dtype in (torch.float32, torch.bfloat16):
            torch.mm(*(torch.zeros(64, 64, device="cuda", dtype=dtype) for _ in range(2)))
    return stream


class Arena:
    """One memory pool on the arenas' stream, for one lifetime."""

    def __init__(self, hold_bytes: int | None = None, slack_bytes: int = SLACK_BYTES) -> None:
        """Hold `hold_bytes`, or by default all that is free but `slack_bytes`; 0 holds nothing beforehand.

        Raises `NstrainError` if so much is not to be had.
        """
        self.stream = arena_stream()
        self._pool: Any = torch.cuda.MemPool()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        self.held_bytes = 0
        wanted = max(0, free - slack_bytes) if hold_bytes is None else hold_bytes
        if wanted > free:
            raise NstrainError(f"the arena is to hold {wanted / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free")
        if wanted:
            self._hold(wanted)
        self._segments_held = self.segments()

    @property
    def pool_id(self) -> Any:
        """For captures."""
        return self._pool.id

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Eager work on the arena's stream whose allocations are served from it, on this thread alone.

        Autograd's own threads would allocate in the default pool.
        """
        with (
            torch.cuda.stream(self.stream),
            torch.autograd.set_multithreading_enabled(False),
            torch.cuda.use_mem_pool(self._pool),
        ):
            yield

    def segments(self) -> int:
        """Stretches of memory that the pool has from the driver."""
        return len(self._snapshot())

    def grown_segments(self) -> int:
        """Segments that were taken beyond what was held at the start; 0 as long as the arena was large enough."""
        return self.segments() - self._segments_held

    def active_bytes(self) -> int:
        """Memory in use."""
        return sum(segment["active_size"] for segment in self._snapshot())

    def close(self) -> int:
        """Give everything back; the bytes that the device has more of after it. The graphs in it must be gone.

        Raises `ArenaNotEmpty` if tensors still live in it: their memory could not be returned.
        """
        torch.cuda.synchronize()
        gc.collect()
        # A library's workspace is made at its first product of a kind, wherever allocations are served from just then:
        # cublasLt's megabyte came to lie in the arena. They are made again when they are needed.
        torch._C._cuda_clearCublasWorkspaces()
        active = self.active_bytes()
        if active:
            raise ArenaNotEmpty(f"{active:,} bytes of the arena are still in use, so it cannot be given back")
        before = torch.cuda.mem_get_info()[0]
        self._pool = None
        gc.collect()
        torch.cuda.synchronize()
        self.held_bytes = 0
        return torch.cuda.mem_get_info()[0] - before

    def _snapshot(self) -> list[dict[str, Any]]:
        return list(self._pool.snapshot())

    def _hold(self, wanted: int) -> None:
        pointers = []
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self._pool):
            for _ in range(2 * SMALL_SEGMENTS):
                pointers.append(self._allocate(1 << 20))
            size = wanted - 2 * SMALL_SEGMENTS * (1 << 20)
            while wanted - self.held_bytes >= SMALLEST_BLOCK_BYTES and size >= SMALLEST_BLOCK_BYTES:
                size = min(size, wanted - self.held_bytes) // LARGE_GRAIN_BYTES * LARGE_GRAIN_BYTES
                try:
                    pointers.append(self._allocate(size))
                except torch.OutOfMemoryError:
                    size //= 2
            for pointer in pointers:
                torch.cuda.caching_allocator_delete(pointer)

    def _allocate(self, size: int) -> int:
        pointer = torch.cuda.caching_allocator_alloc(size, stream=self.stream)
        self.held_bytes += size
        return int(pointer)
