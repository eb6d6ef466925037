"""The supervisor in the background: `python -m nstrain.supervise RUN --ready-fd N`, started by `nstrain run RUN`.

What it prints - why it could not start or go on, a few lines - goes to RUN/supervisor.out, which therefore is looked at
for its size at a start only; what happens to the line is in run.log.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from nstrain.base.detach import say_ready
from nstrain.base.errors import NstrainError
from nstrain.settings.host import enter_host
from nstrain.supervise.supervisor import Supervisor


def main() -> int:
    """Supervise a line to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nstrain.supervise", description="Supervise a line in the background.")
    parser.add_argument("run", type=Path, help="the training line's directory")
    parser.add_argument("--ready-fd", type=int, help="write end of a pipe that is told when the line runs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is no terminal that could hang up
    try:
        enter_host()
        supervisor = Supervisor(arguments.run, on_ready=lambda: say_ready(arguments.ready_fd))
        return int(supervisor.run().exit_code)
    except NstrainError as error:
        print(f"nstrain: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
