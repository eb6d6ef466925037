"""An update that did not find the memory it needs, said with the remedy instead of a traceback.

A capture that fails keeps its memory until the process ends, so that it cannot be tried again here: the line is saved
as it was before the update - nothing is written to weights or moments before a whole update is there - and left. One
that fails while it is applied is not saved: the line goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from nstrain.base.errors import NstrainError
from nstrain.gpu.arena import ArenaTooSmall

_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|not enough memory|bad_alloc"
    r"|(CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
"""What else says so: the CPU's allocator, and on a GPU whoever takes memory beside torch's allocator - a graph that is
instantiated, a kernel that is loaded, a library's handle. None of these errors is one that a context keeps."""


class OutOfMemory(NstrainError):
    """Work did not find the memory it needs."""


def want_of_memory(error: BaseException | None) -> BaseException | None:
    """The error that says so among those that led to this one: after it the capture's end fails as well."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError | ArenaTooSmall):
            return error
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """What an error says, without the allocator's advice."""
    return (str(error).strip().splitlines() or ["out of memory"])[0].rstrip(".")


@contextlib.contextmanager
def memory_told(what: str, remedy: str) -> Iterator[None]:
    """Raise `OutOfMemory`, saying what was done and what would help, for whatever in the block lacks memory."""
    try:
        yield
    except Exception as error:
        cause = want_of_memory(error)
        if cause is None:
            raise
        raise OutOfMemory(f"{what} did not find the memory that it needs: {first_line(cause)}. {remedy}") from error
