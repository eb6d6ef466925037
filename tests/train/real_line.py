"""A real data line and training lines on it, small enough for tests that run the trainer as a process."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from rate_pieces import rate_pieces
from tokenizers import models, pre_tokenizers, trainers

from nstrain.base.disk import atomic_write_json
from nstrain.base.errors import ExitCode
from nstrain.data.consumers import write_consumer
from nstrain.data.init import Recipe, RecipeSource, init_line
from nstrain.data.line import DataLine
from nstrain.data.val import collect_held_out
from nstrain.line.checkpoint import load_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, RunSettings, load_run, save_run
from nstrain.train.loop import Trainer
from nstrain.train.opening import opened_trainer
from nstrain.train.stopping import StopRequests

STANDIN = Path(__file__).parent / "standin"
ROOT = Path(__file__).parents[2]
UNIT_TOKENS = 32
CYCLE_TOKENS = 2048
"""64 rows of 32 tokens; with 3 shares of the two sources a whole number of segments."""

WORDS = ["one", "two", "three", "four", "red", "green", "blue", "stone", "river", "tree", "wind", "light", "north"]


def write_texts(root: Path, short: bool) -> None:
    """Two sources of plain text with two directories each; every document is different."""
    draw = random.Random(4)
    for source, documents, words in (
        (("books", 600, 8), ("code", 400, 8)) if short else (("books", 120, 160), ("code", 90, 120))
    ):
        for number in range(documents):
            path = root / source / ("a" if number % 3 else "b") / f"{number:03d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{source} {number}: " + " ".join(draw.choices(WORDS, k=words)) + "\n")


def train_tokenizer(root: Path, path: Path) -> int:
    """A byte-level BPE tokenizer of 384 tokens; returns the id of its end-of-document token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(p) for p in sorted(root.rglob("*.txt"))], trainer)
    tokenizer.save(str(path))
    return int(tokenizer.token_to_id("</s>"))


def make_data_line(root: Path, cycles: int | None = 3, short_documents: bool = False) -> DataLine:
    """A data line with its held-out rows; no cycle is prepared yet. Short documents end within a row."""
    write_texts(root / "texts", short_documents)
    eos = train_tokenizer(root / "texts", root / "tokenizer.json")
    sources = [
        RecipeSource(
            share=share,
            name=name,
            kind="local",
            path=str(root / "texts" / name),
            include=("**/*.txt",),
            held_out=0.15,
        )
        for name, share in (("books", 2), ("code", 1))
    ]
    recipe = Recipe(format=1, sources=tuple(sources))
    line = init_line(root / "data", recipe, root / "tokenizer.json", eos, CYCLE_TOKENS, cycles, UNIT_TOKENS, 1)
    collect_held_out(line)
    return line


def prepare(work: Path, through_cycle: int) -> None:
    """Prepare a data line's first cycles, in a process of its own."""
    command = "import sys; from pathlib import Path; from nstrain.data.preparer import run_preparer; "
    command += "run_preparer(Path(sys.argv[1]), until_cycle=int(sys.argv[2]), workers=0)"
    subprocess.run([sys.executable, "-c", command, str(work), str(through_cycle)], check=True, cwd=ROOT)


def make_run(root: Path, data: DataLine, **changes: Any) -> LinePaths:
    """A training line that has not started; `changes` replace top-level fields of run.json."""
    fields: dict[str, Any] = {
        "id": root.name,
        "data": {"work": str(data.work)},
        "model": {"preset": "stand-in", "config": {"vocab_size": 384, "width": 24}},
        "seed": 11,
        "threads": 1,
        "device": "cpu",
        "tokens_per_update": 5 * UNIT_TOKENS,
        "rows": [{"from_cycle": 1, "row_tokens": UNIT_TOKENS}],
        "lengths": {"32": {"micro_rows": 2}, "16": {"micro_rows": 4}},
        "learning_rate": rate_pieces(1e-2, 640, decay=(2000, 6000)),
        "optimizer": {"clip_norm": 1.0, "weight_decay_batch": 160},
        "validation": {"every_updates": 8, "rows_per_source": 3},
        "checkpoints": {"every_updates": 4, "every_minutes": None},
        "print_every": 5,
    }
    paths = LinePaths(root)
    root.mkdir(parents=True)
    settings = RunSettings.model_validate_json(json.dumps(fields | changes))
    save_run(paths.run_json, settings)
    write_consumer(data.work, settings.id, 1, 0, 0, root)
    return paths


