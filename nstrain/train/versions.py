"""What decides the bits that a line computes, beside its settings and data: the code, its libraries, and the machine.

A checkpoint says with what it was computed, so that a line which goes on with something else is told.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nstrain
from nstrain.data.encode import ENCODING_VERSION
from nstrain.data.order import ORDER_VERSION
from nstrain.train.model import kernel_choice, package_directory

GATING = {"order_version": ORDER_VERSION, "encoding_version": ENCODING_VERSION}
"""A line does not go on under others; of everything else it is told."""

DRIVER_FILE = Path("/sys/module/nvidia/version")
"""What the kernel's module says of itself."""


def software() -> dict[str, Any]:
    """The versions of code and libraries in this process; None for one that is not there. Asks no GPU."""
    return {**_software(package_directory()), "kernel_choice": kernel_choice()}


@functools.cache
def _software(package: Path) -> dict[str, Any]:
    return {
        "nstrain": nstrain.__version__,
        "model_package": package.name,
        "model_code": code_digest(package),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        **GATING,
    }


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """The device "cpu" or "cuda" that this process computes on, and what drives it; makes CUDA ready for "cuda"."""
    if device != "cuda":
        return {"device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    return {"device": torch.cuda.get_device_name(), "driver": _driver_version(), "cublas": _cublas_version()}


def versions(device: str) -> dict[str, Any]:
    """All of it, by name, as a checkpoint keeps it."""
    return {**software(), **machine(device)}


def triton_version() -> str | None:
    """The version of triton; None where there is none."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def code_digest(*directories: Path) -> str:
    """The first 16 digits of a SHA-256 over the Python files in directories."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _driver_version() -> str | None:
    try:
        return DRIVER_FILE.read_text().strip()
    except OSError:  # some containers do not show it
        return None


def _cublas_version() -> str | None:
    """The version of the cuBLAS that torch has loaded, from the library itself."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        parts = [ctypes.c_int() for _ in range(3)]
        if any(library.cublasGetProperty(which, ctypes.byref(part)) for which, part in enumerate(parts)):
            return None
    except (OSError, AttributeError):  # linked into torch, or a library without that function
        return None
    return ".".join(str(part.value) for part in parts)
