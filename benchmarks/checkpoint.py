"""What a checkpoint costs: the stall of the line, the background write beside the disk's own rate, and a resume.

    python benchmarks/checkpoint.py [--model ns-2b] [--directory DIR] [--json FILE]     on a GPU, about 5 minutes
    python benchmarks/checkpoint.py --only resume                                       about 2.5 minutes
    python benchmarks/checkpoint.py --only stalls                                       about 3 minutes
    python benchmarks/checkpoint.py --device cpu [--parameters 100e6]                   files alone, no model

Each part is a process of its own, since one keeps what it has on a GPU until it ends; all of them train a model on
random rows, on a GPU by the engine of graphs.

Stalls. A line's first checkpoint (kept) and a rolling one are saved as the trainer saves them, and every update is
timed: those while tensors are copied to the host, those while files are written, and those with nothing beside them.
The stall of a checkpoint is the time in which `save` does not return, and what the updates until it is on disk take
more than the others' median. ns-2b takes 24.5 GB a checkpoint: two of them and the file of the disk's own rate fit
64 GB, three checkpoints do not. That rate is of one file written in 16 MiB blocks and synced, before and after.

Resume. A checkpoint - the last one of the stalls, or with `--only resume` one of drawn numbers - is dropped from the
page cache, as on a machine that was just started, and a new process does what the trainer does up to the end of its
first update. Reading and hashing overlap; of each the slowest file's time is shown. What the first update takes more
than the later ones is spent on kernels and the capture; a second capture in the same process, with the kernels there,
tells them apart. A line adds to it one row through each probe.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nstrain.base.units import human_bytes
from nstrain.line import checkpoint as checkpoint_files
from nstrain.line.checkpoint import Checkpoint, load_checkpoint, load_newest_good, verify_checkpoint, write_checkpoint
from nstrain.line.paths import LinePaths, checkpoint_name
from nstrain.line.tensor_file import BLOCK_BYTES, new_hash

DISK_FILE_BYTES = 4 << 30
Report = dict[str, Any]


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


def free_bytes(directory: Path) -> int:
    return os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize


# ---- files alone -----------------------------------------------------------------------------------------------------


def files_alone(directory: Path, parameters: int, disk_file_bytes: int) -> Report:
    """Write and read checkpoints of so many parameters from arrays in memory."""
    report: Report = {"hash": hash_rate()}
    draw = np.random.default_rng(0)
    piece = draw.standard_normal(4 << 20, dtype=np.float32)
    names = [f"layers.{index:03d}.w" for index in range(max(1, parameters // len(piece)))]
    tensors = {kind: {name: piece.copy() for name in names} for kind in ("weights", "exp_avg", "exp_avg_sq")}
    paths = LinePaths(directory)
    report["disk_before"] = disk_rate(directory, disk_file_bytes)
    began = time.perf_counter()
    path = write_checkpoint(paths, Checkpoint(state_of_files(), tensors))
    took_s = time.perf_counter() - began
    report["disk_after"] = disk_rate(directory, disk_file_bytes)
    report["checkpoint_bytes"] = bytes_of(path)
    report["write"] = report["checkpoint_bytes"] / took_s
    for name, look in (("verify", verify_checkpoint), ("load", load_checkpoint)):
        forget_pages(path)
        began = time.perf_counter()
        look(path)
        report[f"{name}_s"] = time.perf_counter() - began
    return report


def state_of_files() -> dict[str, Any]:
    return {
        "format": 1, "update": 0, "tokens": 0, "generation": 1, "position": {"cycle": 1, "row": 0},
        "optimizer": {}, "reason": "rolling", "kept": False, "settings": {}, "versions": {}, "threads": 1,
        "id": "benchmark", "changes": {},
    }  # fmt: skip


# ---- a model that trains ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Training:
    """A model on its device, and rows without end."""

    settings: Any
    engine: Any
    rows: Iterator[Any]
    parameters: int
    done: int = 0
    """Updates of this process."""

    def update(self) -> float:
        """Train an update; the seconds that it took."""
        from nstrain.train.engine import train_update

        rows = next(self.rows)
        began = time.perf_counter()
        train_update(self.engine, rows, self.settings.lengths[str(rows.shape[1] - 1)].micro_rows, 1e-4, 0.1)
        self.done += 1
        return time.perf_counter() - began

    def state(self) -> Any:
        """Where the line stands."""
        from nstrain.train.checkpointing import LineState
        from nstrain.train.plan import Position

        return LineState(Position(self.done, 1, 0), 0, 1, None)

    def device_name(self) -> str:
        """The GPU's name, or cpu."""
        import torch

        return torch.cuda.get_device_name() if self.settings.device == "cuda" else "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.settings.device == "cuda":
            import torch

            torch.cuda.synchronize()


