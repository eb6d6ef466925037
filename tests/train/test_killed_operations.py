"""`rollback` and `branch` killed at each of their steps: what is left can be run, and the same command finishes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from killed_process import killed_at
from real_line import journal_summary, make_data_line, make_run, prepare, rows_of, run_here, tensors_of

from nstrain.base.errors import ExitCode
from nstrain.line.branches import read_branches
from nstrain.line.paths import LinePaths
from nstrain.ops.branch import make_branch
from nstrain.ops.branch_plan import parse_plan
from nstrain.ops.rollback import roll_back

LAST_UPDATE = 13
"""One cycle of 12 updates and a smaller one; checkpoints at 0, 8, 12 and 13."""
MOST_STEPS = 40


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a line that is done and of its data line."""
    root = tmp_path_factory.mktemp("done")
    data = make_data_line(root, 1)
    prepare(data.work, 1)
    assert run_here(make_run(root / "run", data)) == ExitCode.DONE
    return root


@pytest.mark.parametrize("area", ["checkpoint", "journal"])
def test_a_rollback(done: Path, tmp_path: Path, area: str) -> None:
    line, through = LinePaths(done / "run"), LinePaths(tmp_path / "as it was")
    shutil.copytree(line.root, through.root)
    steps = 0
    for n in range(1, MOST_STEPS):
        shutil.rmtree(line.root)
        shutil.copytree(through.root, line.root)
        if not killed_at(f"{area}:{n}", lambda: roll_back(line.root, 8)):
            break
        steps = n
        assert run_here(line, stop_after=9) in (ExitCode.STOPPED, ExitCode.DONE)
        assert journal_summary(line)[1] == 0
        assert roll_back(line.root, 8).update == 8
        assert run_here(line) == ExitCode.DONE
        assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)
        rows = rows_of(line)
        assert [int(row["update"]) for row in rows] == list(range(LAST_UPDATE + 1))
        assert {row["generation"] for row in rows[:9]} == {1}
        assert len({row["generation"] for row in rows[9:]}) == 1
        assert rows[9]["generation"] > 1
    shutil.rmtree(line.root)
    shutil.copytree(through.root, line.root)
    assert steps >= {"checkpoint": 3, "journal": 1}[area]
    assert n < MOST_STEPS - 1


@pytest.mark.parametrize("area", ["checkpoint", "journal"])
def test_a_branch(done: Path, tmp_path: Path, area: str) -> None:
    trunk = done / "run"

    def branch(root: Path) -> None:
        plan = "decay:900"
        make_branch(root / "run", trunk, 1, parse_plan(plan), plan, root / "data")

    steps = 0
    for n in range(1, MOST_STEPS):
        root = tmp_path / str(n)
        root.mkdir()
        if not killed_at(f"{area}:{n}", lambda root=root: branch(root)):
            break
        steps = n
        assert not (root / "run").exists(), "whole or absent"
        branch(root)
        paths = LinePaths(root / "run")
        assert tensors_of(paths, LAST_UPDATE) == tensors_of(LinePaths(trunk), LAST_UPDATE)
        assert len(rows_of(paths)) == LAST_UPDATE + 1
        assert sorted(path.name for path in root.iterdir()) == ["data", "run"], "nothing is left over"
        listed = [entry.run for entry in read_branches(LinePaths(trunk))]
        assert listed.count(str(paths.root)) == 1
    assert steps >= {"checkpoint": 5, "journal": 1}[area]
    assert n < MOST_STEPS - 1
