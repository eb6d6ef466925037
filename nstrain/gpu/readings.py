"""Readings of the machine's GPUs, taken by a process of their own in a bounded time, and what they say about a line's.

Which process is foreign: any that computes on the line's GPU and is neither the reader of the question nor started for
the same line. The line's processes carry its directory in their environment (LINE_VARIABLE), so that one which a killed
supervisor left behind is known as the line's own. What cannot be read is not free: callers are told why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nstrain.base.errors import NstrainError, Refusal
from nstrain.settings.host import load_host
from nstrain.settings.run import RunSettings

READER_COMMAND = (sys.executable, "-m", "nstrain.gpu.reader")
READ_LIMIT_S = 20.0
"""How long a reading may take; the slowest part is a driver that wakes a card."""

LINE_VARIABLE = "NSTRAIN_LINE"
"""Environment variable of a line's processes: the line's directory."""

CONTEXT_BYTES = 600 << 20
"""Memory that nobody accounts for and that is more than this is somebody's: a process takes about as much at least."""


class Unreadable(NstrainError):
    """The GPUs could not be read: the driver hangs, say. Unknown is not free."""


@dataclasses.dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    used_bytes: int | None
    """Its memory there; None if the driver does not tell."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one, at one moment."""

    uuid: str
    name: str
    used_bytes: int
    reserved_bytes: int
    """Of the used, what the driver keeps for itself."""
    total_bytes: int
    memory_tells: bool
    """Whether the memory in use is that of living processes."""
    processes: tuple[GpuProcess, ...]
    trouble: str | None = None
    """Why nothing of it but its place, and perhaps its uuid, could be read; None if it could."""


@dataclasses.dataclass(frozen=True)
class GpuSource:
    """How a line's GPU is read and leased."""

    reader: tuple[str, ...]
    """The command that prints what is on the GPUs (reader.py)."""
    leases: Path | None = None
    """The directory of the leases; None: this host's."""


def gpu_on(device: str) -> GpuSource | None:
    """How the GPU is read, with host.json's reader or our own; None for the device "cpu"."""
    return GpuSource(load_host().gpu_reader or READER_COMMAND) if device == "cuda" else None


def gpu_of(settings: RunSettings) -> GpuSource | None:
    """How the GPU of a line is read; None for a line on the CPU."""
    return gpu_on(settings.device)


class ReadingProcess:
    """A reading that is under way; `poll` never waits."""

    def __init__(self, command: Sequence[str], limit_s: float = READ_LIMIT_S) -> None:
        """Start it. Raises `Unreadable` if it cannot be started."""
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._output_fd, write_end = os.pipe()
        self._said = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != LINE_VARIABLE},
            )
        except OSError as error:
            os.close(self._output_fd)
            raise Unreadable(f"{command[0]} cannot be started: {error}") from error
        finally:
            os.close(write_end)
        os.set_blocking(self._output_fd, False)

    def poll(self) -> list[Gpu] | None:
        """The GPUs once they are read; None while they are not yet.

        Raises `Unreadable` if that failed or took too long, and `Refusal` if this machine lacks what it needs.
        """
        self._listen()
        code = self._process.poll()
        if code is None:
            if time.monotonic() < self._deadline:
                return None
            self.close()
            raise Unreadable(f"the reader of the GPUs gave no answer in {self._limit_s:.0f} s (a driver that hangs?)")
        self._listen()
        error = b"" if self._process.stderr is None else self._process.stderr.read(2000)
        self.close()
        words = error.decode(errors="replace").strip()
        if code == 2:
            raise Refusal(words or "the reader of the GPUs refused")
        if code != 0:
            raise Unreadable(f"the reader of the GPUs ended with exit code {code}: {words or 'no word'}")
        return _parse(self._said)

    def wait(self) -> list[Gpu]:
        """Wait, bounded; raises what `poll` does."""
        while (gpus := self.poll()) is None:
            time.sleep(0.02)
        return gpus

    def close(self) -> None:
        """End it, whatever it does. One that hangs in a driver outlives its SIGKILL, and is left behind."""
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        try:
            while block := os.read(self._output_fd, 1 << 16):
                self._said += block
        except BlockingIOError:
            return


