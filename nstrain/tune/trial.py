"""A trial's process: `python -m nstrain.tune.trial --report-fd N --parent-fd M`, its job as JSON on standard input.

A job is {"settings": run.json's, "vocabulary", "kernels": a table to run with, or {}} and, unless only the machine is
asked about, {"shape", "micro_batches", "seconds"}. What it finds goes to the report pipe, an object a line:

    {"stage": "..."}                              what it does now
    {"machine": {...}}  or  {"measured": {...}}   the answer
    {"failed": "...", "out_of_memory": true}      instead of one, for what can be told
    {"refused": "..."}                            settings that no trial can be made with

It ends at once when its parent is gone, so that a killed tuner leaves no process on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from nstrain.base.errors import ExitCode, NstrainError, Refusal
from nstrain.settings.host import enter_host


class Report:
    """The writing end of the report pipe."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1)

    def send(self, **fields: Any) -> None:
        """One object."""
        self._pipe.write(json.dumps(fields) + "\n")

    def stage(self, what: str) -> None:
        """What happens now."""
        self.send(stage=what)


def _leave_with_parent(fd: int) -> None:
    os.read(fd, 1)  # nobody writes: it returns when the last write end is closed
    os._exit(int(ExitCode.STOPPED))


def main() -> int:
    """Do the job; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nstrain.tune.trial", description="One trial of nstrain tune.")
    parser.add_argument("--report-fd", type=int, required=True, help="write end of the pipe for what is found")
    parser.add_argument("--parent-fd", type=int, required=True, help="read end of a pipe that closes with the parent")
    arguments = parser.parse_args()
    threading.Thread(target=_leave_with_parent, args=(arguments.parent_fd,), daemon=True).start()
    report = Report(arguments.report_fd)
    job: Mapping[str, Any] = json.load(sys.stdin)
    try:
        report.stage("starting")
        enter_host()
        # Only now: host.json sets the environment that torch reads when it is imported.
        from nstrain.tune.measure import do_job

        return do_job(job, report)
    except Refusal as error:
        report.send(refused=str(error))
    except NstrainError as error:
        report.send(failed=str(error), out_of_memory=False)
    except MemoryError:  # of Python itself, e.g. while torch is imported
        report.send(failed="the process ran out of memory", out_of_memory=True)
    return int(ExitCode.FAILED)


if __name__ == "__main__":
    sys.exit(main())
