"""docs/guide/lines.md as a user types it: its commands in their order, in one shell; and what came of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_line import ROOT, environment, final_tensors, journal_rows, nstrain

GUIDE = ROOT / "docs" / "guide" / "lines.md"
LINES = ("trunk", "decay", "long")


def shell_blocks() -> str:
    """The guide's sh blocks as one script that stops at the first command that fails."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    return "set -euxo pipefail\n" + "\n".join(blocks)


def follow(directory: Path, unit_tokens: int, timeout_s: float) -> None:
    """Run the guide in a directory; on a failure nothing it started goes on."""
    programs = directory / "bin"
    programs.mkdir()
    for name, arguments in (("nstrain", " -m nstrain.cli.main"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    log = directory / "output.txt"
    with log.open("wb") as output:
        try:
            ran = subprocess.run(
                ["bash", "-c", shell_blocks()],
                cwd=directory,
                env=environment(PATH=path, UNIT=str(unit_tokens)),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        finally:
            for line in LINES:
                end_line(directory / line)
    assert ran.returncode == 0, log.read_text()[-6000:]


def end_line(run: Path) -> None:
    """End a line's supervisor, if it still runs."""
    try:
        state = json.loads((run / "supervisor.json").read_text())
        command = Path(f"/proc/{state['pid']}/cmdline").read_bytes()
    except OSError:
        return
    if state["outcome"] is None and str(run).encode() in command:
        os.kill(state["pid"], signal.SIGKILL)


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads(nstrain("status", run, "--json")))


def check_outcome(directory: Path, unit_tokens: int) -> None:
    """What the guide says of its lines."""
    row_tokens = unit_tokens // 8
    trunk, decay, long = (directory / line for line in LINES)
    assert [status(run)["state"] for run in (trunk, decay, long)] == ["done"] * 3

    rows = journal_rows(trunk)
    assert [(row["update"], row["generation"]) for row in rows] == [(u, 1 if u <= 4 else 2) for u in range(9)]
    assert {name for name in rows[4] if re.fullmatch(r"val_\d+/mix", name)} == {
        f"val_{row_tokens}/mix",
        f"val_{unit_tokens}/mix",
    }
    assert f"ema/val_{row_tokens}/mix" in rows[8], "the average began where the first cycle ended"
    log = (trunk / "run.log").read_text()
    assert "cycle 1 is done, at whose end it was asked to stop" in log
    assert "stopped: stopped at the end of cycle 1, as asked" in log
    assert log.count("going on from u00000004") == 2, "after the stop, and after the rollback"
    assert not (trunk / "set-aside").exists(), "it has ended as far as it was before"

    rows = journal_rows(decay)
    assert [row["generation"] for row in rows] == [0] * 9 + [1] * 4
    without_generation = [{**row, "generation": 0} for row in journal_rows(trunk)]
    assert rows[:9] == without_generation, "a branch's record begins with its parent's"
    assert rows[-1]["tokens"] == 3 * unit_tokens
    assert [row["train/learning_rate"] for row in rows[-1:]] == [1e-4]
    assert rows[9]["train/learning_rate"] < 2e-3
    assert {row["row_tokens"] for row in rows} == {row_tokens}

    rows = journal_rows(long)
    assert rows[-1]["tokens"] == 4 * unit_tokens
    assert (rows[-1]["row_tokens"], rows[-1]["rows"]) == (unit_tokens, 1)
    assert rows[-1]["train/learning_rate"] == 1e-4, "held where the decay ended"
    assert final_tensors(long).keys() == final_tensors(trunk).keys() >= {"ema.safetensors"}
    assert (directory / "long.csv").read_text().count("\n") == len(rows) + 1

    branches = json.loads((trunk / "branches.json").read_text())["branches"]
    assert [Path(branch["run"]).name for branch in branches] == ["decay", "both"]
    both = json.loads((directory / "both" / "run.json").read_text())
    assert [row["row_tokens"] for row in both["rows"]] == [row_tokens, unit_tokens]
    shown = nstrain("lines", directory)
    assert all(line in shown for line in (*LINES, "both"))


def test_the_guide(tmp_path: Path) -> None:
    follow(tmp_path, 4096, timeout_s=280)
    check_outcome(tmp_path, 4096)


@pytest.mark.slow
def test_the_guide_at_32k(tmp_path: Path) -> None:
    follow(tmp_path, 32768, timeout_s=3 * 3600)
    check_outcome(tmp_path, 32768)
