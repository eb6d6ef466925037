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


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("module", MODULES)
def test_every_case_compiles_and_fits(module: str, card: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_cases.py")), module, card],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"{lines[-1:]} for {card}: {child.stderr[-2000:]}"
    found = [line for line in lines if "registers" in line]
    assert found, f"{module} names no case to compile"
    wrong = [
        line for line in found if line["shared_bytes"] > SHARED_BYTES or line["spilled_bytes"] > line["allowed_spill"]
    ]
    assert not wrong, f"these do not fit {card}: {wrong}"
