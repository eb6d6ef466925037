"""What a trainer's end means, as a table: outcome or relaunch, counted or not, and how long until then."""

from __future__ import annotations

import signal

import pytest

from nstrain.base.errors import ExitCode
from nstrain.supervise.failures import Counts, Ended, Ending, Relaunch, judge
from nstrain.supervise.pace import Pace

PACE = Pace(relaunch_s=(1.0, 5.0, 20.0))
WHY = "stopped by the file STOP"

FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that end a trainer and that nobody but a kernel, a library or another person sends."""


def verdict(ended: Ended, counts: Counts | None = None) -> tuple[Ending | Relaunch, Counts]:
    return judge(ended, counts or Counts(), PACE, WHY)


@pytest.mark.parametrize(
    ("ended", "outcome", "code", "event"),
    [
        (Ended(ExitCode.DONE, ""), "done", ExitCode.DONE, "finished"),
        (Ended(ExitCode.DONE, "", asked=True), "done", ExitCode.DONE, "finished"),
        (Ended(ExitCode.STOPPED, "", asked=True), "stopped", ExitCode.STOPPED, None),
        (Ended(-signal.SIGTERM, "", asked=True), "stopped", ExitCode.STOPPED, None),
        (Ended(ExitCode.GPU_TAKEN, "", asked=True), "stopped", ExitCode.STOPPED, None),
        (Ended(-signal.SIGKILL, "it hangs", asked=True, hung=True), "stopped", ExitCode.STOPPED, None),
        (Ended(-signal.SIGKILL, "killed", asked=True), "failed", ExitCode.FAILED, "failed"),
        (Ended(ExitCode.FAILED, "a bug", asked=True), "failed", ExitCode.FAILED, "failed"),
        (Ended(ExitCode.BAD_CONFIGURATION, "wrong"), "failed", ExitCode.BAD_CONFIGURATION, "failed"),
        (Ended(ExitCode.NEEDS_OPERATOR, "needs_operator: skips"), "failed", ExitCode.NEEDS_OPERATOR, "failed"),
        (Ended(ExitCode.NEEDS_OPERATOR, "disk_full: /data"), "failed", ExitCode.NEEDS_OPERATOR, "disk_full"),
    ],
)
def test_ends_that_are_final(ended: Ended, outcome: str, code: ExitCode, event: str | None) -> None:
    ending, counts = verdict(ended)
    assert isinstance(ending, Ending)
    assert (ending.outcome, ending.exit_code, ending.event) == (outcome, code, event)
    assert counts == Counts()


@pytest.mark.parametrize(
    ("ended", "event", "failures", "clean_looks"),
    [
        (Ended(ExitCode.FAILED, "a bug"), None, 1, 1),
        *[(Ended(-number, "killed"), "signal_restart", 1, 1) for number in FATAL_SIGNALS],
        *[(Ended(-number, "killed", progressed=True), "signal_restart", 1, 1) for number in FATAL_SIGNALS],
        (Ended(-signal.SIGKILL, "it hangs", hung=True), "watchdog_restart", 1, 1),
        (Ended(ExitCode.STOPPED, "it hangs", hung=True, progressed=True), "watchdog_restart", 1, 1),
        (Ended(ExitCode.STOPPED, "", progressed=True), "signal_restart", 0, 1),
        (Ended(ExitCode.STOPPED, ""), "signal_restart", 1, 1),
        (Ended(-signal.SIGTERM, ""), "signal_restart", 1, 1),
        (Ended(ExitCode.GPU_TAKEN, "gpu_taken: process 7"), None, 0, 3),
        (Ended(ExitCode.FAILED, "a bug", others="process 7 on GPU-1"), None, 0, 1),
        *[(Ended(-number, "killed", others="process 7 on GPU-1"), "signal_restart", 0, 1) for number in FATAL_SIGNALS],
        *[
            (
                Ended(code, "it hangs", hung=True, others="process 7 on GPU-1", progressed=progressed),
                "watchdog_restart",
                1,
                1,
            )
            for code in (ExitCode.STOPPED, ExitCode.FAILED, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGUSR1)
            for progressed in (False, True)
        ],
    ],
)
def test_ends_after_which_it_is_launched_again(
    ended: Ended, event: str | None, failures: int, clean_looks: int
) -> None:
    again, counts = verdict(ended)
    assert isinstance(again, Relaunch)
    assert (again.event, again.clean_looks) == (event, clean_looks)
    assert counts.failures == failures
    assert counts.failures_total == failures


def test_five_in_a_row_without_progress_end_the_line() -> None:
    counts = Counts()
    waits = []
    for _ in range(4):
        again, counts = verdict(Ended(ExitCode.FAILED, "a bug"), counts)
        assert isinstance(again, Relaunch)
        waits.append(again.wait_s)
    assert waits == [1.0, 5.0, 20.0, 20.0]
    ending, counts = verdict(Ended(ExitCode.FAILED, "the last bug"), counts)
    assert isinstance(ending, Ending)
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.FAILED)
    assert ending.reason == "5 launches in a row failed without a checkpoint committed since; the last: the last bug"


def test_progress_forgives() -> None:
    counts = Counts(failures=4, beside_others=2, failures_total=9)
    again, counts = verdict(Ended(ExitCode.FAILED, "a bug", progressed=True), counts)
    assert isinstance(again, Relaunch)
    assert again.wait_s == 1.0
    assert counts == Counts(failures=1, failures_total=10)
    _, counts = verdict(Ended(ExitCode.STOPPED, "", progressed=True), Counts(failures=4, failures_total=4))
    assert counts == Counts(failures_total=4)


def test_signals_without_progress_count() -> None:
    """Whatever ends every trainer as it starts must not keep a line starting for ever."""
    ending, _ = verdict(Ended(-signal.SIGTERM, ""), Counts(failures=4, failures_total=4))
    assert isinstance(ending, Ending)
    assert "a signal that its supervisor did not send" in (ending.reason or "")


def test_crashes_beside_others() -> None:
    """Two are launched again at once, the third waits for a GPU that is free; none is a failure."""
    ended = Ended(-signal.SIGSEGV, "killed", others="process 7 on GPU-1")
    counts = Counts(failures=4, failures_total=4)
    looks = []
    for _ in range(4):
        again, counts = verdict(ended, counts)
        assert isinstance(again, Relaunch)
        assert "not counted: process 7 on GPU-1" in again.reason
        assert again.event == "signal_restart"
        looks.append(again.clean_looks)
    assert looks == [1, 1, 3, 1]
    assert (counts.failures, counts.failures_total) == (4, 4)


def test_hangs_beside_others_end_the_line_as_hangs_alone_do() -> None:
    """They are none of the crashes that may be another's fault."""
    ended = Ended(-signal.SIGKILL, "it hangs", hung=True, others="process 7 on GPU-1")
    again, counts = verdict(ended, Counts(failures=3, beside_others=2, failures_total=3))
    assert isinstance(again, Relaunch)
    assert counts == Counts(failures=4, beside_others=2, failures_total=4)
    ending, counts = verdict(ended, counts)
    assert isinstance(ending, Ending)
    assert (ending.outcome, counts.failures) == ("failed", 5)


def test_a_trainer_that_yields_the_gpu_does_not_forgive_failures() -> None:
    _, counts = verdict(Ended(ExitCode.GPU_TAKEN, "taken"), Counts(failures=3, failures_total=3))
    assert counts.failures == 3
