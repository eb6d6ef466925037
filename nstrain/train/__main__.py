"""The trainer process: `python -m nstrain.train RUN [--parent-fd N]`, started by the supervisor.

Its exit code is an `ExitCode`; what it prints goes to the line's run.log. SIGUSR1 makes it print the stacks of its
threads there, which needs neither the interpreter nor a thread that goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from nstrain.base.errors import DiskFull, NstrainError
from nstrain.base.logs import FollowedLog, write_whole_lines
from nstrain.gpu.readings import GpuSource, gpu_of
from nstrain.line.orphaned import tell_of_the_supervisors_death
from nstrain.line.paths import LinePaths
from nstrain.settings.host import enter_host
from nstrain.settings.run import RunSettings
from nstrain.train.stopping import StopRequests


def main(gpu: Callable[[RunSettings], GpuSource | None] = gpu_of) -> int:
    """Train a line until it is done or asked to stop; returns the exit code. `gpu` says how its GPU is read."""
    parser = argparse.ArgumentParser(prog="nstrain.train", description="Train a line.")
    parser.add_argument("run", type=Path, help="the training line's directory")
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe that closes when the parent dies")
    arguments = parser.parse_args()
    paths = LinePaths(arguments.run.resolve())
    stop = StopRequests(paths, arguments.parent_fd)
    stop.catch_signals()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    write_whole_lines()
    FollowedLog(paths.run_log).follow()
    try:
        enter_host()
        # Only now: host.json sets the environment that torch reads when it is imported.
        from nstrain.train.opening import opened_trainer

        with opened_trainer(paths, stop, gpu) as trainer:
            return int(trainer.run())
    except NstrainError as error:
        kind = "disk_full" if isinstance(error, DiskFull) else error.exit_code.name.lower()
        print(f"{kind}: {error}", flush=True)
        return int(error.exit_code)
    finally:
        if stop.parent_gone():
            tell_of_the_supervisors_death(paths, "its trainer ends")


if __name__ == "__main__":
    sys.exit(main())
