"""The trainer process: `python -m nstrain.train RUN [--parent-fd N]`, started by the supervisor.

Its exit code is an `ExitCode`; what it prints goes to the line's run.log.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nstrain.base.errors import NstrainError
from nstrain.line.paths import LinePaths
from nstrain.settings.host import enter_host
from nstrain.train.stopping import StopRequests


def main() -> int:
    """Train a line until it is done or asked to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nstrain.train", description="Train a line.")
    parser.add_argument("run", type=Path, help="the training line's directory")
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe that closes when the parent dies")
    arguments = parser.parse_args()
    paths = LinePaths(arguments.run.resolve())
    stop = StopRequests(paths, arguments.parent_fd)
    stop.catch_signals()
    try:
        enter_host()
        # Only now: host.json sets the environment that torch reads when it is imported.
        from nstrain.train.opening import opened_trainer

        with opened_trainer(paths, stop) as trainer:
            return int(trainer.run())
    except NstrainError as error:
        print(f"{error.exit_code.name.lower()}: {error}", flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