def begin_training(arguments: argparse.Namespace, seed: int | None = 0) -> Training:
    """Build the model with its optimizer, as the trainer does: without a seed for a checkpoint's values."""
    from nstrain.settings.model import validate
    from nstrain.settings.run import RunSettings
    from nstrain.train.determinism import enter_deterministic_mode
    from nstrain.train.model import build, model_cost
    from nstrain.train.opening import make_engine

    enter_deterministic_mode(1)
    cost = model_cost(arguments.model, arguments.row_tokens)
    length = str(arguments.row_tokens)
    settings = validate(
        RunSettings,
        {
            "id": "benchmark", "data": {"work": str(arguments.place)}, "seed": 0, "threads": 1,
            "device": arguments.device, "model": {"preset": arguments.model, "config": cost.config},
            "tokens_per_update": arguments.row_tokens * arguments.rows * arguments.accum,
            "rows": [{"from_cycle": 1, "row_tokens": arguments.row_tokens}],
            "lengths": {length: {"micro_rows": arguments.rows}},
            "learning_rate": [{"from": 0, "shape": "constant", "start": 1e-4}],
            "optimizer": {"clip_norm": 1.0}, "validation": {"every_updates": 1000, "rows_per_source": 1},
            "checkpoints": {"keep_last": 1},
        },
        "the benchmark's settings",
    )  # fmt: skip
    vocabulary = int(cost.config["vocab_size"])
    engine = make_engine(build(settings.model, vocabulary, arguments.device, seed), settings)
    engine.set_length(settings.lengths[length])
    rows = random_rows(vocabulary, arguments.rows * arguments.accum, arguments.row_tokens)
    return Training(settings, engine, rows, cost.parameters)


def random_rows(vocabulary: int, rows: int, row_tokens: int) -> Iterator[Any]:
    draw = np.random.default_rng(1)
    while True:
        yield draw.integers(0, vocabulary, (rows, row_tokens + 1), dtype=np.int64)


# ---- stalls ----------------------------------------------------------------------------------------------------------


