"""The same data, state and thread count give the same bits: what has to be set in a process for that, in one place."""

from __future__ import annotations

import os

import torch

from nstrain.base.errors import NstrainError

_PROBE_ELEMENTS = 1 << 21
"""Enough elements that every thread of a pool gets a share of them."""


def enter_deterministic_mode(threads: int) -> None:
    """Set this process up for reproducible sums; must run before its first computation.

    One thread count, one order of operations (torch refuses operators that have none), and denormal numbers flushed to
    zero on every thread: moments of parameters that are rarely used decay into the denormals, where a CPU computes
    up to 15 times slower. Threads inherit that mode from the one that starts them, hence "before".

    Raises `NstrainError` if torch cannot use that many threads or if its threads disagree about denormals.
    """
    # Read when cuBLAS starts; without it torch refuses matrix products in deterministic mode on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    # As use_deterministic_algorithms(True), which would spend a second on importing torch's compiler.
    torch.set_deterministic_debug_mode("error")
    # Filling every fresh buffer with NaN would find readers of unwritten memory, at the price of another pass each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.get_num_threads() != threads:
        raise NstrainError(
            f"run.json: field 'threads' is {threads}, but torch uses {torch.get_num_threads()}; "
            "look for a limit such as OMP_THREAD_LIMIT in the environment or in host.json's env"
        )
    _refuse_mixed_denormals()


def _refuse_mixed_denormals() -> None:
    """Some CPUs keep denormals; then every thread must."""
    # Made from its bits: as a number it might be flushed here already.
    denormal = torch.full((_PROBE_ELEMENTS,), 1 << 22, dtype=torch.int32).view(torch.float32)
    kept = (denormal * 1.0).view(torch.int32).count_nonzero().item()
    if kept not in (0, _PROBE_ELEMENTS):
        raise NstrainError(
            f"{kept:,} of {_PROBE_ELEMENTS:,} denormal numbers survive a multiplication by one: the CPU threads of "
            "this process disagree about denormals, because something computed before the trainer was set up"
        )
