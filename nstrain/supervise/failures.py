"""What the end of a trainer means for its line: an outcome, or another launch, and after how long.

A pure function of how the trainer ended and of what came before, so that the table in docs/reference/exit-codes.md can
be tested line by line. Progress is a checkpoint committed since the launch; it forgives every failure before it.
"""

from __future__ import annotations

import dataclasses
import signal

from nstrain.base.errors import ExitCode
from nstrain.line.notices import Event
from nstrain.line.state_files import Outcome
from nstrain.supervise.pace import Pace, step_of

FAILURES_IN_A_ROW = 5
"""Launches in a row that fail without progress end the line."""

CRASHES_BESIDE_OTHERS = 3
"""Crashes in a row beside other processes, without progress, make the line wait for a free GPU."""

DISK_FULL_WORDS = "disk_full: "
"""How a trainer begins to tell that it needs the operator because of a full disk."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a trainer ended."""

    code: int
    """Its exit code; negative for the signal that killed it."""
    words: str
    """What it died of, for people."""
    asked: bool = False
    """Whether the line was asked to stop, in any way."""
    hung: bool = False
    """Whether the watchdog ended it."""
    progressed: bool = False
    """Whether a checkpoint was committed since it was launched."""
    others: str | None = None
    """Other processes on its GPU, now or when it last looked; None if there are none, or there is no GPU."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What has gone wrong in a row, without progress since."""

    failures: int = 0
    beside_others: int = 0
    failures_total: int = 0
    """Of this supervisor's life, progress or not."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a line's supervision ended."""

    outcome: Outcome
    exit_code: ExitCode
    reason: str | None
    """Why, for people; None if there is nothing to add."""
    event: Event | None = None
    """The notice that tells of it."""


@dataclasses.dataclass(frozen=True)
class Relaunch:
    """The line goes on with another trainer."""

    reason: str
    wait_s: float
    """Seconds before its launch."""
    event: Event | None = None
    """The notice that tells of it."""
    clean_looks: int = 1
    """So many looks in a row must find the GPU free before."""


CLEAN_LOOKS = 3
"""Looks in a row that must find a GPU free where others were: memory is given back late, and jobs come in pairs."""


def judge(ended: Ended, before: Counts, pace: Pace, stop_reason: str) -> tuple[Ending | Relaunch, Counts]:
    """What follows from a trainer's end, and the counts from now on. `stop_reason` says who asked the line to stop."""
    counts = Counts(failures_total=before.failures_total) if ended.progressed else before
    ending = _final(ended, stop_reason)
    if ending is not None:
        return ending, counts
    if ended.code == ExitCode.GPU_TAKEN:
        return Relaunch(ended.words, 0.0, clean_looks=CLEAN_LOOKS), counts
    stopped = not ended.hung and ended.code in (ExitCode.STOPPED, -signal.SIGTERM)
    event: Event | None = "watchdog_restart" if ended.hung else "signal_restart" if stopped or ended.code < 0 else None
    if stopped and ended.progressed:
        return Relaunch("the trainer was stopped by a signal that its supervisor did not send", 0.0, event), counts
    if ended.others is not None and not stopped and not ended.hung:
        return _beside_others(ended, counts, pace, event)
    what = "the trainer was stopped by a signal that its supervisor did not send, before it had made progress"
    what = what if stopped else ended.words
    counts = dataclasses.replace(counts, failures=counts.failures + 1, failures_total=counts.failures_total + 1)
    if counts.failures >= FAILURES_IN_A_ROW:
        reason = f"{counts.failures} launches in a row failed without a checkpoint committed since; the last: {what}"
        return Ending("failed", ExitCode.FAILED, reason, "failed"), counts
    return Relaunch(what, step_of(pace.relaunch_s, counts.failures), event), counts


def _final(ended: Ended, stop_reason: str) -> Ending | None:
    """The outcome of an end after which nothing is launched, if it is one."""
    code = ended.code
    if code == ExitCode.DONE:
        return Ending("done", ExitCode.DONE, None, "finished")
    if ended.asked and (code in (ExitCode.STOPPED, ExitCode.GPU_TAKEN, -signal.SIGTERM)):
        return Ending("stopped", ExitCode.STOPPED, stop_reason)
    if ended.asked and ended.hung:
        reason = (
            f"{stop_reason}; {ended.words}, so that the updates since its newest checkpoint are to be trained again"
        )
        return Ending("stopped", ExitCode.STOPPED, reason)
    if code == ExitCode.BAD_CONFIGURATION:
        return Ending("failed", ExitCode.BAD_CONFIGURATION, ended.words, "failed")
    if code == ExitCode.NEEDS_OPERATOR:
        full = ended.words.startswith(DISK_FULL_WORDS)
        return Ending("failed", ExitCode.NEEDS_OPERATOR, ended.words, "disk_full" if full else "failed")
    if ended.asked:
        reason = f"{ended.words}; the same command goes on"
        return Ending("failed", ExitCode.FAILED, reason, "failed")
    return None


def _beside_others(ended: Ended, counts: Counts, pace: Pace, event: Event | None) -> tuple[Relaunch, Counts]:
    """A crash while others are on the GPU: theirs may be the fault, so it is not counted as a failure.

    A hang is none: it is counted, and told, whoever else is there.
    """
    number = counts.beside_others + 1
    reason = f"{ended.words} (not counted: {ended.others})"
    clean = CLEAN_LOOKS if number >= CRASHES_BESIDE_OTHERS else 1
    counts = dataclasses.replace(counts, beside_others=0 if number >= CRASHES_BESIDE_OTHERS else number)
    return Relaunch(reason, pace.relaunch_s[0], event, clean), counts
