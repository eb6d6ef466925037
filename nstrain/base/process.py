"""Who a process is. A pid alone is reused; a pid with its start time and the boot it belongs to is not."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process as it can be recognised later, from any other process of this machine."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and the process's start (field 22 of /proc/PID/stat)."""
    boot_id: str

    def to_json(self) -> dict[str, int | str]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, int | str]) -> ProcessId:
        return cls(int(value["pid"]), int(value["start_ticks"]), str(value["boot_id"]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces and parentheses itself.
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, or None if there is none with that pid."""
    fields = _stat_fields(pid)
    return None if fields is None else ProcessId(pid, int(fields[19]), _boot_id())


def this_process() -> ProcessId:
    """The identity of the calling process."""
    identity = identify(os.getpid())
    assert identity is not None, "a running process has a /proc entry"
    return identity


def alive(identity: ProcessId) -> bool:
    """Whether exactly that process still runs. A zombie, a reused pid and another boot's process do not count."""
    fields = _stat_fields(identity.pid)
    return (
        fields is not None
        and fields[0] not in ("Z", "X")
        and int(fields[19]) == identity.start_ticks
        and identity.boot_id == _boot_id()
    )


def ran_at(pid: int, unix_s: float) -> bool:
    """Whether the process that has this pid now ran already at that time: then it is the one that had the pid then.

    Tells whether the writer of a file that holds a pid and a time is still alive. Times are compared to within the two
    seconds to which the system tells its own start.
    """
    identity = identify(pid)
    if identity is None or not alive(identity):
        return False
    boot_s = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    return boot_s + identity.start_ticks / os.sysconf("SC_CLK_TCK") <= unix_s + 2.0


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, a terminal's Ctrl-Z) has stopped a process until SIGCONT."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] == "T"


_STATES = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "Z": "zombie"}


def state_of(pid: int) -> str:
    """What the kernel says a process does, in words: its state, and where in the kernel it waits if that is told."""
    fields = _stat_fields(pid)
    if fields is None:
        return "gone"
    state = _STATES.get(fields[0], f"state {fields[0]}")
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return state
    return state if where in ("", "0") else f"{state} in {where}"
