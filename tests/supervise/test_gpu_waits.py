"""A line that waits for its GPU: for a lease, for other processes to leave, for a driver that answers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_card import UUID, FakeCard
from foreground import QUICK, preparer_command, trainer_command
from notice_sink import notices, set_notify
from supervise_helpers import set_guards, starts, work_of

from nstrain.base.errors import ExitCode
from nstrain.gpu.lease import gpu_lease
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor, request_stop
from nstrain.ops.status import status
from nstrain.supervise.failures import Ending
from nstrain.supervise.supervisor import Supervisor
from nstrain.supervise.waits import Stalls


@pytest.fixture
def card(tmp_path: Path) -> FakeCard:
    return FakeCard(tmp_path / "card")


@pytest.fixture
def foreign() -> Iterator[int]:
    """A process that belongs to nobody's line."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


class Steps:
    """Acts between the supervisor's looks: `do[n]()` is called once what the line waits for holds the n-th words."""

    def __init__(self, paths: LinePaths, *steps: tuple[str, Callable[[], object]]) -> None:
        self._paths, self._steps = paths, list(steps)
        self.waited: list[str] = []

    def supervise(self, card: FakeCard, trainer: str, **pace: float) -> tuple[Ending, list[str]]:
        """Run the line with this card; its ending, and what was told."""
        events: list[str] = []
        supervisor = Supervisor(
            self._paths.root,
            events.append,
            trainer_command(trainer),
            preparer_command("idle"),
            dataclasses.replace(QUICK, **pace),
            lambda settings: card.source,
        )
        real = supervisor._look_after

        def look_after(hungry: bool = False) -> None:
            real(hungry)
            waiting = supervisor._state.waiting_for
            if waiting is not None and self.waited[-1:] != [waiting]:
                self.waited.append(waiting)
            if self._steps and waiting is not None and self._steps[0][0] in waiting:
                self._steps.pop(0)[1]()

        supervisor._look_after = look_after  # type: ignore[method-assign]
        return supervisor.run(), events


def test_a_free_card_is_used_at_once(paths: LinePaths, card: FakeCard) -> None:
    steps = Steps(paths)
    ending, _ = steps.supervise(card, "done")
    assert ending.outcome == "done"
    assert steps.waited == []


def test_another_lines_lease_is_waited_for(paths: LinePaths, card: FakeCard) -> None:
    lease = gpu_lease(UUID, card.source.leases).acquire("it")
    steps = Steps(paths, (f"held by process {os.getpid()}", lease.release))
    ending, _ = steps.supervise(card, "done")
    assert ending.outcome == "done"
    assert steps.waited == [f"a free GPU: {UUID}, held by process {os.getpid()}"]


def test_other_processes_are_waited_for_until_three_clean_looks(paths: LinePaths, card: FakeCard, foreign: int) -> None:
    looks: list[float] = []
    card.put(foreign)

    def leave_and_come_back() -> None:
        card.put()
        looks.append(time.monotonic())

    ending, _ = Steps(paths, (f"process {foreign}", leave_and_come_back)).supervise(card, "done", gpu_poll_s=0.3)
    assert ending.outcome == "done"
    assert time.monotonic() - looks[0] >= 2 * 0.3, "it was taken before three looks had found it free"


def test_a_job_that_comes_back_between_two_looks_starts_the_count_anew(
    paths: LinePaths, card: FakeCard, foreign: int
) -> None:
    card.reads(f'n=$(cat {paths.root}/looks 2>/dev/null); n=$((n+1)); echo $n > {paths.root}/looks; '
               f'cat {paths.root}/look$n 2>/dev/null || cat {paths.root}/look0')  # fmt: skip
    empty = card._said.read_text()
    card.put(foreign)
    busy = card._said.read_text()
    (paths.root / "look0").write_text(empty)
    for number, what in enumerate([busy, empty, empty, busy], start=1):
        (paths.root / f"look{number}").write_text(what)
    ending, _ = Steps(paths).supervise(card, "done", gpu_poll_s=0.05)
    assert ending.outcome == "done"
    assert int((paths.root / "looks").read_text()) == 7


def test_a_trainer_that_yields_is_launched_again_once_the_others_have_left(
    paths: LinePaths, card: FakeCard, foreign: int
) -> None:
    card.reads(f"test -e {paths.root}/trainer-starts.json && test ! -e {paths.root}/left "
               f"&& exec cat {card._said}.busy; exec cat {card._said}")  # fmt: skip
    empty = card._said.read_text()
    card.put(foreign)
    Path(f"{card._said}.busy").write_text(card._said.read_text())
    card._said.write_text(empty)
    steps = Steps(paths, (f"process {foreign}", lambda: (paths.root / "left").touch()))
    ending, events = steps.supervise(card, "taken,done")
    assert ending.outcome == "done"
    state = read_supervisor(paths)
    assert state is not None
    assert (state.launches, state.failures_total) == (2, 0)
    assert any("it is launched again once the GPU is free" in event for event in events)


