"""Runs what the table lacks, within a time budget.

    python -m benchmarks.study.run --part 1 --budget-s 500 --data DIR --table benchmarks/study/results.jsonl

Parts are named one after the other (--part 1 2 3); the runs of each come in the order of plan.py, which looks at the
results so far. A run is begun only if as long as the longest one so far is left, and its row is on disk before its line
is printed; so the command can be stopped or killed at any time and given again. Every card of the machine takes part.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.arms import ARMS, SIZES
from benchmarks.study.data import read_data
from benchmarks.study.plan import wanted
from benchmarks.study.table import Table
from benchmarks.study.training import RECIPES, Job
from benchmarks.study.workers import Answer, Worker, ready
from nstrain.base.errors import Refusal

REPOSITORY = Path(__file__).parents[2]
COMPILE_LIMIT_S = 240.0
COMPILED_AT_ONCE = 6
"""Processes that compile kernels for a card, beside the one that trains."""

Kernels = tuple[str, str, str]
"""An arm's name, its size, and a letter of its layers: what is compiled together."""


def kernels_of(job: Job) -> set[Kernels]:
    """What has to be compiled for a job."""
    layers = ARMS[job.arm].configure(SIZES[job.size]).layers
    return {(job.arm, job.size, letter) for letter in layers}


@dataclasses.dataclass
class Session:
    """One call of the command."""

    table: Table
    data: Path
    wanted: Callable[[Table], list[Job]]
    """The jobs to be done, in order, as the table stands."""
    devices: Sequence[str]
    end: float
    """When the budget is used up, by `time.monotonic()`."""
    workers: list[Worker] = dataclasses.field(default_factory=list)
    compilers: list[Worker] = dataclasses.field(default_factory=list)
    compiled: set[Kernels] = dataclasses.field(default_factory=set)
    """Kernels that are in Triton's cache."""
    failed: set[Job] = dataclasses.field(default_factory=set)

    def missing(self) -> list[Job]:
        """Jobs that nobody has done or does, in order."""
        busy = {worker.job for worker in self.workers}
        return [
            job for job in self.wanted(self.table) if not (self.table.find(job) or job in busy or job in self.failed)
        ]

    def left_s(self) -> float:
        """What is left of the budget."""
        return self.end - time.monotonic()

    def fits(self, job: Job) -> bool:
        """Whether there is time for one more run."""
        known = [row["seconds"] for row in self.table.of(size=job.size, recipe=job.recipe)]
        return self.left_s() > 1.1 * max(known, default=RECIPES[job.recipe].expected_s)

    # --- one round -----------------------------------------------------------------------------------------------

    def hand_out(self) -> bool:
        """Give jobs to idle workers and compilers; whether there is anything left to wait for."""
        missing = [job for job in self.missing() if self.fits(job)]
        needs_kernels = "cpu" not in self.devices
        if needs_kernels:
            self._compile(missing)
        for worker in self.workers:
            if worker.job is None:
                job = next((job for job in missing if not needs_kernels or kernels_of(job) <= self.compiled), None)
                if job is not None:
                    missing.remove(job)
                    worker.begin(job, self.left_s())
        return bool(missing) or any(worker.job for worker in self.workers)

    def _compile(self, missing: Sequence[Job]) -> None:
        under_way = {(c.job.arm, c.job.size, c.letter) for c in self.compilers if c.job}
        for job in missing:
            for kernels in sorted(kernels_of(job) - self.compiled - under_way):
                if len(self.compilers) >= COMPILED_AT_ONCE * len(self.devices):
                    return
                device = self.devices[len(self.compilers) % len(self.devices)]
                compiler = Worker(self.data, device, letter=kernels[2])
                compiler.begin(job, COMPILE_LIMIT_S)
                self.compilers.append(compiler)
                under_way.add(kernels)

    def take_in(self) -> None:
        """Wait for something to be done and take it in."""
        for worker in ready([*self.workers, *self.compilers], timeout_s=1.0):
            answer = worker.answer()
            if worker in self.compilers:
                self.compilers.remove(worker)
                worker.close()
                self._compiled(answer, worker.letter or "")
            else:
                self._done(worker, answer)

    def _compiled(self, answer: Answer, letter: str) -> None:
        if answer.failure is not None:
            print(f"compiling {answer.job}, layers {letter}: {answer.failure}", flush=True)
            self.failed.update(job for job in self.missing() if job.arm == answer.job.arm)
        self.compiled.add((answer.job.arm, answer.job.size, letter))

    def _done(self, worker: Worker, answer: Answer) -> None:
        if answer.found is None:
            print(f"{answer.job}: {answer.failure}", flush=True)
            self.failed.add(answer.job)
        else:
            print(line_of(self.table.append(answer.job, answer.found)), flush=True)
        if answer.is_last:
            self.workers[self.workers.index(worker)] = Worker(self.data, worker.device)
            worker.close()

    def close(self) -> None:
        """End all processes."""
        for worker in (*self.workers, *self.compilers):
            worker.close()


