"""`nstrain data extend --after`: only while nobody is at work on the data line, since trainers know the old one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_lines import CYCLES, make_small_line
from typer.testing import CliRunner, Result

from nstrain.base.disk import FileLock
from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.data.preparer import preparer_lock
from nstrain.line.run_json import load_settings


def extend(work: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["extend", "--work", str(work), *map(str, options)])


def test_a_schedule_is_replaced_only_where_nobody_is_at_work(tmp_path: Path) -> None:
    paths = make_small_line(tmp_path)
    work = Path(load_settings(paths).data.work)
    write_consumer(work, "made-anew-here", 1, 0, 0, paths.root)
    write_consumer(work, "long-gone", 1, 0, 0, tmp_path / "gone")
    for lock, who in (
        (FileLock(paths.supervisor_lock), f"{paths.root} runs .*nstrain stop {paths.root}"),
        (FileLock(paths.trainer_lock), f"{paths.root} cannot be given another schedule yet"),
        (preparer_lock(work), f"{work} cannot be given another schedule .the preparer"),
    ):
        with lock.acquire("the test"):
            refused = extend(work, "--after", 1, "--cycles", 4, "--share", "verse=1")
            assert isinstance(refused.exception, Refusal)
            with pytest.raises(Refusal, match=who):
                raise refused.exception
            if lock.path == paths.trainer_lock:
                assert extend(work, "--cycles", 1).exit_code == 0, "at its end it may grow while it is used"
    assert DataLine.open(work).cycle_count == CYCLES + 1

    done = extend(work, "--after", 1, "--cycles", 4, "--share", "verse=1")
    assert "4 more cycles" in done.output
    assert "from cycle 2 on; 5 cycles in all" in done.output
    assert "after cycle 1" in extend(work, "--after", 1, "--cycles", 0).output
    shutil.rmtree(work)
    assert isinstance(extend(work, "--after", 1, "--cycles", 1).exception, Refusal)
    assert not work.exists()
