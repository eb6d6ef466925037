"""What is on this machine's GPUs, printed as JSON: `python -m nstrain.gpu.reader`, a process for one look.

NVML can hang for good when a driver does, so nobody who must go on may call it: this process does, and whoever started
it gives it a bounded time (readings.py). It makes no CUDA context and so is no process on a GPU itself. A program of
another kind may stand in its place (host.json, `gpu_reader`); it prints the same form:

    {"format": 1, "gpus": [{
        "uuid": "GPU-...", "name": "...", "used_bytes": 1, "reserved_bytes": 1, "total_bytes": 1,
        "memory_tells": true, "processes": [{"pid": 1, "used_bytes": 1}]}]}

in the order of the PCI bus, slices (MIG) after their GPU. A process's `used_bytes` is null if the driver does not
tell. `memory_tells` is false where the memory in use is the operating system's to count and outlives a process, or
where the windows of a desktop are a part of it. A GPU that cannot be read keeps its place as
{"uuid": "GPU-..." or "", "unreadable": "why"}: one that fell off the bus must not hide the others. Exit codes: 0; 2 if
the library or the driver's is missing, with a sentence on standard error; 1 for a driver's error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

FORMAT = 1
DRAWN_BYTES = 256 << 20
"""What draws on a machine without a desktop - a login screen - has less than this."""


def main() -> int:
    """Print what NVML says."""
    try:
        import pynvml
    except ImportError:
        print("reading the GPUs needs the package nvidia-ml-py: pip install nvidia-ml-py", file=sys.stderr)
        return 2
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        print("the NVIDIA driver's library libnvidia-ml.so.1 is not on this machine", file=sys.stderr)
        return 2
    except pynvml.NVMLError as error:
        print(f"NVML: {error}", file=sys.stderr)
        return 1
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpus += _card(pynvml, index)
    except pynvml.NVMLError as error:
        print(f"NVML: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"format": FORMAT, "gpus": gpus}))
    return 0


def _card(pynvml: Any, index: int) -> list[dict[str, Any]]:
    """A GPU and its slices. What fails for one of them says nothing of the others."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return [{"uuid": "", "unreadable": str(error)}]
    slices = _slices(pynvml, handle)
    return [_entry(pynvml, handle, bool(slices)), *(_entry(pynvml, part, False) for part in slices)]


def _entry(pynvml: Any, handle: Any, is_split: bool) -> dict[str, Any]:
    uuid = ""
    try:
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        # Nobody computes on a GPU that is split but in its slices, and only root may ask for all of theirs at once.
        return {"uuid": uuid, **_describe(pynvml, handle), "processes": [] if is_split else _processes(pynvml, handle)}
    except pynvml.NVMLError as error:
        return {"uuid": uuid, "unreadable": str(error)}


def _describe(pynvml: Any, handle: Any) -> dict[str, Any]:
    reserved, tells = 0, not _is_memory_node(pynvml, handle) and not _is_drawn_on(pynvml, handle)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        used, reserved, total = memory.used, memory.reserved, memory.total
    except (pynvml.NVMLError, AttributeError):
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            used, total = memory.used, memory.total
        except pynvml.NVMLError_NotSupported:  # a GPU whose memory is the machine's
            used, total, tells = 0, 0, False
    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "used_bytes": int(used),
        "reserved_bytes": int(reserved),
        "total_bytes": int(total),
        "memory_tells": tells,
    }


def _processes(pynvml: Any, handle: Any) -> list[dict[str, int | None]]:
    """Those that compute, directly or through MPS; a display that only draws is nobody's rival."""
    found: dict[int, int | None] = {}
    for function in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetMPSComputeRunningProcesses):
        try:
            listed = function(handle)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            continue  # there is no MPS on this driver
        for process in listed:
            found[int(process.pid)] = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
    return [{"pid": pid, "used_bytes": found[pid]} for pid in sorted(found)]


def _is_drawn_on(pynvml: Any, handle: Any) -> bool:
    """Whether processes that draw have memory to speak of: it is in use, and no process that computes explains it."""
    try:
        drawing = pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    except (pynvml.NVMLError, AttributeError):
        return False
    known = [process.usedGpuMemory for process in drawing]
    return None in known or sum(known) >= DRAWN_BYTES


def _slices(pynvml: Any, handle: Any) -> list[Any]:
    """The handles of a GPU's MIG slices."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return []
    slices = []
    for index in range(count):
        try:
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError:
            continue  # no slice has this number
    return slices


def _is_memory_node(pynvml: Any, handle: Any) -> bool:
    """Whether the GPU's memory is a NUMA node of the operating system, which then keeps pages of processes gone."""
    try:
        pynvml.nvmlDeviceGetNumaNodeId(handle)
    except (pynvml.NVMLError, AttributeError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
