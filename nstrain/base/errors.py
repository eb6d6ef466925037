"""The errors a person sees, and what they mean to a program that started us.

A message names the thing, what was expected, what was found, and the remedy. Anything else that escapes a command
is a bug and keeps its traceback.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every `nstrain` command and of the trainer (documented in docs/reference/exit-codes.md)."""

    DONE = 0
    FAILED = 1
    BAD_CONFIGURATION = 2
    STOPPED = 3
    NEEDS_OPERATOR = 4
    GPU_TAKEN = 5
    STUCK = 6


class NstrainError(Exception):
    """Something went wrong that is not the reader's input: the command fails with `ExitCode.FAILED`."""

    exit_code = ExitCode.FAILED


class Refusal(NstrainError):
    """A setting, an input or a state that we refuse to work with; nothing was written."""

    exit_code = ExitCode.BAD_CONFIGURATION


class Exhausted(Refusal):
    """A source or a stratum has too little text for what the schedule asks of it."""


class NeedsOperator(NstrainError):
    """Only a person can mend it: trying again would come to the same end, so nothing is started again by itself."""

    exit_code = ExitCode.NEEDS_OPERATOR


class DiskFull(NeedsOperator):
    """The file system has no room for what must be written next."""


class GpuTaken(NstrainError):
    """Another process is on the GPU, or holds its lease: to be tried again once it is free."""

    exit_code = ExitCode.GPU_TAKEN


class Interrupted(NstrainError):
    """Ctrl-C in a command that has no orderly stop of its own; what it had finished is whole."""

    exit_code = ExitCode.STOPPED
