"""The real preparer with faults: `python faulty_preparer.py FAULTS WORK --ahead N ...`.

FAULTS is one of
    full while FILE         the disk is full while the file exists; each try gets into the cycle
    no room while FILE      the same, and no try does
    dies AREA:N,AREA:N      kill -9 at the N-th kill point of an area (nstrain/base/killpoints.py): the n-th start at
                            the n-th of them, later ones at none
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from nstrain.base import killpoints
from nstrain.base.errors import DiskFull
from nstrain.data import preparer


def full_while(file: Path, share: float) -> None:
    """Have room for a share of a cycle only while a file exists; each try gets a little less far than the last one."""
    prepare_cycle = preparer.prepare_cycle

    def prepare(*arguments: Any) -> Any:
        nonlocal share
        if file.exists():
            if share:
                arguments[3](share)
                share *= 0.9
            time.sleep(0.1)  # as long as anybody needs to see it
            raise DiskFull("no room for a cycle")
        return prepare_cycle(*arguments)

    preparer.prepare_cycle = prepare
    preparer.DISK_RETRY_S = 0.2
    preparer.SHOW_EVERY_S = 0.0


def die_at(points: list[str], work: Path) -> None:
    """Die at the point that is this start's."""
    counter = work.with_name("preparer.starts")
    start = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(start + 1))
    killpoints.arm(points[start] if start < len(points) else "")


if __name__ == "__main__":
    faults = sys.argv.pop(1)
    if faults.startswith("full while "):
        full_while(Path(faults.removeprefix("full while ")), 0.5)
    elif faults.startswith("no room while "):
        full_while(Path(faults.removeprefix("no room while ")), 0.0)
    else:
        die_at(faults.removeprefix("dies ").split(","), Path(sys.argv[1]))
    sys.exit(preparer.main())
