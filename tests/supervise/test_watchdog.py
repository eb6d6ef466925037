"""When a trainer counts as one that hangs, by a clock of the test's."""

from __future__ import annotations

import dataclasses

from nstrain.line.state_files import Heartbeat
from nstrain.supervise.watchdog import LONGEST_LOOK_S, Watchdog

BEAT = Heartbeat(1000.0, 7, "training", 3, 300, budget_s=60.0)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def late_after(watchdog: Watchdog, clock: Clock, beat: Heartbeat | None, at_most_s: float = 1000.0) -> float | None:
    """Seconds, in looks a second apart, after which it is late; None if it is not in all that time."""
    begin = clock.now
    while clock.now - begin < at_most_s:
        clock.now += 1.0
        if watchdog.look(beat) is not None:
            return clock.now - begin
    return None


def test_each_beat_brings_its_budget() -> None:
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    assert watchdog.look(BEAT) is None
    assert late_after(watchdog, clock, BEAT) == 61.0
    later = dataclasses.replace(BEAT, time=1001.0, stage="stopping", budget_s=9.0)
    assert watchdog.look(later) is None
    assert late_after(watchdog, clock, later) == 10.0
    without = dataclasses.replace(later, time=1002.0, budget_s=None)
    assert watchdog.look(without) is None, "any beat is life"
    assert late_after(watchdog, clock, without) == 10.0, "and without a budget the last one holds"


def test_a_missing_heartbeat_is_late() -> None:
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    assert late_after(watchdog, clock, None) == 21.0
    assert "since it was started" in (watchdog.look(None) or "")


def test_the_heartbeat_of_another_process_is_none() -> None:
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    clock.now += 15.0
    for number in range(30):
        clock.now += 1.0
        late = watchdog.look(dataclasses.replace(BEAT, pid=8, time=2000.0 + number))
    assert late is not None


def test_a_file_that_cannot_be_read_for_a_while_is_no_beat_and_no_death() -> None:
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    watchdog.look(BEAT)
    assert late_after(watchdog, clock, None, 50.0) is None
    assert late_after(watchdog, clock, BEAT) == 11.0, "the same beat again does not begin a new budget"


def test_time_that_nobody_looked_makes_nobody_late() -> None:
    """The machine slept, or the supervisor was stopped: the trainer was perhaps as well."""
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    watchdog.look(BEAT)
    clock.now += 100_000.0
    assert watchdog.look(BEAT) is None
    assert late_after(watchdog, clock, BEAT) == 60.0 - LONGEST_LOOK_S + 1.0


def test_a_clock_that_is_set_back_makes_nobody_late() -> None:
    clock = Clock()
    watchdog = Watchdog(7, 20.0, clock)
    for number in range(200):
        clock.now += 1.0
        assert watchdog.look(dataclasses.replace(BEAT, time=1000.0 - number)) is None