def stalls(arguments: argparse.Namespace) -> Report:
    """Train with two checkpoints on the way."""
    from nstrain.train.saving import Saver

    class TimedSaver(Saver):
        committed_at = 0.0

        def _committed(self, path: Path, state: Any) -> None:
            self.committed_at = time.perf_counter()
            super()._committed(path, state)

    report: Report = {"hash": hash_rate(), "disk_before": disk_rate(arguments.place, arguments.disk_file_bytes)}
    tell(f"disk's own rate {human_bytes(report['disk_before'])}/s, {human_bytes(free_bytes(arguments.place))} free")
    training = begin_training(arguments)
    paths = LinePaths(arguments.place / "run")
    saver = TimedSaver(paths, training.settings, arguments.place, training.engine, tell)
    began = time.perf_counter()
    saver.open(None, training.state())
    report |= {"pin_s": time.perf_counter() - began, "slow": saver.slow}
    report |= {"parameters": training.parameters, "device": training.device_name()}
    tell(f"{arguments.model}: {training.parameters:,} parameters; capturing")
    for _ in range(2):
        training.update()
    alone = [training.update() for _ in range(arguments.updates)]
    report |= {"update_s": statistics.median(alone), "saves": []}
    tell(f"an update takes {report['update_s']:.3f} s ({min(alone):.3f} to {max(alone):.3f})")
    for reason in ("start", "rolling"):
        save = timed_save(saver, training, reason)
        save["stall_s"] = stall_of(save, report["update_s"])
        report["saves"].append(save)
        tell(f"{reason}: {save}")
    report["checkpoint_bytes"] = bytes_of(paths.checkpoints / str(saver.newest))
    report["write"] = report["checkpoint_bytes"] / report["saves"][-1]["written_s"]
    report["disk_after"] = disk_rate(arguments.place, min(arguments.disk_file_bytes, free_bytes(arguments.place) // 2))
    saver.close()
    return report


def timed_save(saver: Any, training: Training, reason: str) -> dict[str, Any]:
    """Save, and train on until the checkpoint is on disk."""
    state = training.state()
    began = time.perf_counter()
    saver.save(state, reason)
    returned_s = time.perf_counter() - began
    beside = []
    while saver.newest != checkpoint_name(state.position.update):
        beside.append(training.update())
        saver.poll()
    return {"returned_s": returned_s, "written_s": saver.committed_at - began, "updates_beside_s": beside}


def stall_of(save: dict[str, Any], update_s: float) -> float:
    """What a checkpoint cost the line, in seconds."""
    return float(save["returned_s"] + sum(max(0.0, s - update_s) for s in save["updates_beside_s"]))


# ---- a resume --------------------------------------------------------------------------------------------------------


def write_one(arguments: argparse.Namespace) -> Report:
    """Write a checkpoint of drawn numbers, straight from the device: no memory is pinned for it."""
    from nstrain.train.checkpointing import make_checkpoint
    from nstrain.train.host_copy import HostCopy, LazyCopy

    training = begin_training(arguments)
    for group in training.engine.flat.groups:  # numbers that no disk can make small
        group.exp_avg.normal_(std=1e-4)
        group.exp_avg_sq.uniform_(0, 1e-8)
    copy = LazyCopy(training.engine) if arguments.device == "cuda" else HostCopy(training.engine)
    state, tensors = training.state(), copy.take().by_kind
    tell(f"{arguments.model}: {training.parameters:,} parameters; writing")
    began = time.perf_counter()
    path = write_checkpoint(
        LinePaths(arguments.place / "run"),
        make_checkpoint(training.engine, training.settings, state, "rolling", tensors),
    )
    tell(f"{human_bytes(bytes_of(path))} written in {time.perf_counter() - began:.1f} s")
    return {"checkpoint_bytes": bytes_of(path), "parameters": training.parameters, "device": training.device_name()}


class Laps:
    """Seconds of one step after the other."""

    def __init__(self, since: float) -> None:
        """`since` is when the first step began (unix seconds)."""
        self.seconds: dict[str, float] = {}
        self._at = since

    def end(self, name: str) -> None:
        """The step so named is done."""
        now = time.time()
        self.seconds[name], self._at = now - self._at, now
        tell(f"{name}: {self.seconds[name]:.2f} s")


def resume(arguments: argparse.Namespace) -> Report:
    """Go on from the newest checkpoint as the trainer does, up to the end of the first update and some more."""
    laps = Laps(arguments.asked_at)
    from nstrain.train.checkpointing import restore
    from nstrain.train.saving import Saver

    laps.end("interpreter and imports")
    paths = LinePaths(arguments.place / "run")
    with timed_reading() as reading:
        found = load_newest_good(paths)
    assert found is not None
    newest, loaded = found
    laps.end("read and hash")
    training = begin_training(arguments, seed=None)
    training.synchronize()
    laps.end("model and optimizer")
    restore(training.engine, loaded, "benchmark")
    training.synchronize()
    del found, loaded  # the trainer keeps none of it either
    laps.end("host to device")
    saver = Saver(paths, training.settings, arguments.place, training.engine, tell)
    saver.open(newest, training.state())
    laps.end("host memory pinned")
    if arguments.device == "cuda":
        training.engine.open_arena()
    laps.end("arena")
    first_s = training.update()
    laps.end("first update")
    later_s = statistics.median(training.update() for _ in range(3))
    report: Report = {"laps": laps.seconds, "reading": reading, "first_update_s": first_s, "update_s": later_s}
    if arguments.device == "cuda":
        training.engine.close_arena()
        training.engine.open_arena()
        report["capture_s"] = training.update() - later_s
        report["kernels_s"] = first_s - later_s - report["capture_s"]
    saver.close()
    return report


@contextlib.contextmanager
def timed_reading() -> Iterator[dict[str, float]]:
    """Inside, the reading and the hashing of each file of a checkpoint are timed; of each the longest."""
    times: dict[str, float] = {"read_s": 0.0, "hash_s": 0.0}
    read_tensors, make_hash = checkpoint_files.read_tensors, checkpoint_files.new_hash

    def read(*what: Any) -> Any:
        began = time.perf_counter()
        tensors = read_tensors(*what)
        times["read_s"] = max(times["read_s"], time.perf_counter() - began)
        return tensors

    class TimedHash:
        def __init__(self) -> None:
            self._digest, self._took_s = make_hash(), 0.0
            self.hexdigest = self._digest.hexdigest

        def update(self, block: Any) -> None:
            began = time.perf_counter()
            self._digest.update(block)
            self._took_s += time.perf_counter() - began
            times["hash_s"] = max(times["hash_s"], self._took_s)

    checkpoint_files.read_tensors, checkpoint_files.new_hash = read, TimedHash  # type: ignore[assignment]
    try:
        yield times
    finally:
        checkpoint_files.read_tensors, checkpoint_files.new_hash = read_tensors, make_hash


# ---- the parts -------------------------------------------------------------------------------------------------------

PARTS = {"stalls": stalls, "write": write_one, "resume": resume}
"""Each in a process of its own, by `--part`."""


def in_process(part: str, place: Path, argv: list[str]) -> Report:
    """Run a part in a new process; its report."""
    tell(f"---- {part}")
    told = place / f"{part}.json"
    own = ["--part", part, "--place", str(place), "--json", str(told), "--asked-at", repr(time.time())]
    subprocess.run([sys.executable, __file__, *argv, *own], check=True)
    return dict(json.loads(told.read_text()))


def measure(arguments: argparse.Namespace, place: Path, argv: list[str]) -> Report:
    """The parts that are asked for, one after the other."""
    (place / "run").mkdir()
    report: Report = {"model": arguments.model}
    for part in {"stalls": ("stalls",), "resume": ("write", "resume"), None: ("stalls", "resume")}[arguments.only]:
        if part == "resume":
            forget_pages(place / "run" / "checkpoints" / (place / "run" / "checkpoints" / "latest").read_text().strip())
        found = in_process(part, place, argv)
        report |= {"resume": found} if part == "resume" else found
    return report


# ---- output ----------------------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(report: Report) -> str:
    """What was measured, a line each."""
    lines = [("checkpoint", f"{report['checkpoint_bytes'] / 1e9:.2f} GB")]
    if "write" in report:
        rates = {name: f"{report[name] / 1e9:.2f} GB/s" for name in ("write", "disk_before", "disk_after", "hash")}
        lines += [
            ("background write", rates["write"]),
            ("the disk's own, before/after", f"{rates['disk_before']} / {rates['disk_after']}"),
            ("hash, one core", rates["hash"]),
        ]
    if "load_s" in report:
        lines.append(("load, every byte verified", f"{report['load_s']:.1f} s"))
    if "saves" in report:
        lines += table_of_stalls(report)
    if "resume" in report:
        lines += table_of_resume(report["resume"])
    return "\n".join(f"{name:<30}{value}" for name, value in lines)


def table_of_stalls(report: Report) -> list[tuple[str, str]]:
    saves = report["saves"]
    slowest = max(s for save in saves for s in save["updates_beside_s"] or [0.0])
    slow = f" ({report['slow']})" if report["slow"] else ""
    return [
        ("host memory pinned in", f"{report['pin_s']:.1f} s{slow}"),
        ("stall of each checkpoint", ", ".join(f"{save['stall_s']:.3f} s" for save in saves)),
        ("`save` returned after", ", ".join(f"{save['returned_s']:.3f} s" for save in saves)),
        ("an update", f"{report['update_s']:.3f} s; the slowest beside a write {slowest:.3f} s"),
    ]


def table_of_resume(resumed: Report) -> list[tuple[str, str]]:
    laps, reading = dict(resumed["laps"]), resumed["reading"]
    lines = [("resume, to its first update", f"{sum(laps.values()):.1f} s")]
    lines += [(f"  {name}", f"{seconds:.1f} s") for name, seconds in laps.items()]
    lines += [
        ("  read, hash: slowest file", f"{reading['read_s']:.1f} s, {reading['hash_s']:.1f} s, beside each other"),
        ("  a later update", f"{resumed['update_s']:.3f} s"),
    ]
    if "kernels_s" in resumed:
        lines.append(("  kernels, capture", f"{resumed['kernels_s']:.1f} s, {resumed['capture_s']:.1f} s"))
    return lines


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["stalls", "resume"], help="one of the two (default: both; on a CPU neither)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="ns-2b", help="a preset")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--accum", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--updates", type=int, default=5, help="updates that are timed alone")
    parser.add_argument("--disk-file-bytes", type=int, default=DISK_FILE_BYTES, help="of the disk's own rate")
    parser.add_argument("--parameters", type=float, default=100e6, help="of the files alone (on a CPU)")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    for name, kind in (("--part", str), ("--place", Path), ("--asked-at", float)):  # of a part's own process
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        arguments.json.write_text(json.dumps(PARTS[arguments.part](arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=arguments.directory) as place:
        if arguments.device == "cpu" and arguments.only is None:
            report = files_alone(Path(place), int(arguments.parameters), arguments.disk_file_bytes // 4)
        else:
            report = measure(arguments, Path(place), argv)
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
