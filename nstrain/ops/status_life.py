"""Whether a line's processes go on: a trainer that hangs, and processes that a signal has stopped (see status.py).

The watchdog ends a trainer that hangs, but only after the budget of its stage, half an hour and more. Until then a
rate and the time left would say that all is well.
"""

from __future__ import annotations

import time

from nstrain.base.process import is_stopped
from nstrain.base.units import human_seconds
from nstrain.line.state_files import Heartbeat

QUIET_UPDATES = 5
"""A trainer that beats at every update is silent after so many times the last one's length ..."""

LEAST_QUIET_S = 10.0
"""... but not before this."""

QUIET_S = 60.0
"""In a stage other than training, or before the first update, it is silent after this ..."""

QUIET_SHARE = 0.1
"""... or this share of what the stage may take: a first start compiles kernels for minutes."""


def silent_for(beat: Heartbeat | None, update_s: float | None) -> float | None:
    """Seconds since a living trainer's last heartbeat, if that is longer than it should be; else None.

    `update_s` is the length of the last recorded update, if there is one.
    """
    if beat is None:
        return None
    silent_s = time.time() - beat.time
    by_updates = beat.stage == "training" and update_s is not None
    if by_updates:
        longest_s = max(LEAST_QUIET_S, QUIET_UPDATES * (update_s or 0))
    else:
        longest_s = max(QUIET_S, QUIET_SHARE * (beat.budget_s or 0))
    return silent_s if silent_s > longest_s else None


def silence(silent_s: float, budget_s: float | None) -> str:
    """For people."""
    ended = "" if budget_s is None else f" (ended after {human_seconds(budget_s)})"
    return f"no sign of life for {human_seconds(silent_s)}{ended}"


def stopped_of(*pids: int | None) -> tuple[int, ...]:
    """Of some processes those that a signal has stopped."""
    return tuple(pid for pid in pids if pid is not None and is_stopped(pid))


def how_to_go_on(pids: tuple[int, ...]) -> str:
    """What to do about processes that are stopped, for people."""
    which = f"process {pids[0]} is" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} are"
    return f"{which} stopped (SIGSTOP, Ctrl-Z): `kill -CONT {' '.join(map(str, pids))}`"