def line_of(row: dict[str, Any]) -> str:
    """A run in a line."""
    gradient = row["gradient"]
    return (
        f"{row['arm']:<20} {row['size']:>5} rate {row['rate']:<7g} seed {row['seed']} | val {row['val']} | "
        f"{row['parameters'] / 1e6:.1f} M | {row['tokens_per_s'] / 1e3:,.0f} K tokens/s | {row['seconds']:.0f} s | "
        f"gradient {gradient['p50']}, {gradient['clipped']:.0%} clipped, {gradient['skipped']} skipped"
    )


def study(session: Session) -> None:
    """Run until nothing is missing or nothing more fits."""
    try:
        session.workers.extend(Worker(session.data, device) for device in session.devices)
        while session.hand_out():
            session.take_in()
    finally:
        session.close()
    missing, failed = len(session.missing()), len(session.failed)
    print(f"{len(session.table.rows)} rows in the table; {missing} runs are still missing, {failed} failed", flush=True)


def commit_of(repository: Path) -> str:
    """The commit of the code, with a + if it has changes. Raises `Refusal` where git knows none."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "neuronspark", "nstrain", "benchmarks/models", "benchmarks/study")
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refusal(f"git knows no commit of {repository} ({error}); give --commit") from None
    changes = [line for line in changed.splitlines() if not line.endswith(".jsonl")]
    return head + ("+" if changes else "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("1", "2", "3", "4"), required=True)
    parser.add_argument("--budget-s", type=float, required=True, help="seconds after which no run is under way")
    parser.add_argument("--data", type=Path, required=True, help="what benchmarks.study.corpus wrote")
    parser.add_argument("--table", type=Path, required=True, help="the JSON lines to add to")
    parser.add_argument("--commit", help="what the rows are of; default: git's word")
    parser.add_argument("--any-commit", action="store_true", help="rows of other commits count as done")
    parser.add_argument("--devices", nargs="+", help="cpu, or cuda:0 cuda:1 ...; default: every card")
    arguments = parser.parse_args()
    began = time.monotonic()
    commit = arguments.commit or commit_of(REPOSITORY)
    digest = read_data(arguments.data).digest
    table = Table(arguments.table, digest, commit, any_commit=arguments.any_commit)
    parts, devices = arguments.part, arguments.devices or _cards()
    session = Session(table, arguments.data, functools.partial(wanted, parts), devices, began + arguments.budget_s)
    print(f"data {digest}, commit {commit}, on {', '.join(session.devices)}", flush=True)
    study(session)


def _cards() -> list[str]:
    """Every card, by number; the driver is not started for it. Raises `Refusal` where there is none."""
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    count = torch.cuda.device_count()
    if not count:
        raise Refusal("torch finds no CUDA device here; --devices cpu runs on the CPU (for a test)")
    return [f"cuda:{number}" for number in range(count)]


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        raise SystemExit(str(refusal)) from None
