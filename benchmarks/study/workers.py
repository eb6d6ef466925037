"""Processes that run jobs: one for every device, and short-lived ones that compile the kernels of jobs to come.

A worker is told a job and answers with what it found. One that failed is replaced: nobody knows what it left on its
device. Compiling takes longer than training at the study's sizes, so that a job is handed to a worker only when its
kernels are in Triton's cache, and they get there while others train.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.study.data import read_data
from benchmarks.study.training import Job

_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class Answer:
    """What became of a job."""

    job: Job
    found: dict[str, Any] | None
    failure: str | None
    """Why there is nothing: the exception's first line."""
    is_last: bool = False
    """Whether the worker has ended: it failed, or could not give its device's memory back."""


def _serve(pipe: Connection, directory: Path, device: str, letter: str | None) -> None:
    """A worker's life: jobs in, answers out, until the pipe ends."""
    from benchmarks.study import training
    from nstrain.train.determinism import enter_deterministic_mode

    enter_deterministic_mode(1)
    data = read_data(directory)
    while True:
        try:
            job, limit_s = pipe.recv()
        except EOFError:
            return
        try:
            if letter is not None:
                training.warm_up(job, letter, data, device)
                pipe.send(Answer(job, {}, None, is_last=True))
                return
            found, is_clean = training.run(job, data, device, time.monotonic() + limit_s)
            pipe.send(Answer(job, {**found, **_where(device)}, None, is_last=not is_clean))
            if not is_clean:
                return
        except Exception as error:
            traceback.print_exc()
            pipe.send(Answer(job, None, f"{type(error).__name__}: {error}".splitlines()[0], is_last=True))
            return


def _where(device: str) -> dict[str, Any]:
    """The card and the versions that a row names."""
    import torch

    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    card = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return {"card": card, "versions": {"torch": torch.__version__, "triton": triton_version}}


class Worker:
    """One process on one device; at most one job at a time."""

    def __init__(self, directory: Path, device: str, letter: str | None = None) -> None:
        """`device` is "cpu", or "cuda:N" for the N-th card, which is the only one that the process sees.

        With a `letter` it compiles the kernels of its one job's layers of that kind, and ends.
        """
        self.device, self.letter = device, letter
        self._connection, theirs = _SPAWN.Pipe()
        kind, _, number = device.partition(":")
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if number:  # read when the child starts; the parent itself never opens a card
            visible = before.split(",") if before else None
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible else number
        try:
            self._process = _SPAWN.Process(target=_serve, args=(theirs, directory, kind, letter), daemon=True)
            self._process.start()
        finally:
            if number:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if before is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()
        self.job: Job | None = None

    def begin(self, job: Job, limit_s: float) -> None:
        """Have it do a job; `limit_s` is the time that is left for it."""
        assert self.job is None
        self.job = job
        self._connection.send((job, limit_s))

    def answer(self) -> Answer:
        """Its answer, when `ready` names it: also what there is to say of a process that died."""
        job, self.job = self.job, None
        assert job is not None
        try:
            found: Answer = self._connection.recv()
            return found
        except (EOFError, OSError):
            self._process.join(10)
            return Answer(job, None, f"its process ended with exit code {self._process.exitcode}", is_last=True)

    def close(self) -> None:
        """End it; a job under way is lost."""
        self._connection.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def ready(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """Those of the busy workers that have something to say, after at most so long."""
    busy = {worker._connection: worker for worker in workers if worker.job is not None}
    if not busy:
        time.sleep(min(timeout_s, 0.1))
        return []
    return [busy[connection] for connection in wait(list(busy), timeout_s) if connection in busy]
