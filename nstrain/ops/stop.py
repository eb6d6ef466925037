"""`nstrain stop`: ask a line to save a checkpoint and end - at once or at a data cycle's end - and see that it does."""

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


def stop_line(
    run: Path,
    wait_s: float,
    on_wait: Callable[[Status], None] = lambda status: None,
    at_cycle_end: int | None = None,
) -> Stopped:
    """Ask a running line to stop and wait at most `wait_s` for its end; `on_wait` is called about once a second.

    A line ends after a checkpoint at its next update boundary, or while it waits; with `at_cycle_end` exactly after
    the last update of that data cycle. Raises `Refusal` if it does not run, or if it cannot stop there any more.
    """
    paths = LinePaths(run.resolve())
    found = status(run)
    state = read_supervisor(paths)
    if state is None or not state.running():
        raise Refusal(f"{run} does not run: it is {found.state}" + (f" ({found.reason})" if found.reason else ""))
    if at_cycle_end is not None:
        _refuse_unreachable_end(found, at_cycle_end)
    request_stop(paths, at_cycle_end)
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


def _refuse_unreachable_end(found: Status, cycle: int) -> None:
    """Refuse a cycle whose end the line has passed, or that its schedule does not have."""
    if found.cycle_count is not None and not 1 <= cycle <= found.cycle_count:
        raise Refusal(f"{found.run}: the schedule has cycles 1 ... {found.cycle_count}; asked to stop after {cycle}")
    now = found.cycle or 1
    if now > cycle or (now == cycle and found.cycle_progress is not None and found.cycle_progress >= 1):
        raise Refusal(
            f"{found.run} is past the end of cycle {cycle}: it stands in cycle {max(now, cycle + 1)}. `nstrain stop` "
            "without --at-cycle-end stops it at its next update"
        )
