"""Named instants at which a test can have this very process killed, to prove that `kill -9` there loses nothing.

Code that writes durable state calls `kill_point("<area>:<step>")` between its steps. With the environment variable
`NSTRAIN_KILL_POINT="<area>:<n>"` set when the process starts, the n-th call (from 1) in that area, counted over the
process's life, sends SIGKILL to the process. Unset, the call is an empty function.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "NSTRAIN_KILL_POINT"

_area = ""
_calls_left = 0


def arm(where: str) -> None:
    """Kill this process at the n-th kill point of an area from now on, given as `"<area>:<n>"`.

    An empty string disarms. Raises `ValueError` for anything else: a test that asked for a kill must not run without.
    """
    global _area, _calls_left
    area, _, number = where.partition(":")
    if where and not (area and number.isdecimal() and int(number) > 0):
        raise ValueError(f'{VARIABLE}: expected "<area>:<n>" with n from 1, found {where!r}')
    _area, _calls_left = (area, int(number)) if where else ("", 0)


def kill_point(name: str) -> None:
    """The instant `name`, given as `"<area>:<step>"`; returns unless a test armed this one."""
    global _calls_left
    if _area and name.partition(":")[0] == _area:
        _calls_left -= 1
        if _calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
