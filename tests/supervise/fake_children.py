"""Stand-ins for the two children, with every behaviour that the supervisor must cope with.

    python fake_children.py trainer MODE RUN --parent-fd N
    python fake_children.py preparer MODE WORK --ahead A --parent-fd N

They keep the real ones' manners: a lock, a heartbeat or preparer.json, an end on SIGTERM, STOP or the parent's death.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from nstrain.base.disk import FileLock, atomic_write_json
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Heartbeat, Stage, stop_requested, write_heartbeat

told: list[int] = []


def should_stop(parent_fd: int, paths: LinePaths | None = None) -> bool:
    """Whether anybody asks this process to end."""
    parent_gone = bool(select.select([parent_fd], [], [], 0)[0])
    return bool(told) or parent_gone or (paths is not None and stop_requested(paths))


def beat(paths: LinePaths, stage: Stage, update: int, waiting_for: str | None = None) -> None:
    """The heartbeat of a trainer that trains 100 tokens an update."""
    since = time.time() if waiting_for else None
    write_heartbeat(
        paths,
        Heartbeat(
            time.time(),
            os.getpid(),
            stage,
            update,
            100 * update,
            loss=1.0,
            waiting_for=waiting_for,
            waiting_since=since,
        ),
    )


def trainer(mode: str, paths: LinePaths, parent_fd: int) -> int:
    """works | dies slowly | done | refuses | crashes | hungry"""
    lock = FileLock(paths.trainer_lock).acquire("the fake trainer's lock")
    if mode == "refuses":
        print("u1 trained\nbad_configuration: run.json: field 'x'\nhas a second line", flush=True)
        return 2
    if mode == "crashes":
        print("u1 trained", flush=True)
        raise ZeroDivisionError("a bug in the trainer")
    update = 0
    while not should_stop(parent_fd, paths):
        update += 1
        if mode == "done" and update > 5:
            beat(paths, "done", update)
            return 0
        if mode == "hungry":
            beat(paths, "waiting_data", update, "cycle 7")
        else:
            beat(paths, "training", update)
        time.sleep(0.02)
    beat(paths, "stopping", update)
    time.sleep(2.0 if mode == "slow" else 0.1)
    print(f"saved u{update}", flush=True)
    (paths.root / "saved").write_text(str(update))
    lock.release()
    return 3


def preparer(mode: str, work: Path, parent_fd: int) -> int:
    """idle | done | refuses | crashes | stubborn"""
    lock = FileLock(work / "preparer.lock").acquire("the fake preparer's lock")
    stage = "failed" if mode == "refuses" else "waiting_consumer"
    error = "source prose: ran out" if mode == "refuses" else None
    value = {"pid": os.getpid(), "stage": stage, "cycle": 2, "progress": 0.0, "since": time.time(), "error": error}
    if mode != "crashes":
        atomic_write_json(work / "preparer.json", value)
    starts = work / "preparer-starts.json"
    starts.write_text(json.dumps([*(json.loads(starts.read_text()) if starts.exists() else []), os.getpid()]))
    if mode == "crashes":
        print("preparer: about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while mode in ("idle", "stubborn") and (mode == "stubborn" or not should_stop(parent_fd)):
        time.sleep(0.02)
    lock.release()
    return {"refuses": 2, "done": 0}.get(mode, 3)


def main() -> int:
    """Behave as asked."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("mode")
    parser.add_argument("place", type=Path)
    parser.add_argument("--ahead")
    parser.add_argument("--parent-fd", type=int)
    arguments = parser.parse_args()
    if arguments.role == "trainer":
        return trainer(arguments.mode, LinePaths(arguments.place), arguments.parent_fd)
    return preparer(arguments.mode, arguments.place, arguments.parent_fd)


if __name__ == "__main__":
    sys.exit(main())
