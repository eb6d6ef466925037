"""A file that the data line leaves out (`nstrain data exclude`) is not missed by a check."""

from __future__ import annotations

from pathlib import Path

from nstrain.data.exclude import exclude_file
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.ops.check import check_line
from nstrain.settings.run import load_run


def test_a_file_that_is_left_out_may_go(paths: LinePaths) -> None:
    line = DataLine.open(Path(load_run(paths.run_json).data.work))
    name = line.source_names[0]
    file = line.listing(name).files[0][-1]

    def sources() -> bool | None:
        return next(found.ok for found in check_line(paths.root, deep=True) if found.name == "sources")

    exclude_file(line, name, file.path)
    assert sources() is True
    (line.source(name).root / file.path).unlink()
    assert sources() is True
    (line.source(name).root / line.listing(name).files[0][-2].path).unlink()
    assert sources() is False
