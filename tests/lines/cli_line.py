"""Whole lines as a user makes them: every step is a process of the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
UNIT_TOKENS = 64
CYCLE_TOKENS = 48 * UNIT_TOKENS
CYCLES = 3
ROW_TOKENS = 32
UPDATE_TOKENS = 10 * ROW_TOKENS
"""Ten updates a cycle, the last one smaller: 96 rows are 9 updates of 10 and one of 6."""
UPDATES = 30
CONTROL = ("<s>", "</s>", "<think>", "<function", "/think")
EOS_ID = 1


def write_sources(root: Path) -> Path:
    """Two sources with strata, some files that are not text, and a recipe; returns the recipe's path."""
    draw = random.Random(7)
    words = [f"w{number}" for number in range(150)] + ["<function", "</s>", "/think", "#include <functional>"]
    for source, files in (("notes", 120), ("code", 90)):
        for number in range(files):
            path = root / "text" / source / "abc"[number % 3] / f"{number:03d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{source} {number} " + " ".join(draw.choices(words, k=draw.randint(20, 160))) + "\n")
        (root / "text" / source / "a" / "empty.txt").write_text("")
        (root / "text" / source / "b" / "latin1.txt").write_bytes(b"caf\xe9 is not UTF-8")
    recipe = {
        "format": 1,
        "sources": [
            {
                "name": name,
                "kind": "local",
                "path": f"text/{name}",
                "include": ["**/*.txt"],
                "held_out": 0.1,
                "share": n,
            }
            for name, n in (("notes", 2), ("code", 1))
        ],
    }
    (root / "recipe.json").write_text(json.dumps(recipe))
    return root / "recipe.json"


def write_tokenizer(root: Path) -> Path:
    """A byte-level BPE tokenizer of 400 ids with control tokens whose characters stand in the text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((root / "text").rglob("[0-9]*.txt"))], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    return root / "tokenizer.json"


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command: no host.json of this machine, this tree's packages."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSTRAIN_")}
    return clean | {"HOME": "/nonexistent", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | extra


def nstrain(*arguments: object, code: int = 0, **extra: str) -> str:
    """Run a command to its end, check its exit code, return what it printed on both streams."""
    ran = subprocess.run(
        [sys.executable, "-m", "nstrain.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(**extra),
        timeout=300,
    )
    assert ran.returncode == code, f"{arguments} exited {ran.returncode}, not {code}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout if code == 0 else ran.stdout + ran.stderr


def make_line(root: Path, *more: object) -> Path:
    """Sources, tokenizer, data line, held-out rows and a new training line under `root`, with `more` options; returns
    the training line.
    """
    recipe, tokenizer = write_sources(root), write_tokenizer(root)
    data, run = root / "data", root / "run"
    nstrain(
        *("data", "init", "--work", data, "--recipe", recipe, "--tokenizer", tokenizer, "--eos-id", EOS_ID),
        *("--cycle-tokens", CYCLE_TOKENS, "--cycles", CYCLES, "--unit-tokens", UNIT_TOKENS, "--segment-units", 8),
    )
    nstrain("data", "val", "--work", data, "--tokens-per-source", 6 * UNIT_TOKENS)
    nstrain(
        *("new", run, "--model", "tiny-32k", "--data", data, "--peak-lr", "3e-3", "--threads", 1),
        *("--device", "cpu"),
        *("--row-tokens", ROW_TOKENS, "--tokens-per-update", UPDATE_TOKENS, "--micro-rows", 4),
        *("--validate-every", 6, "--validation-rows", 2, "--checkpoint-every", 4, "--print-every", 3),
        *more,
    )
    return run


class Running:
    """`nstrain run RUN --foreground` as a process, and what can be seen and done to it from outside."""

    def __init__(self, run: Path, **extra: str) -> None:
        self.run = run
        command = [sys.executable, "-m", "nstrain.cli.main", "run", str(run), "--foreground"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**extra)
        )

    def status(self) -> dict[str, Any]:
        """`nstrain status --json`."""
        return dict(json.loads(nstrain("status", self.run, "--json")))

    def kill(self, name: str) -> None:
        """SIGKILL one of the line's processes: pid (the supervisor), or trainer_pid, preparer_pid or mirror_pid of
        supervisor.json.
        """
        number = json.loads((self.run / "supervisor.json").read_text())[name]
        assert isinstance(number, int), f"{name} is {number}"
        os.kill(number, signal.SIGKILL)

    def end(self, timeout_s: float = 240) -> int:
        """Wait for its end; returns the exit code."""
        self.process.communicate(timeout=timeout_s)
        return self.process.returncode


def journal_rows(run: Path) -> list[dict[str, Any]]:
    """The journal as exported, without what depends on the clock or the machine."""
    lines = nstrain("journal", run, "--format", "jsonl").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def updates_recorded(run: Path) -> int:
    """The last update in the heartbeat; 0 before there is one."""
    try:
        return int(json.loads((run / "heartbeat").read_text())["update"])
    except (OSError, ValueError, KeyError):
        return 0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    """Poll a condition; fails the test if it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)


def final_tensors(run: Path) -> dict[str, bytes]:
    """The tensor files of the newest checkpoint."""
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}
