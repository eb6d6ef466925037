"""The mirror as the supervisor's child: `python -m nstrain.mirror RUN --parent-fd N`.

It ends on SIGTERM, and when the pipe closes, that is, when its parent is gone; then it sends what is in the journal and
ends within `MirrorPace.ending_s`. It may be killed at any instant. What it prints begins with "mirror: " and goes to
run.log; its sign of life is `updated_at` in wandb_run.json.
"""

from __future__ import annotations

import argparse
import select
import signal
import traceback
from pathlib import Path

from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.logs import FollowedLog, write_whole_lines
from nstrain.line.paths import LinePaths
from nstrain.mirror.clock import MirrorClock, MirrorPace
from nstrain.mirror.copying import Copier
from nstrain.mirror.opening import MakeTracker, make_copier, mirror_lock

PREFIX = "mirror: "


def say(text: str) -> None:
    """Print for people, each line told from the trainer's."""
    print("\n".join(PREFIX + line for line in text.splitlines()), flush=True)


def main(tracker: MakeTracker | None = None, pace: MirrorPace | None = None) -> int:
    """Copy a line's journal until asked to end; returns the exit code. `tracker`: see `make_copier`."""
    parser = argparse.ArgumentParser(prog="nstrain.mirror", description="Copy a line's journal to its tracker.")
    parser.add_argument("run", type=Path, help="the training line's directory")
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe that closes when the parent dies")
    arguments = parser.parse_args()
    write_whole_lines()
    FollowedLog.of_output().follow()
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))

    def to_end() -> bool:
        fd = arguments.parent_fd
        return bool(told) or (fd is not None and bool(select.select([fd], [], [], 0)[0]))

    paths, clock = LinePaths(arguments.run.resolve()), MirrorClock(to_end)
    lock = mirror_lock(paths)
    try:
        lock.acquire("the mirror of the line")
    except NstrainError:
        say(f"process {lock.holder()} copies the journal now; waiting until it ends")
        while not lock.try_acquire():
            if clock.wait(1.0):
                return int(ExitCode.DONE)
    with lock:
        return _copy(paths, clock, tracker, pace)


def _copy(paths: LinePaths, clock: MirrorClock, tracker: MakeTracker | None, pace: MirrorPace | None) -> int:
    copier: Copier | None = None
    ended_by: BaseException | None = None
    try:
        copier = make_copier(paths, say, clock, pace, tracker)
        copier.run()
        return int(ExitCode.DONE)
    except NstrainError as error:
        ended_by = error
        say(str(error))
        return int(error.exit_code)
    except Exception as error:
        ended_by = error
        say(f"{traceback.format_exc()}failed: {type(error).__name__}: {error}")
        return int(ExitCode.FAILED)
    finally:
        if copier is not None:
            copier.end(ended_by)
