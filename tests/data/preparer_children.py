"""Preparers as processes of their own, to be killed: forked from one that has imported everything, so that each starts
at once.

Run as a script it is that process: a line of JSON on its standard input starts a preparer and waits for its end. It has
one thread and never encodes anything itself, so it may fork.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from data_helpers import environment

CALLS = ("fsync", "replace", "rename")
"""The calls of `os` by which something becomes durable or visible."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """Where a preparer kills itself."""

    point: str = ""
    """As NSTRAIN_KILL_POINT has it."""
    call: int = 0
    """At its n-th call, from 1, of one of CALLS; 0: at none."""
    moment: str = "before"
    """before | after | torn: as if power had failed, with half of the file that was not yet durable lost."""


class Preparers:
    """Starts one preparer after the other. Use it as a context."""

    def __init__(self) -> None:
        variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "4711"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        work: Path,
        until_cycle: int,
        workers: int = 0,
        kill: Kill | None = None,
        kill_when: Callable[[], bool] | None = None,
    ) -> tuple[int, int]:
        """Run a preparer to its end: its exit status (-9: killed), and how many of CALLS it made if it was not.

        `kill_when` is asked again and again until it says that the preparer is to be killed now.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"work": str(work), "until": until_cycle, "workers": workers, **dataclasses.asdict(kill or Kill())}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if kill_when is not None:
            while not kill_when() and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.0005)
            os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
        self._process.stdin.write("reap\n")
        self._process.stdin.flush()
        status, calls = self._process.stdout.readline().split()
        return int(status), int(calls)

    def __enter__(self) -> Preparers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


def _patch(at: int, moment: str, report: int) -> None:
    """Have this process killed at its n-th call of CALLS; `report` is written their number at the end."""
    made = 0

    def patched(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == at and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if made == at and moment == "torn" and name == "fsync":
                _tear(f"/proc/self/fd/{arguments[0]}")
            result = real(*arguments, **options)
            if made == at:
                if moment == "torn" and str(arguments[-1]).endswith(".tokens"):  # put in place without an fsync
                    _tear(str(arguments[-1]))
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CALLS:
        setattr(os, name, patched(name, getattr(os, name)))

    real_exit = os._exit

    def leave(status: int) -> None:
        os.write(report, str(made).encode())
        real_exit(status)

    os._exit = leave  # type: ignore[assignment]


def _tear(path: str) -> None:
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode):
        os.truncate(path, found.st_size // 2)
        if path.startswith("/proc"):
            os.kill(os.getpid(), signal.SIGKILL)


def _preparer(order: dict[str, Any], report: int) -> None:
    """What a forked child does."""
    from nstrain.base import killpoints
    from nstrain.data.preparer import run_preparer

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ[killpoints.VARIABLE] = order["point"]
    killpoints.arm(order["point"])
    _patch(order["call"], order["moment"], report)
    status = 1
    try:
        status = int(run_preparer(Path(order["work"]), until_cycle=order["until"], workers=order["workers"]))
    finally:
        os._exit(status)


def main() -> None:
    """Start preparers, one after the other, until the input ends."""
    import nstrain.data.preparer  # noqa: F401 - the children find it imported

    for line in sys.stdin:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _preparer(json.loads(line), write_end)
        os.close(write_end)
        print(pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        with os.fdopen(read_end) as report:
            print(os.waitstatus_to_exitcode(status), report.read() or 0, flush=True)


if __name__ == "__main__":
    main()
