"""Which launch configurations a line runs with: those it was tuned with, and from a checkpoint on that one's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from real_line import _standin, make_data_line, make_run, prepare, run_here, state_of

from nstrain.base.errors import ExitCode, Refusal
from nstrain.line.paths import LinePaths
from nstrain.train.tuned_kernels import kernels_file, tuned_kernels

PINNED = {"scan": {"any": {"blocks": {"TILE": 16}, "num_warps": 4, "num_stages": 1}}}
TUNED = {"scan": {"any": {"blocks": {"TILE": 64}, "num_warps": 8, "num_stages": 2}}}


def write_kernels(paths: LinePaths, kernels: Any, **fields: Any) -> None:
    kernels_file(paths).parent.mkdir(exist_ok=True)
    kernels_file(paths).write_text(json.dumps({"format": 1, "basis": {}, "kernels": kernels} | fields))


def run_with_kernels(line: LinePaths, stop_after: int, misfit: str | None = None) -> None:
    """A launch with the stand-in model's package as one whose kernels' configurations can be set.

    `misfit` is what it says of any table.
    """
    package, in_use = _standin(), dict(PINNED)
    package.__path__ = ["the package"]
    package.kernel_table = lambda: dict(in_use)

    def use_kernels(table: dict[str, Any]) -> None:
        if misfit:
            raise ValueError(misfit)
        in_use.update(table)

    package.use_kernels = use_kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["real_line"], "_standin", lambda needed="": package)
        assert run_here(line, stop_after) == ExitCode.STOPPED


def test_a_line_begins_with_the_tuned_ones_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    data = make_data_line(tmp_path / "data", 1)
    prepare(data.work, 1)
    tuned, plain = (make_run(tmp_path / name, data) for name in ("tuned", "plain"))
    write_kernels(tuned, TUNED)
    for line, expected in ((tuned, TUNED), (plain, PINNED)):
        run_with_kernels(line, stop_after=2)
        assert state_of(line, 2)["kernels"] == expected
        write_kernels(line, {"scan": {"any": {"blocks": {"TILE": 1}, "num_warps": 1, "num_stages": 1}}})
        run_with_kernels(line, stop_after=3)
        assert state_of(line, 3)["kernels"] == expected, "a line that has begun is not moved by another tuning"


def test_a_table_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    data = make_data_line(tmp_path / "data", 1)
    prepare(data.work, 1)
    line = make_run(tmp_path / "line", data)
    write_kernels(line, TUNED)
    misfit, does_not_fit = "kernel 'scan': no such kernel", "configurations do not fit the model package in the package"
    with pytest.raises(Refusal, match=rf"tune/kernels.json: .*{does_not_fit}: {misfit}; remove it"):
        run_with_kernels(line, 1, misfit)
    assert line.checkpoint_updates() == []
    run_with_kernels(line, 2)
    with pytest.raises(Refusal, match=rf"u00000002: .*{does_not_fit}: {misfit}; go on with the nstrain"):
        run_with_kernels(line, 3, misfit)
    kernels_file(line).unlink()
    run_with_kernels(line, 3)
    assert state_of(line, 3)["kernels"] == TUNED


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    paths = LinePaths(tmp_path)
    assert tuned_kernels(paths) == {}
    write_kernels(paths, TUNED)
    assert tuned_kernels(paths) == TUNED
    for kernels, fields in ((TUNED, {"format": 2}), (3, {}), ({"scan": 4}, {})):
        write_kernels(paths, kernels, **fields)
        with pytest.raises(Refusal, match=r"kernels.json: is not what `nstrain tune` writes .*; remove it"):
            tuned_kernels(paths)
