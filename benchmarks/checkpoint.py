"""What a checkpoint costs: the stall of the line, the background write beside the disk's own rate, and a resume.

    python benchmarks/checkpoint.py [--model ns-2b] [--directory DIR] [--json FILE]     on a GPU, about 3 minutes
    python benchmarks/checkpoint.py --device cpu [--parameters 100e6]                   files alone, no model

On a GPU a model is trained on random rows by the engine of graphs. A line's first checkpoint (kept) and a rolling one
are saved as the trainer saves them, and every update is timed: those while tensors are copied to the host, those while
files are written, and those with nothing beside them. The stall of a checkpoint is the time in which `save` does not
return, and what the updates until it is on disk take more than the others' median. ns-2b takes 24.5 GB a checkpoint:
two of them and the file of the disk's own rate fit 64 GB, three checkpoints do not.

The disk's own rate is that of one file written in 16 MiB blocks and synced, in the same run before and after. Files are
dropped from the page cache before they are read again, so a resume is that of a machine that was just started.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nstrain.base.units import human_bytes
from nstrain.line.checkpoint import Checkpoint, load_checkpoint, load_newest_good, verify_checkpoint, write_checkpoint
from nstrain.line.paths import LinePaths, checkpoint_name
from nstrain.line.tensor_file import BLOCK_BYTES, new_hash

DISK_FILE_BYTES = 4 << 30


def disk_rate(directory: Path, size_bytes: int) -> float:
    """Bytes a second of one file, written block by block and synced."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    path = directory / "disk's own rate"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size_bytes // BLOCK_BYTES)):
            file.write(block)
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began
    path.unlink()
    return max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES / took_s


def hash_rate() -> float:
    """Bytes a second of the hash on one core."""
    block, digest = b"\1" * BLOCK_BYTES, new_hash()
    began = time.perf_counter()
    for _ in range(16):
        digest.update(block)
    return 16 * BLOCK_BYTES / (time.perf_counter() - began)