def environment(paths: LinePaths, **extra: str) -> dict[str, str]:
    """The environment of a trainer process; its host.json names the stand-in model unless the line's preset is real."""
    standin = load_run(paths.run_json).model.preset == "stand-in"
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    host = paths.root.with_name(f"{paths.root.name}.host.json")
    atomic_write_json(host, {"neuronspark": str(STANDIN)} if standin else {})
    return os.environ | {"NSTRAIN_HOST": str(host), "PYTHONPATH": python_path} | extra


def launch(paths: LinePaths, *arguments: str, pass_fds: tuple[int, ...] = (), **extra: str) -> subprocess.Popen[bytes]:
    """Start the trainer process; what it prints goes to run.log."""
    with paths.run_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nstrain.train", str(paths.root), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(paths, **extra),
            cwd=ROOT,
            pass_fds=pass_fds,
        )


class StopAfter(StopRequests):
    """Asks a trainer in this very process to stop once it has finished an update."""

    def __init__(self, paths: LinePaths, update: int) -> None:
        super().__init__(paths, None)
        self._update = update
        self.trainer: Trainer | None = None

    def reason(self) -> str | None:
        if self.trainer is not None and self.trainer.state.position.update >= self._update:
            return f"update {self._update} is done"
        return super().reason()


def run_here(paths: LinePaths, stop_after: int = 10**9, spoil: Callable[[int], bool] = lambda _: False) -> ExitCode:
    """Train in this process, with the stand-in model; `spoil(micro-batch)` says where gradients become NaN.

    `TinyModel` counts micro-batches over its life. Raises what ends the trainer.
    """
    stop = StopAfter(paths, stop_after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nstrain.train.model._package", _standin)
        with opened_trainer(paths, stop) as trainer:
            stop.trainer = trainer
            model = trainer.engine.model  # type: ignore[attr-defined]
            model.before_loss = lambda n: model.norm.main_grad.fill_(math.nan) if spoil(n) else None
            return trainer.run()


def _standin() -> Any:
    spec = importlib.util.spec_from_file_location("standin_model", STANDIN / "neuronspark" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(paths: LinePaths, **extra: str) -> int:
    """Run the trainer process to its end; returns its exit code."""
    return launch(paths, **extra).wait(timeout=120)


def change_run(paths: LinePaths, **changes: Any) -> None:
    """Edit top-level fields of run.json."""
    fields = json.loads(paths.run_json.read_text()) | changes
    save_run(paths.run_json, RunSettings.model_validate_json(json.dumps(fields)))
    assert load_run(paths.run_json)


def last_update(paths: LinePaths) -> int | None:
    """The journal's last update; None before there is one."""
    if not paths.journal.exists():
        return None
    with Journal.open_for_reading(paths.journal) as journal:
        return journal.last_update()


def log_of(paths: LinePaths) -> str:
    """What the trainer processes printed so far."""
    return paths.run_log.read_text() if paths.run_log.exists() else ""


def rows_of(paths: LinePaths) -> list[dict[str, float]]:
    """The journal's rows without what depends on the clock."""
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in journal.rows()]


def journal_summary(paths: LinePaths) -> tuple[str, int]:
    """A digest of all rows but for the clock's readings, and how many replays differed."""
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        return journal.digest(), journal.differences()


def tensors_of(paths: LinePaths, update: int) -> dict[tuple[str, str], bytes]:
    """Every tensor's bytes in a checkpoint."""
    checkpoint = load_checkpoint(paths.checkpoint(update))
    return {(k, n): np.asarray(a).tobytes() for k, arrays in checkpoint.tensors.items() for n, a in arrays.items()}


def state_of(paths: LinePaths, update: int) -> dict[str, Any]:
    return dict(load_checkpoint(paths.checkpoint(update)).state)


def wait_until(condition: Any, timeout_s: float = 60.0, what: str = "the condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)
