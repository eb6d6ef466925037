"""One trial: the engine as the trainer makes it, timed on random tokens, and the memory that it took.

Updates of a few full micro-batches are timed in two parts, since their costs add up differently: the micro-batches, of
which a line's update has as many as its batch takes, and the update's end. A validation's readings, of the shape's
rows and of a row of the model's longest context, are taken as well, for what they take of the memory.

Memory in use beside weights and moments is on a GPU the most that the allocator ever gave out at a time while the
arena, as large as the trainer's, served it; on a CPU the growth of the process's resident memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nstrain
from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.host_memory import available_host_bytes
from nstrain.settings.model import validate
from nstrain.settings.run import LengthSettings, RunSettings
from nstrain.train.determinism import enter_deterministic_mode
from nstrain.train.device import refuse_missing_device
from nstrain.train.engine import EagerEngine, TokenRows, micro_batches
from nstrain.train.memory_errors import first_line, want_of_memory
from nstrain.train.model import (
    build,
    kernel_table,
    longest_row,
    package_directory,
    parameter_places,
    refuse_long_rows,
    use_kernels,
)
from nstrain.train.opening import make_engine
from nstrain.train.versions import code_digest, triton_version
from nstrain.tune.records import Measurement, Shape
from nstrain.tune.trial import Report

SMALLEST_TIMED_UPDATES, LARGEST_TIMED_UPDATES = 3, 50
"""Bounds of how often an update is timed."""

SHORT_ROW_TOKENS = 16
"""Target tokens of the row that libraries are loaded with."""

LEARNING_RATE, WEIGHT_DECAY, EMA_MOVE = 1e-4, 0.1, 1e-3
"""Of the timed updates, whose weights are thrown away."""


def do_job(job: Mapping[str, Any], report: Report) -> int:
    """Do a job of trial.py and report; returns the exit code. Raises `Refusal` for settings that cannot be trained."""
    settings = validate(RunSettings, job["settings"], "run.json")
    vocabulary = int(job["vocabulary"])
    refuse_missing_device(settings)
    if "shape" not in job:
        report.send(machine=machine(settings, vocabulary))
        return int(ExitCode.DONE)
    use_kernels(job["kernels"], "the line's newest checkpoint")
    shape = Shape(**job["shape"])
    try:
        measured = measure(settings, vocabulary, shape, int(job["micro_batches"]), float(job["seconds"]), report)
    except Exception as error:
        cause = want_of_memory(error)
        if cause is None:
            raise
        report.send(failed=first_line(cause), out_of_memory=True)
        return int(ExitCode.FAILED)
    report.send(measured=dataclasses.asdict(measured), kernels=kernel_table())
    return int(ExitCode.DONE)


def machine(settings: RunSettings, vocabulary: int) -> dict[str, Any]:
    """What trials are made with: the device, the libraries, the code, and the model's parameters.

    Builds the model without memory. Raises `Refusal` if it cannot be built or does not read the schedule's rows.
    """
    refuse_long_rows(settings)
    model = build(settings.model, vocabulary, "meta", settings.seed)
    facts: dict[str, Any] = {
        "parameters": sum(place.parameter.numel() for place in parameter_places(model)),
        "device": f"CPU, {platform.machine()}, {settings.threads} threads",
        "uuid": None,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "versions": {"nstrain": nstrain.__version__, "torch": torch.__version__, "triton": triton_version()},
        "code": _code_digest(),
    }
    if settings.device == "cuda":
        from nstrain.gpu.lease import this_gpu

        free, total = torch.cuda.mem_get_info()
        facts |= {"device": torch.cuda.get_device_name(), "uuid": this_gpu(), "memory_bytes": total}
        facts["free_bytes"] = free
    return facts


def _code_digest() -> str:
    """A digest of the files that a trial runs: the model's package and the trainer's."""
    trainer = Path(nstrain.__file__).parent
    return code_digest(package_directory(), trainer / "train", trainer / "gpu", trainer / "tune")


def measure(
    settings: RunSettings, vocabulary: int, shape: Shape, batches: int, seconds: float, report: Report
) -> Measurement:
    """Time updates of `batches` micro-batches for `seconds` at least, after one that warms everything up.

    Raises `torch.OutOfMemoryError`, `MemoryError`, `ArenaTooSmall` or the CPU allocator's `RuntimeError` for want of
    memory, and `NstrainError` for a loss that is not finite.
    """
    enter_deterministic_mode(settings.threads)
    report.stage("building the model")
    engine = make_engine(build(settings.model, vocabulary, settings.device, settings.seed), settings)
    engine.set_length(LengthSettings(micro_rows=shape.micro_rows, recompute=shape.recompute))
    if settings.device == "cpu":
        # What libraries load with a first update belongs to no shape, and would count as growth of the process.
        short = Shape(min(shape.row_tokens, SHORT_ROW_TOKENS), 1, shape.recompute)
        _update(engine, _random_rows(short, vocabulary, 1, 0), 1)
    memory = _GpuMemory(engine) if settings.device == "cuda" else _HostMemory()
    report.stage("warming up")
    _update(engine, _random_rows(shape, vocabulary, batches, 0), shape.micro_rows)  # the average begins with it
    times: list[tuple[float, float]] = []
    while len(times) < LARGEST_TIMED_UPDATES and (
        len(times) < SMALLEST_TIMED_UPDATES or sum(map(sum, times)) < seconds
    ):
        report.stage(f"timing, update {len(times) + 1}")
        rows = _random_rows(shape, vocabulary, batches, len(times) + 1)
        times.append(_update(engine, rows, shape.micro_rows))
    report.stage("validating")
    _validate(engine, settings, vocabulary, shape)
    transient_bytes, room_bytes = memory.read()
    return Measurement(
        micro_batch_s=statistics.median(accumulated for accumulated, _ in times) / batches,
        finish_s=statistics.median(finished for _, finished in times),
        updates=len(times),
        persistent_bytes=_persistent_bytes(engine),
        transient_bytes=transient_bytes,
        room_bytes=room_bytes,
    )


def _random_rows(shape: Shape, vocabulary: int, batches: int, number: int) -> TokenRows:
    size = (batches * shape.micro_rows, shape.row_tokens + 1)
    return np.random.default_rng(number).integers(0, vocabulary, size, dtype=np.int64)


def _validate(engine: EagerEngine, settings: RunSettings, vocabulary: int, shape: Shape) -> None:
    """What takes memory in a validation: a micro-batch of rows, and a row of the model's longest context.

    That one on a GPU alone, whose memory is held for it beforehand: on a CPU it may take minutes.
    """
    longest = longest_row(settings) or 0
    asked = [shape]
    if settings.device == "cuda" and settings.validation.long_rows_per_source and longest > shape.row_tokens:
        asked.append(Shape(longest, 1, shape.recompute))
    for of in asked:
        rows = _random_rows(of, vocabulary, 1, 0)
        engine.token_losses(rows)
        engine.probe(rows, 0, shape.row_tokens)
    engine.optimizer_summaries(LEARNING_RATE)


def _update(engine: EagerEngine, rows: TokenRows, micro_rows: int) -> tuple[float, float]:
    """One update as `train_update` makes it; the seconds of its micro-batches and of its end."""
    scale = 1.0 / (rows.shape[0] * (rows.shape[1] - 1))
    began = time.perf_counter()
    for batch in micro_batches(rows, micro_rows):
        engine.accumulate(batch, scale)
    if engine.flat.device.type == "cuda":
        torch.cuda.synchronize()
    accumulated = time.perf_counter()
    readings = engine.finish(LEARNING_RATE, WEIGHT_DECAY, EMA_MOVE if engine.flat.has_ema else None)
    ended = time.perf_counter()
    if readings.skipped or not np.isfinite(readings.loss):
        raise NstrainError(f"loss {readings.loss}, gradient norm {readings.grad_norm}: not finite on random tokens")
    return accumulated - began, ended - accumulated


def _persistent_bytes(engine: EagerEngine) -> int:
    groups = engine.flat.groups
    buffers = [buffer for g in groups for buffer in (g.master, g.main_grad, g.exp_avg, g.exp_avg_sq)]
    buffers += [group.ema for group in groups if group.ema is not None]
    buffers += [group.compute for group in groups if group.compute is not group.master]
    return sum(buffer.nbytes for buffer in buffers)


class _GpuMemory:
    """The memory that an engine of graphs takes out of its arena."""

    def __init__(self, engine: EagerEngine) -> None:
        from nstrain.train.graphs import GraphEngine

        assert isinstance(engine, GraphEngine)
        _wait_for_settled_memory()
        # Before the peak is reset: an arena is held by allocating it, which would count.
        self._room_bytes = engine.open_arena()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def read(self) -> tuple[int, int]:
        """Transient bytes at most, and the room there was."""
        return torch.cuda.max_memory_allocated() - self._before, self._room_bytes


def _wait_for_settled_memory() -> None:
    """Wait until the free memory has stopped growing: what the last trial had is given back in the background."""
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        time.sleep(0.5)
        before, free = free, torch.cuda.mem_get_info()[0]
        if free <= before:
            return


class _HostMemory:
    """The memory that an eager engine takes on a CPU: the growth of what is resident."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # not every container lets a process do so: then building it may count
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        self._before = _resident_bytes("VmRSS")
        self._room_bytes = available_host_bytes()

    def read(self) -> tuple[int, int]:
        """Transient bytes at most, and the room there was."""
        return max(0, _resident_bytes("VmHWM") - self._before), self._room_bytes


def _resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