def forget_pages(directory: Path) -> None:
    """Have the next reading of a checkpoint's files come from the disk."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


# ---- files alone -----------------------------------------------------------------------------------------------------


def files_alone(directory: Path, parameters: int, report: dict[str, Any]) -> None:
    """Write and read checkpoints of so many parameters from arrays in memory."""
    draw = np.random.default_rng(0)
    piece = draw.standard_normal(4 << 20, dtype=np.float32)
    names = [f"layers.{index:03d}.w" for index in range(max(1, parameters // len(piece)))]
    tensors = {kind: {name: piece.copy() for name in names} for kind in ("weights", "exp_avg", "exp_avg_sq")}
    paths = LinePaths(directory)
    report["disk_before"] = disk_rate(directory, DISK_FILE_BYTES // 4)
    began = time.perf_counter()
    path = write_checkpoint(paths, Checkpoint(state_of(0, {}), tensors))
    took_s = time.perf_counter() - began
    report["disk_after"] = disk_rate(directory, DISK_FILE_BYTES // 4)
    report["checkpoint_bytes"] = bytes_of(path)
    report["write"] = report["checkpoint_bytes"] / took_s
    for name, look in (("verify", verify_checkpoint), ("load", load_checkpoint)):
        forget_pages(path)
        began = time.perf_counter()
        look(path)
        report[f"{name}_s"] = time.perf_counter() - began


def state_of(update: int, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1, "update": update, "tokens": 0, "generation": 1, "position": {"cycle": 1, "row": 0},
        "optimizer": {}, "reason": "rolling", "kept": False, "settings": settings, "versions": {}, "threads": 1,
        "id": "benchmark", "changes": {},
    }  # fmt: skip


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Clock:
    """Updates and how long each took."""

    engine: Any
    rows: Iterator[Any]
    micro_rows: int
    done: int = 0

    def update(self) -> float:
        from nstrain.train.engine import train_update

        rows = next(self.rows)
        began = time.perf_counter()
        train_update(self.engine, rows, self.micro_rows, 1e-4, 0.1)
        self.done += 1
        return time.perf_counter() - began


def random_rows(vocabulary: int, rows: int, row_tokens: int) -> Iterator[Any]:
    draw = np.random.default_rng(1)
    while True:
        yield draw.integers(0, vocabulary, (rows, row_tokens + 1), dtype=np.int64)


def on_a_gpu(directory: Path, arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    import torch

    from nstrain.settings.model import validate
    from nstrain.settings.run import LengthSettings, ModelSettings, RunSettings
    from nstrain.train.checkpointing import LineState, restore
    from nstrain.train.determinism import enter_deterministic_mode
    from nstrain.train.graphs import GraphEngine
    from nstrain.train.model import build, model_cost
    from nstrain.train.plan import Position
    from nstrain.train.saving import Saver

    enter_deterministic_mode(1)
    cost = model_cost(arguments.model, arguments.row_tokens)
    vocabulary = int(cost.config["vocab_size"])
    length = str(arguments.row_tokens)
    settings = validate(
        RunSettings,
        {
            "id": "benchmark", "data": {"work": str(directory)}, "seed": 0, "threads": 1, "device": "cuda",
            "model": {"preset": arguments.model, "config": cost.config},
            "tokens_per_update": arguments.row_tokens * arguments.rows * arguments.accum,
            "rows": [{"from_cycle": 1, "row_tokens": arguments.row_tokens}],
            "lengths": {length: {"micro_rows": arguments.rows}},
            "learning_rate": [{"from": 0, "shape": "constant", "start": 1e-4}],
            "optimizer": {"clip_norm": 1.0}, "validation": {"every_updates": 1000, "rows_per_source": 1},
            "checkpoints": {"keep_last": 1},
        },
        "the benchmark's settings",
    )  # fmt: skip
    model = build(ModelSettings(preset=arguments.model, config=cost.config), vocabulary, "cuda", seed=0)
    engine = GraphEngine(model, settings.optimizer)
    engine.set_length(LengthSettings(micro_rows=arguments.rows))
    rows = random_rows(vocabulary, arguments.rows * arguments.accum, arguments.row_tokens)
    clock = Clock(engine, rows, arguments.rows)
    (directory / "run").mkdir()
    paths = LinePaths(directory / "run")
    report |= {"device": torch.cuda.get_device_name(), "parameters": cost.parameters, "model": arguments.model}
    tell(f"{arguments.model}: {cost.parameters:,} parameters; {human_bytes(free_bytes(directory))} free in {directory}")
    report["disk_before"] = disk_rate(directory, DISK_FILE_BYTES)
    tell(f"disk's own rate {human_bytes(report['disk_before'])}/s; capturing")

    class TimedSaver(Saver):
        committed_at = 0.0

        def _committed(self, path: Path, state: Any) -> None:
            self.committed_at = time.perf_counter()
            super()._committed(path, state)

    saver = TimedSaver(paths, settings, directory, engine, tell)
    state = LineState(Position(0, 1, 0), 0, 1, None)
    began = time.perf_counter()
    saver.open(None, state)
    report["pin_s"] = time.perf_counter() - began
    report["slow"] = saver.slow
    for _ in range(2):
        clock.update()
    alone = [clock.update() for _ in range(arguments.updates)]
    report["update_s"] = statistics.median(alone)
    tell(f"an update takes {report['update_s']:.3f} s ({min(alone):.3f} to {max(alone):.3f})")
    report["saves"] = []
    for reason in ("start", "rolling"):
        report["saves"].append(timed_save(saver, clock, dataclasses.replace(state, position=at(clock.done)), reason))
        report["saves"][-1]["stall_s"] = stall_of(report["saves"][-1], report["update_s"])
        tell(f"{reason}: {report['saves'][-1]}")
    newest = paths.checkpoints / str(saver.newest)
    size_bytes = report["checkpoint_bytes"] = bytes_of(newest)
    report["write"] = size_bytes / report["saves"][-1]["written_s"]
    report["disk_after"] = disk_rate(directory, min(DISK_FILE_BYTES, free_bytes(directory) // 2))

    forget_pages(newest)
    began = time.perf_counter()
    found = load_newest_good(paths)
    assert found is not None
    report["load_s"] = time.perf_counter() - began
    began = time.perf_counter()
    restore(engine, found[1], "benchmark")
    torch.cuda.synchronize()
    report["restore_s"] = time.perf_counter() - began
    saver.close()


def at(update: int) -> Any:
    from nstrain.train.plan import Position

    return Position(update, 1, 0)


def timed_save(saver: Any, clock: Clock, state: Any, reason: str) -> dict[str, Any]:
    """Save, and train on until the checkpoint is on disk."""
    began = time.perf_counter()
    saver.save(state, reason)
    returned_s = time.perf_counter() - began
    beside = []
    while saver.newest != checkpoint_name(state.position.update):
        beside.append(clock.update())
        saver.poll()
    return {
        "returned_s": returned_s,
        "written_s": saver.committed_at - began,
        "updates_beside_s": beside,
    }


def stall_of(save: dict[str, Any], update_s: float) -> float:
    """What a checkpoint cost the line, in seconds."""
    return float(save["returned_s"] + sum(max(0.0, s - update_s) for s in save["updates_beside_s"]))


def free_bytes(directory: Path) -> int:
    return os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize


# ---- output ----------------------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    def rate(name: str) -> str:
        return f"{report[name] / 1e9:.2f} GB/s"

    lines = [
        f"checkpoint                    {report['checkpoint_bytes'] / 1e9:.2f} GB",
        f"background write              {rate('write')}",
        f"the disk's own, before/after  {rate('disk_before')} / {rate('disk_after')}",
        f"hash, one core                {rate('hash')}",
        f"load, every byte verified     {report['load_s']:.1f} s",
    ]
    if "saves" in report:
        stalls = ", ".join(f"{save['stall_s']:.3f} s" for save in report["saves"])
        slowest = max(s for save in report["saves"] for s in save["updates_beside_s"] or [0.0])
        lines += [
            f"into the GPU                  {report['restore_s']:.1f} s",
            f"host memory pinned in         {report['pin_s']:.1f} s"
            + (f" ({report['slow']})" if report["slow"] else ""),
            f"stall of each checkpoint      {stalls} (`save` returned after "
            + ", ".join(f"{save['returned_s']:.3f} s)" for save in report["saves"][-1:]),
            f"an update                     {report['update_s']:.3f} s; the slowest beside a write {slowest:.3f} s",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="ns-2b", help="a preset (on a GPU)")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--accum", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--updates", type=int, default=5, help="updates that are timed alone")
    parser.add_argument("--parameters", type=float, default=100e6, help="of the files alone (on a CPU)")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=arguments.directory) as place:
        report: dict[str, Any] = {"hash": hash_rate()}
        if arguments.device == "cpu":
            files_alone(Path(place), int(arguments.parameters), report)
        else:
            on_a_gpu(Path(place), arguments, report)
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