def test_crashes_beside_others_are_not_counted(paths: LinePaths, card: FakeCard, foreign: int) -> None:
    """Others come once a trainer runs, and it crashes; six times, which would be one too many of failures."""
    noted = paths.root / "trainer-starts.json"
    card.reads(f"grep -o '[0-9][0-9]*' {noted} 2>/dev/null | cmp -s - {paths.root}/left; "
               f"test $? = 1 && exec cat {card._said}.busy; exec cat {card._said}")  # fmt: skip
    empty = card._said.read_text()
    card.put(foreign)
    Path(f"{card._said}.busy").write_text(card._said.read_text())
    card._said.write_text(empty)

    def leave() -> None:
        pids = starts(paths.root, "trainer")
        (paths.root / "left").write_text("".join(f"{pid}\n" for pid in pids))

    (paths.root / "left").touch()
    noted.write_text("[]")
    steps = Steps(paths, *[(f"process {foreign}", leave)] * 10_000)
    ending, events = steps.supervise(card, ",".join(["crashes"] * 6 + ["done"]), gpu_poll_s=0.05)
    assert ending.outcome == "done"
    state = read_supervisor(paths)
    assert state is not None
    assert (state.launches, state.failures_total) == (7, 0)
    assert sum(f"not counted: process {foreign}" in event for event in events) == 6


def test_a_driver_that_does_not_answer_is_no_free_card(paths: LinePaths, card: FakeCard) -> None:
    card.reads("exit 1")
    steps = Steps(paths, ("ended with exit code 1", lambda: card.reads()))
    ending, _ = steps.supervise(card, "done")
    assert ending.outcome == "done"


def test_a_machine_without_what_it_takes(paths: LinePaths, card: FakeCard) -> None:
    card.reads("echo pip install nvidia-ml-py >&2; exit 2")
    ending, _ = Steps(paths).supervise(card, "done")
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.BAD_CONFIGURATION)
    assert "pip install nvidia-ml-py" in (ending.reason or "")


def test_memory_of_nobody_listed_is_somebodys_but_not_where_windows_are_drawn(paths: LinePaths, card: FakeCard) -> None:
    used_bytes = 2 << 30
    card.put(used_bytes=used_bytes)
    drawn = lambda: card.put(used_bytes=used_bytes, memory_tells=False)  # noqa: E731
    steps = Steps(paths, ("a process that is not listed has 1.5 GiB", drawn))
    ending, _ = steps.supervise(card, "done")
    assert ending.outcome == "done"
    assert len(steps.waited) == 1


def test_a_card_that_vanishes_with_its_trainer_is_waited_for(paths: LinePaths, card: FakeCard) -> None:
    """It fell off the bus, and the trainer's own words say so; it comes back with a reset."""
    gone = f"echo '{json.dumps({'format': 1, 'gpus': []})}'"
    card.reads(f"test -e {paths.root}/trainer-starts.json && test ! -e {paths.root}/reset && {gone} && exit 0; "
               f"exec cat {card._said}")  # fmt: skip
    steps = Steps(paths, ("this machine's GPUs are none", lambda: (paths.root / "reset").touch()))
    ending, events = steps.supervise(card, "crashes,done")
    assert (ending.outcome, ending.reason) == ("done", None)
    assert any("a bug in the trainer (1 in a row without progress)" in event for event in events), events


def test_the_wait_is_shown_notified_once_and_ended_by_a_stop(
    paths: LinePaths, card: FakeCard, foreign: int, tmp_path: Path
) -> None:
    sink = set_notify(tmp_path)
    set_guards(paths, watchdog_s=0.3)
    card.put(foreign)
    seen: list[str] = []

    def look() -> None:
        seen.append(status(paths.root).state)
        if len(seen) == 20:
            request_stop(paths)

    ending, _ = Steps(paths, *[(f"process {foreign}", look)] * 20).supervise(card, "done", tick_s=0.05)
    assert (ending.outcome, ending.exit_code) == ("stopped", ExitCode.STOPPED)
    assert set(seen) == {"waiting"}
    assert [(one["event"], f"process {foreign}" in one["text"]) for one in notices(sink)] == [("waiting_gpu", True)]
    assert starts(paths.root, "trainer") == []
    assert len(starts(work_of(paths), "preparer")) == 1, "data are prepared meanwhile"


# ---- what is notified ------------------------------------------------------------------------------------------------


def test_each_stall_is_one_notice() -> None:
    told: list[str] = []
    now = [0.0]
    stalls = Stalls(10.0, lambda event, text: told.append(f"{event} {text}"), lambda: now[0])
    for second, what in enumerate(["a"] * 30 + [None] + ["b"] * 5 + [None] + ["c"] * 15 + ["d"] * 15):
        now[0] = float(second)
        stalls.see("waiting_data", what)
        stalls.see("waiting_gpu", None)
    assert told == ["waiting_data a", "waiting_data c"]
