"""How much memory this process may still take from the machine it runs on.

The kernel's own estimate (MemAvailable of /proc/meminfo) and, in a container, what the limits of its control groups
leave: pages of files that can be given back at once do not count as taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping or being killed for it."""
    fields = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    available = next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")
    return max(0, min([available, *_left_by_limits(proc, cgroups)]))


def _left_by_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each memory limit that holds for this process leaves."""
    for line in _lines(proc / "self" / "cgroup"):
        hierarchy, controllers, place = line.split(":", 2)
        if hierarchy == "0":  # version 2
            root, limit, taken = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, taken = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = root / place.lstrip("/")
        # A group is under the limits of all groups above it. In a container the path may be one of the host's, which
        # is not there; what is mounted at the root is then the container's own group.
        for group in (here, *here.parents):
            if group == root or root in group.parents:
                limit_bytes, taken_bytes = _number(group / limit), _number(group / taken)
                if limit_bytes is not None and taken_bytes is not None:
                    yield limit_bytes - taken_bytes + _file_pages_bytes(group / "memory.stat")


def _file_pages_bytes(stat: Path) -> int:
    fields = dict(line.split() for line in _lines(stat))
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it says `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None
