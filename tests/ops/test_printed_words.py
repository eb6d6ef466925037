"""What commands print, word by word, where a person would stumble over it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nstrain.base.errors import Refusal
from nstrain.cli.common import table
from nstrain.cli.main import app
from nstrain.data.init import find_recipe
from nstrain.line.paths import LinePaths


def test_a_path_in_a_tables_title_stays_whole() -> None:
    title = f"data line /a/{'long/' * 40}place [1]"
    assert table(title, ("a", "b"), [("1", "2")]).splitlines()[0] == title


def test_one_line_is_one_line(paths: LinePaths) -> None:
    printed = CliRunner().invoke(app, ["lines", str(paths.root.parent)], catch_exceptions=False).stdout
    assert printed.splitlines()[0] == f"1 line below {paths.root.parent}"


def test_a_directory_is_not_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=f"{tmp_path}: a directory, not a recipe; name a file"):
        find_recipe(str(tmp_path))
    with pytest.raises(Refusal, match="nothing: no such recipe"):
        find_recipe("nothing")
