"""The sanitizer's script: it names tests that exist, of every operator, and reads what the tool says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = runpy.run_path(str(HERE.parents[2] / "benchmarks/kernels/sanitize.py"))


def test_it_runs_tests_of_every_operator() -> None:
    assert set(SCRIPT["TESTS"]) == {path.name for path in HERE.glob("test_*_triton.py")}
    for file, names in SCRIPT["TESTS"].items():
        defined = set(re.findall(r"^def (test_\w+)\(", (HERE / file).read_text(), re.MULTILINE))
        assert set(names) <= defined, file


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "30 passed\n========= ERROR SUMMARY: 0 errors", 0),
        (0, "30 passed\n========= RACECHECK SUMMARY: 0 hazards displayed", 0),
        (86, "30 passed\n========= ERROR SUMMARY: 2 errors", 1),
        (1, "1 failed, 29 passed\n========= ERROR SUMMARY: 0 errors", 1),
        (0, "30 passed", 1),
        (1, "..F [100%]\nFAILED test_a\n========= ERROR SUMMARY: 4 errors", 1),  # as quiet as this repository has it
        (1, "========= Error: Device not supported.", 2),
    ],
)
def test_what_a_run_tells(status: int, output: str, expected: int) -> None:
    assert SCRIPT["verdict"](status, output)[0] == expected
