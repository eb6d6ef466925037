"""A device that only exists in a file, and trials on it as real processes: run as a program this is what a trial runs.

What a shape takes and how long it takes are formulas of the file; `faults` names shapes ("none/4") that go wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


class MadeUpDevice:
    """What the test says the device is like; every trial that is run on it leaves a line."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._world = directory / "world.json"
        self._ran = directory / "ran.txt"
        self.change(
            room=1000 * MIB,
            memory=64 << 30,
            free=64 << 30,
            uuid=None,
            machine=None,
            parameters=1_000_000,
            code="c0de",
            fixed=2 * MIB,
            token_bytes={"none": MIB // 32, "dendritic": MIB // 64, "all": MIB // 128},
            # Seconds of a micro-batch: a launch, and so much a row.
            launch_s=0.010,
            row_s={"none": 0.010, "dendritic": 0.012, "all": 0.014},
            faults={},
        )

    def change(self, **fields: Any) -> None:
        """Change what the device is like."""
        known = json.loads(self._world.read_text()) if self._world.exists() else {}
        self._world.write_text(json.dumps(known | fields))

    @property
    def command(self) -> list[str]:
        """What runs a trial on it."""
        return [sys.executable, "-S", __file__, str(self._world), str(self._ran)]

    @property
    def ran(self) -> list[str]:
        """The shapes that were run, in order, as "mode/rows x tokens"."""
        return self._ran.read_text().split("\n")[:-1] if self._ran.exists() else []

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """What the trials were asked, in order."""
        return [json.loads(line) for line in self._ran.with_name("jobs.txt").read_text().splitlines()]

    @property
    def kernel_caches(self) -> set[str]:
        """Where the trials were told to keep compiled kernels."""
        return set(self._ran.with_name("caches.txt").read_text().splitlines())

    def pids(self) -> list[int]:
        """Processes of the trials that hung."""
        return [int(path.stem) for path in self._ran.parent.glob("*.pid")]


def main() -> None:
    """One trial."""
    parser = argparse.ArgumentParser()
    parser.add_argument("world", type=Path)
    parser.add_argument("ran", type=Path)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--parent-fd", type=int)
    arguments = parser.parse_args()
    world, job = json.loads(arguments.world.read_text()), json.load(sys.stdin)
    pipe = os.fdopen(arguments.report_fd, "w", buffering=1)

    def send(**fields: Any) -> None:
        pipe.write(json.dumps(fields) + "\n")

    if "shape" not in job:
        fail(world["machine"], arguments.ran.with_name(f"{os.getpid()}.pid"), send)
        versions = {"nstrain": "1", "torch": "2", "triton": None}
        send(
            machine={"device": "made up", "uuid": world["uuid"], "memory_bytes": world["memory"], "versions": versions}
            | {"code": world["code"], "parameters": world["parameters"], "free_bytes": world["free"]}
        )
        return
    shape = job["shape"]
    mode, rows = shape["recompute"], shape["micro_rows"]
    with arguments.ran.open("a") as file:
        file.write(f"{mode}/{rows} x {shape['row_tokens']}\n")
    with arguments.ran.with_name("jobs.txt").open("a") as file:
        file.write(json.dumps(job) + "\n")
    with arguments.ran.with_name("caches.txt").open("a") as file:
        file.write(os.environ["TRITON_CACHE_DIR"] + "\n")
    send(stage="timing")
    fail(world["faults"].get(f"{mode}/{rows}"), arguments.ran.with_name(f"{os.getpid()}.pid"), send)
    transient = world["fixed"] + rows * shape["row_tokens"] * world["token_bytes"][mode]
    if transient > world["room"]:
        send(failed="tried to allocate too much", out_of_memory=True)
        sys.exit(1)
    measured = {
        "micro_batch_s": world["launch_s"] + rows * world["row_s"][mode],
        "finish_s": 0.001,
        "updates": 3,
        "persistent_bytes": 16 * world["parameters"],
        "transient_bytes": transient,
        "room_bytes": world["room"],
    }
    send(measured=measured, kernels={f"kernel of {mode}": {"any": rows}})


def fail(fault: str | None, pid_file: Path, send: Any) -> None:
    """Go wrong in one of the ways a real trial does."""
    if fault == "hangs":
        pid_file.touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    elif fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "crashes":
        raise ValueError("an illegal address")
    elif fault == "loses numbers":
        send(failed="loss nan: not finite", out_of_memory=False)
        sys.exit(1)
    else:
        assert fault is None


if __name__ == "__main__":
    main()
