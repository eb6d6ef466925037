"""Tiny real lines on which faults are planned, and what must be the same at their end whatever happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import real_line
from real_line import CYCLE_TOKENS, ROOT, STANDIN, UNIT_TOKENS, make_data_line, make_run, prepare

from nstrain.base.disk import atomic_write_json
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.line.checkpoint import load_checkpoint, read_latest
from nstrain.line.paths import LinePaths
from nstrain.record.journal import Journal

GUARDS = {"watchdog_s": 3.0, "start_s": 120.0, "save_s": 60.0, "gpu_check_every": 1}
"""Two busy cores may well take a second for what takes a millisecond."""

Outcome = tuple[str, dict[str, bytes]]


def make_data(root: Path, cycles: int) -> DataLine:
    """A data line with all its cycles prepared, which are never deleted."""
    line = make_data_line(root, cycles)
    prepare(line.work, cycles)
    write_consumer(line.work, "keeper", 1, 0, 0, root)
    return line


def make_long_data_line(root: Path, cycles: int) -> DataLine:
    """A data line with text for so many cycles; nothing is prepared yet."""
    written = real_line.write_texts

    def write_more(texts: Path, short: bool) -> None:
        written(texts, short)
        draw = random.Random(5)
        for number in range(16 * cycles):
            for source in ("books", "code"):
                path = texts / source / ("a" if number % 3 else "b") / f"more{number:05d}.txt"
                path.write_text(f"{source} {number}: " + " ".join(draw.choices(real_line.WORDS, k=160)) + "\n")

    real_line.write_texts = write_more
    try:
        return make_data_line(root, cycles)
    finally:
        real_line.write_texts = written


def make_faulty_line(root: Path, data: DataLine, *faults: dict[str, Any], **changes: Any) -> LinePaths:
    """A line whose n-th launch has the n-th fault (faulty_trainer.py); `changes` replace fields of run.json."""
    paths = make_run(root / "run", data, **({"guards": GUARDS} | changes))
    plan(paths, *faults)
    return paths


def plan(paths: LinePaths, *faults: dict[str, Any]) -> None:
    """Plan the faults of the launches from the next on."""
    counter = paths.root.with_name("run.launches")
    done = int(counter.read_text()) if counter.exists() else 0
    atomic_write_json(paths.root.with_name("run.faults.json"), [{"after": 10**9, "do": "crash"}] * done + list(faults))


def use_standin(host: Path, **fields: Any) -> None:
    """Have host.json name the stand-in model."""
    host.write_text(json.dumps({"neuronspark": str(STANDIN)} | fields))


def last_update(data: DataLine) -> int:
    """The line's last update: a cycle of whole rows, five an update, the last one smaller."""
    assert data.cycle_count is not None
    return data.cycle_count * -(-CYCLE_TOKENS // (5 * UNIT_TOKENS))


def outcome(paths: LinePaths) -> Outcome:
    """The newest checkpoint's tensors and, but for the clock's readings, a digest of the journal's rows."""
    newest = read_latest(paths)
    assert newest is not None
    checkpoint = load_checkpoint(paths.checkpoint(newest))
    tensors = {
        f"{kind}/{name}": bytes(array.tobytes())
        for kind, of in checkpoint.tensors.items()
        for name, array in of.items()
    }
    with Journal.open_for_reading(paths.journal) as journal:
        assert journal.differences() == 0, "a replayed update differed"
        return journal.digest(), tensors


def supervisor(paths: LinePaths, preparer: str = "idle") -> subprocess.Popen[str]:
    """A supervisor of the line as a process."""
    script = Path(__file__).with_name("foreground.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(paths.root), "faulty", preparer],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """The environment of a line's processes, which find the packages of this tree."""
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}


def copy_data(template: Path, root: Path) -> DataLine:
    """A copy of a data line of which nothing is prepared; its texts stay where they are."""
    shutil.copytree(template, root / "data")
    return DataLine.open(root / "data")
