"""Stand-ins for the three children, with every behaviour that the supervisor must cope with.

    python fake_children.py trainer MODE RUN --parent-fd N
    python fake_children.py preparer MODE WORK --ahead A --parent-fd N
    python fake_children.py mirror MODE RUN --parent-fd N

They keep the real ones' manners: a lock, a heartbeat, preparer.json or wandb_run.json, an end on SIGTERM, STOP or the
parent's death. A mode may be a row of modes, `hangs,works`: each launch takes the next one, the last one holds on.
`checkpoints/latest` stands for the line's checkpoints: what a mode commits is a new name in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from nstrain.base.disk import FileLock, atomic_write, atomic_write_json
from nstrain.line.paths import LinePaths, checkpoint_name
from nstrain.line.state_files import Heartbeat, Stage, read_supervisor, stop_requested, write_heartbeat
from nstrain.mirror.state import MirrorState, write_state

told: list[int] = []


def should_stop(parent_fd: int, paths: LinePaths | None = None) -> bool:
    """Whether anybody asks this process to end."""
    parent_gone = bool(select.select([parent_fd], [], [], 0)[0])
    return bool(told) or parent_gone or (paths is not None and stop_requested(paths))


def beat(paths: LinePaths, stage: Stage, update: int, waiting_for: str | None = None, budget_s: float = 30.0) -> None:
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
            budget_s=budget_s,
        ),
    )


def launch_of(directory: Path, name: str) -> int:
    """How often a child of this name has been started, this time included; every start's pid is noted."""
    starts = directory / f"{name}-starts.json"
    pids = [*(json.loads(starts.read_text()) if starts.exists() else []), os.getpid()]
    atomic_write(starts, json.dumps(pids), durable=False)
    return len(pids)


def commit(paths: LinePaths, update: int) -> None:
    """Have a new checkpoint's name in `latest`."""
    paths.checkpoints.mkdir(exist_ok=True)
    atomic_write(paths.latest, checkpoint_name(update))


def trainer(modes: str, paths: LinePaths, parent_fd: int) -> int:
    """works | slow | done | refuses | crashes | progresses (and crashes) | hungry | needs | full | taken |
    hangs | hangs deaf | early (hangs before its first beat) | leaves (a process behind, and is done)"""
    launch = launch_of(paths.root, "trainer")
    row = modes.split(",")
    mode = row[min(launch, len(row)) - 1]
    if mode == "early":
        time.sleep(600)
    lock = FileLock(paths.trainer_lock).acquire("the fake trainer's lock", 5.0)
    says = {
        "refuses": ("bad_configuration: run.json: field 'x'\nhas a second line", 2),
        "needs": ("needs_operator: 20 updates in a row were skipped", 4),
        "full": ("disk_full: /data: cannot be written", 4),
        "taken": ("gpu_taken: process 7 (other) on GPU-1", 5),
    }
    if mode in says:
        print(f"u1 trained\n{says[mode][0]}", flush=True)
        return says[mode][1]
    if mode == "leaves":
        os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "600"])
        return 0
    update = 0
    if mode in ("crashes", "progresses"):
        print("u1 trained", flush=True)
        if mode == "progresses":
            commit(paths, launch)
        raise ZeroDivisionError("a bug in the trainer")
    if mode.startswith("hangs"):
        beat(paths, "training", 1, budget_s=0.3)
        if mode == "hangs deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not told:
            time.sleep(0.02)
        return 3
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
    commit(paths, 1000 * launch + update)
    (paths.root / "saved").write_text(str(update))
    lock.release()
    return 3


def preparer(modes: str, work: Path, parent_fd: int) -> int:
    """idle | done | refuses | exhausted | crashes | stubborn | quiet (never says more)"""
    lock = FileLock(work / "preparer.lock").acquire("the fake preparer's lock", 5.0)
    row = modes.split(",")
    mode = row[min(launch_of(work, "preparer"), len(row)) - 1]
    stage = {"refuses": "failed", "exhausted": "failed"}.get(mode, "waiting_consumer")
    error = {"refuses": "source prose: is away", "exhausted": "source prose: ran out"}.get(mode)
    value = {"pid": os.getpid(), "stage": stage, "cycle": 2, "progress": 0.0, "since": time.time(), "error": error}
    if mode != "crashes":
        atomic_write_json(work / "preparer.json", value)
    if mode == "crashes":
        print("preparer: about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "quiet":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    while mode in ("idle", "stubborn") and (mode == "stubborn" or not should_stop(parent_fd)):
        time.sleep(0.02)
    lock.release()
    return {"refuses": 2, "exhausted": 4, "done": 0}.get(mode, 3)


def mirror(modes: str, paths: LinePaths, parent_fd: int) -> int:
    """works | crashes | dies | refuses | quiet (says nothing more) | stubborn | slow (takes half a second to end) |
    away (has been failing for a day)"""
    row = modes.split(",")
    mode = row[min(launch_of(paths.root, "mirror"), len(row)) - 1]
    lock = FileLock(paths.mirror_lock).acquire("the fake mirror's lock", 5.0)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("crashes", "refuses"):
        print(f"mirror: sent 3 updates\nmirror: project spikes: is {mode}", flush=True)
        return 2 if mode == "refuses" else 1
    say(paths, mode)
    while mode == "quiet":
        time.sleep(0.02)
    while mode == "stubborn" or not should_stop(parent_fd):
        time.sleep(0.02)
        say(paths, mode)
    if mode == "slow":
        time.sleep(0.5)
        state = read_supervisor(paths)
        (paths.root / "mirrored").write_text(str(state and state.waiting_for))
    lock.release()
    return 0


def say(paths: LinePaths, mode: str) -> None:
    """wandb_run.json of now."""
    since, error = (time.time() - 86_400, "the service is away") if mode == "away" else (None, None)
    now = time.time()
    state = MirrorState("wandb", None, None, "spikes", "r1", 1, updated_at=now, pid=os.getpid())
    write_state(paths, dataclasses.replace(state, failing_since=since, error=error))


def main() -> int:
    """Behave as asked."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("mode")
    parser.add_argument("place", type=Path)
    parser.add_argument("--ahead")
    parser.add_argument("--parent-fd", type=int)
    arguments = parser.parse_args()
    if arguments.role == "trainer":
        return trainer(arguments.mode, LinePaths(arguments.place), arguments.parent_fd)
    if arguments.role == "mirror":
        return mirror(arguments.mode, LinePaths(arguments.place), arguments.parent_fd)
    return preparer(arguments.mode, arguments.place, arguments.parent_fd)


if __name__ == "__main__":
    sys.exit(main())
