"""Every pinned configuration compiles for every card it is pinned for, fits it, spills no more than it says. No GPU."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import neuronspark.kernels
from neuronspark.kernels.launch import CARDS

MODULES = sorted(
    f"neuronspark.kernels.{module.name}"
    for module in pkgutil.iter_modules(neuronspark.kernels.__path__)
    if module.name.endswith("_triton")
)
SHARED_BYTES = 227 << 10
"""A program's limit on all of the cards."""


def test_every_operator_with_kernels_is_here() -> None:
    assert len(MODULES) > 5


def _by_process() -> list[tuple[str, tuple[str, ...]]]:
    """A module and the cards that one process compiles it for: all, since importing Triton takes seconds too; but one
    for the pool read, which is half of the work."""
    whole = [(module, CARDS) for module in MODULES if "pool_read" not in module]
    return [(module, (card,)) for module in MODULES if "pool_read" in module for card in CARDS] + whole


@pytest.mark.parametrize(("module", "cards"), _by_process())
def test_every_case_compiles_and_fits(module: str, cards: tuple[str, ...], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_cases.py")), module, *cards],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"{lines[-1:]}: {child.stderr[-2000:]}"
    found = [line for line in lines if "registers" in line]
    assert {line["card"] for line in found} == set(cards), f"{module} names no case to compile"
    wrong = [
        line for line in found if line["shared_bytes"] > SHARED_BYTES or line["spilled_bytes"] > line["allowed_spill"]
    ]
    assert not wrong, f"these do not fit: {wrong}"