def _parse(said: bytes) -> list[Gpu]:
    try:
        answer = json.loads(said)
        return [_parse_gpu(gpu) for gpu in answer["gpus"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"the reader of the GPUs printed something else than GPUs ({error!r}): {said[:200]!r}"
        ) from None


def _parse_gpu(gpu: Mapping[str, Any]) -> Gpu:
    if "unreadable" in gpu:
        return Gpu(str(gpu["uuid"]), "", 0, 0, 0, False, (), str(gpu["unreadable"]))
    return Gpu(
        uuid=str(gpu["uuid"]),
        name=str(gpu["name"]),
        used_bytes=int(gpu["used_bytes"]),
        reserved_bytes=int(gpu["reserved_bytes"]),
        total_bytes=int(gpu["total_bytes"]),
        memory_tells=bool(gpu["memory_tells"]),
        processes=tuple(GpuProcess(int(found["pid"]), found["used_bytes"]) for found in gpu["processes"]),
    )


def read_gpus(command: Sequence[str], limit_s: float = READ_LIMIT_S) -> list[Gpu]:
    """Read the GPUs and wait for it, bounded. Raises `Unreadable`, or `Refusal` for a machine that lacks a library."""
    return ReadingProcess(command, limit_s).wait()


def visible_gpu(gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> Gpu:
    """The GPU that CUDA gives a process as its first, by CUDA_VISIBLE_DEVICES.

    Raises `Refusal` if there is none, and `Unreadable` if it is, or may be, one that could not be read. Numbers are
    taken in the order of the PCI bus, which is CUDA's own among equal cards; the trainer compares with what torch uses
    (held.py).
    """
    first = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    whole = [place for place, gpu in enumerate(gpus) if not gpu.uuid.startswith("MIG-")]
    if first.isdecimal() and int(first) < len(whole):
        gpu, *after = gpus[whole[int(first)] :]
        return _readable(after[0] if after and after[0].uuid.startswith("MIG-") else gpu)
    is_name = bool(first) and not first.isdecimal()
    named = [gpu for gpu in gpus if is_name and gpu.uuid.startswith(first)]
    nameless = [gpu for gpu in gpus if is_name and not gpu.uuid]
    if len(named) == 1 or (nameless and not named):  # one whose name could not be read may be the one that is meant
        return _readable((named or nameless)[0])
    found = ", ".join(gpu.uuid or "one that cannot be read" for gpu in gpus) or "none"
    raise Refusal(f"no GPU for CUDA_VISIBLE_DEVICES={first!r}: this machine's GPUs are {found}")


def _readable(gpu: Gpu) -> Gpu:
    """The GPU itself. Raises `Unreadable` if nothing of it was read."""
    if gpu.trouble is not None:
        raise Unreadable(f"the GPU {gpu.uuid or 'of this line'} cannot be read: {gpu.trouble}")
    return gpu


def is_ours(pid: int, line: Path) -> bool:
    """Whether a process was started for a line (or is this one)."""
    if pid == os.getpid():
        return True
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{LINE_VARIABLE}={line}".encode() in environment


def describe(gpu: Gpu, processes: Sequence[GpuProcess]) -> str:
    """Processes on a GPU in words."""
    words = []
    for process in processes:
        try:
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        except OSError:
            name = "of another container" if not Path(f"/proc/{process.pid}").exists() else "unknown"
        memory = "" if process.used_bytes is None else f", {process.used_bytes / 2**30:.1f} GiB"
        words.append(f"process {process.pid} ({name}{memory})")
    return f"{' and '.join(words)} on {gpu.uuid}"
