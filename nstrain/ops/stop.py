"""`nstrain stop`: ask a line to save a checkpoint and end, and see that it does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor, request_stop
from nstrain.ops.status import Status, status

POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Stopped:
    """What became of a request to stop."""

    ended: bool
    """Whether the line has ended; if not, the request stands and it ends at its next update boundary."""
    status: Status
    """The line as it was then."""


def stop_line(run: Path, wait_s: float, on_wait: Callable[[Status], None] = lambda status: None) -> Stopped:
    """Ask a running line to stop and wait at most `wait_s` for its end; `on_wait` is called about once a second.

    A line ends after a checkpoint at its next update boundary, or while it waits. Raises `Refusal` if it does not run.
    """
    paths = LinePaths(run.resolve())
    found = status(run)
    state = read_supervisor(paths)
    if state is None or not state.running():
        raise Refusal(f"{run} does not run: it is {found.state}" + (f" ({found.reason})" if found.reason else ""))
    request_stop(paths)
    deadline = time.monotonic() + wait_s
    told = time.monotonic()
    # The supervisor that was asked, not any that is started after it, decides when the wait is over.
    while (now := read_supervisor(paths)) is not None and now.supervisor == state.supervisor and now.running():
        if time.monotonic() >= deadline:
            return Stopped(False, status(run))
        if time.monotonic() - told >= 1.0:
            on_wait(status(run))
            told = time.monotonic()
        time.sleep(POLL_S)
    return Stopped(True, status(run))
