"""Ctrl-C in a command that makes something: nothing half-made, its own exit code, and the same command goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from cli_line import CYCLE_TOKENS, CYCLES, EOS_ID, UNIT_TOKENS, environment, nstrain, write_sources, write_tokenizer


def test_an_interrupted_init_leaves_nothing_and_can_be_run_again(tmp_path: Path) -> None:
    recipe, tokenizer, data = write_sources(tmp_path), write_tokenizer(tmp_path), tmp_path / "data"
    init = ("data", "init", "--work", data, "--recipe", recipe, "--tokenizer", tokenizer, "--eos-id", EOS_ID)
    sizes = ("--cycle-tokens", CYCLE_TOKENS, "--cycles", CYCLES, "--unit-tokens", UNIT_TOKENS)
    # A slow import stands for slow work: the signal comes while the command is at it.
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import nstrain.data.sources as s, time\n"
        "real = s._pin\n"
        "def slowly(*a):\n    print('hashing', flush=True)\n    time.sleep(0.2)\n    return real(*a)\n"
        "s._pin = slowly\n"
    )
    env = environment()
    env["PYTHONPATH"] = f"{slow}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "nstrain.cli.main", *map(str, (*init, *sizes))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "hashing\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not data.exists()
    assert not list(tmp_path.glob(".*partial"))
    nstrain(*init, *sizes)
