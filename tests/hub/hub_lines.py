"""Data lines of hub sources, in this process and in others, with little patience."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_hub import FakeHub

import nstrain
from nstrain.base.errors import ExitCode
from nstrain.data.hub import patience
from nstrain.data.init import Recipe, find_recipe, init_line
from nstrain.data.line import DataLine
from nstrain.data.preparer import PreparerStatus, run_preparer
from nstrain.data.val import collect_held_out

EOS = 1
UNIT = 64
SOME = ("web-en-v14", "math-l2", "code-l3", "infllm-v2")
"""Sources of the recipe that stand for the rest: dumps, a flat directory, languages, a file a stratum."""


def some_recipe(names: Sequence[str] = SOME, **fields: Any) -> Recipe:
    """A part of the recipe minicpm, of which fields of every source may be replaced."""
    whole = find_recipe("minicpm")
    few = tuple(s.model_copy(update={**fields, "share": 1 + i}) for i, s in enumerate(whole.sources) if s.name in names)
    assert len(few) == len(names)
    return whole.model_copy(update={"sources": tuple(s.model_copy(update={"share": 1 + i}) for i, s in enumerate(few))})


def make_line(work: Path, tokenizer: Path, recipe: Recipe | None = None, **options: Any) -> DataLine:
    """A line of 128-token units times K, with two cycles."""
    options = {"cycle_tokens": 10 * 8 * UNIT, "cycles": 2, "unit_tokens": UNIT, **options}
    return init_line(work, recipe or some_recipe(), tokenizer, EOS, **options)


def prepare(
    line: DataLine, on_status: Callable[[PreparerStatus], None] = lambda status: None, workers: int = 0
) -> None:
    """Prepare every cycle of the schedule in this process."""
    assert run_preparer(line.work, until_cycle=2, on_status=on_status, workers=workers) == ExitCode.DONE


def build(work: Path, tokenizer: Path, recipe: Recipe | None = None) -> DataLine:
    """A line with its held-out rows and both cycles."""
    line = make_line(work, tokenizer, recipe)
    collect_held_out(line, 3 * UNIT)
    prepare(line)
    return line


def result(work: Path) -> dict[str, bytes]:
    """All that a line's later life depends on, byte for byte."""
    parts = ("line.json", "sources", "manifests", "cycles", "val")
    paths = [
        p for part in parts for p in ([work / part] if (work / part).is_file() else sorted((work / part).rglob("*")))
    ]
    found = {str(path.relative_to(work)): path.read_bytes() for path in paths if path.is_file()}
    return {name: data for name, data in found.items() if not name.endswith(".parquet")}


def environment(hub: FakeHub, **variables: str) -> dict[str, str]:
    """The environment of a child process of this nstrain at the fake hub."""
    package = str(Path(nstrain.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, "HF_ENDPOINT": hub.endpoint, "OMP_NUM_THREADS": "1", **variables}


def preparer_child(
    hub: FakeHub, work: Path, until: int = 2, file_limit: int | None = None, workers: int = 0, **variables: str
) -> subprocess.Popen[str]:
    """The preparer as a process, as impatient as this one; with `file_limit` no file of its grows beyond that."""
    fields = dataclasses.asdict(patience.PATIENCE)
    program = f"""
import resource, signal, sys
from pathlib import Path
from nstrain.data import preparer
from nstrain.data.hub import patience
patience.PATIENCE = patience.Patience(**{fields!r})
preparer.DISK_RETRY_S = 0.1
limit = {file_limit!r}
if limit is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
sys.exit(int(preparer.run_preparer(Path({str(work)!r}), 1, {until}, lambda: bool(told), workers={workers})))
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment(hub, **variables), stderr=subprocess.PIPE, text=True
    )


def command(hub: FakeHub, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`nstrain ...` as typed."""
    program = "from nstrain.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(hub, **variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def peak_mib() -> int:
    """The most memory that this process has had; unlike its `ru_maxrss`, without its parent's before it was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def status_of(work: Path) -> dict[str, Any]:
    """preparer.json."""
    try:
        value: dict[str, Any] = json.loads((work / "preparer.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value
