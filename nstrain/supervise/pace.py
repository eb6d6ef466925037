"""How often the supervisor looks, and how long it waits: everything about time that is not a setting of the line."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds, unless a name says otherwise."""

    tick_s: float = 0.1
    """Between two looks at children, signals and files."""
    orphan_wait_s: float = 60.0
    """A trainer that a killed supervisor left behind may take so long to save and end."""
    relaunch_s: tuple[float, ...] = (1.0, 5.0, 20.0, 60.0)
    """Before the launch after the first, second, ... failure in a row without progress; the last one holds on."""
    hunger_s: float = 2.0
    """A trainer that waits for data for longer than this, while no preparer runs, waits for what nobody prepares."""
    fed_s: float = 60.0
    """A trainer has so long to see what a preparer has done before it counts as one that still waits."""
    preparer_retry_s: float = 2.0
    """At least so long between two looks at another process's preparer lock, or two starts of a preparer."""
    preparer_backoff_s: tuple[float, ...] = (2.0, 10.0, 30.0, 60.0, 300.0)
    """Before the start after the first, second, ... failure of the preparer in a row; the last one holds on."""
    preparer_grace_s: float = 10.0
    """A preparer may take so long to end before it is killed."""
    mirror_look_s: float = 5.0
    """Between two looks at how the mirror gets on, and at another process's mirror lock."""
    mirror_backoff_s: tuple[float, ...] = (2.0, 10.0, 60.0, 300.0, 600.0)
    """Before the start after the first, second, ... failure of the mirror in a row; the last one holds on. One that
    still gives a sign of life longer after its start than that ends the row."""
    mirror_silence_s: float = 900.0
    """A mirror may be silent for so long, however short guards.watchdog_s is: the limits of a network's steps are not
    those of an update."""
    mirror_notice_s: float = 7200.0
    """So long the journal's copy may fail before it is notified."""
    mirror_grace_s: float = 60.0
    """A mirror may take so long at the line's end to send what is there before it is killed."""
    dump_s: float = 2.0
    """A trainer that hangs has so long to print its stacks before SIGTERM."""
    term_grace_s: float = 60.0
    """It has so long to show life after SIGTERM before SIGKILL."""
    kill_wait_s: float = 60.0
    """After SIGKILL it has so long to be gone before it counts as one that cannot be ended."""
    gpu_poll_s: float = 10.0
    """Between two looks at a GPU that others use."""
    lease_poll_s: float = 1.0
    """Between two looks at a lease that another line holds."""
    notice_limit_s: float = 60.0
    """The program that notices are given to may run so long."""
    log_look_s: float = 10.0
    """Between two looks at the log's size."""


def step_of(waits: tuple[float, ...], number: int) -> float:
    """The wait after the `number`-th failure in a row (from 1)."""
    return waits[min(number, len(waits)) - 1]
