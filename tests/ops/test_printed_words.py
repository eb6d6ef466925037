"""What commands print, word by word, where a person would stumble over it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import typer
from typer.testing import CliRunner

from nstrain.base.errors import ExitCode, Refusal
from nstrain.cli.common import table
from nstrain.cli.main import app
from nstrain.data.init import find_recipe
from nstrain.data.look import DataStatus
from nstrain.data.plan import LinePlan
from nstrain.line.listing import ListedCheckpoint
from nstrain.line.paths import LinePaths
from nstrain.ops.status import Status
from nstrain.record.journal import Journal


def test_a_path_in_a_tables_title_stays_whole() -> None:
    title = f"data line /a/{'long/' * 40}place [1]"
    assert table(title, ("a", "b"), [("1", "2")]).splitlines()[0] == title


def test_one_line_is_one_line(paths: LinePaths) -> None:
    printed = CliRunner().invoke(app, ["lines", str(paths.root.parent)], catch_exceptions=False).stdout
    assert printed.splitlines()[0] == f"1 line below {paths.root.parent}"
    assert CliRunner().invoke(app, ["lines", str(paths.checkpoints), "--json"], catch_exceptions=False).stdout == "[]\n"
    for wrong, said in (("mistyped", "no such directory"), ("~of-nobody/lines", "expected a path")):
        with pytest.raises(Refusal, match=f"{wrong}: {said}"):
            CliRunner().invoke(app, ["lines", wrong, "--json"], catch_exceptions=False)


def test_a_directory_is_not_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=f"{tmp_path}: a directory, not a recipe; name a file"):
        find_recipe(str(tmp_path))
    with pytest.raises(Refusal, match="nothing: no such recipe"):
        find_recipe("nothing")


def typed(output: IO[bytes] | int, *words: object, **variables: str) -> tuple[int, str]:
    """A command in a process of its own that prints to `output`: its exit code, and what it says on standard error."""
    env = {**os.environ, "PYTHONUNBUFFERED": "", **variables}
    command = [sys.executable, "-m", "nstrain.cli.main", *map(str, words)]
    ran = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=env, check=False)
    return ran.returncode, ran.stderr


def test_what_the_locale_cannot_show_does_not_end_a_command(tmp_path: Path) -> None:
    (directory := tmp_path / "行").mkdir()
    with (tmp_path / "out").open("wb") as file:
        assert typed(file, "lines", directory, PYTHONIOENCODING="latin-1") == (0, "")
    title, frame, *_ = (tmp_path / "out").read_text("latin-1").splitlines()
    assert title == f"0 lines below {tmp_path}/?"
    assert set(frame) == {"+", "-"}


def test_an_output_that_is_closed_is_no_failure_and_a_full_one_is_told(paths: LinePaths) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for unbuffered, words in (("", ("lines", paths.root)), ("", ("status", paths.root)), ("1", ("--help",))):
        assert typed(writer, *words, PYTHONUNBUFFERED=unbuffered) == (0, "")
    os.close(writer)
    for unbuffered in ("", "1"):
        with Path("/dev/full").open("wb") as full:
            code, said = typed(full, "lines", paths.root, PYTHONUNBUFFERED=unbuffered)
        assert code == ExitCode.NEEDS_OPERATOR
        assert said.count("\n") == 1, said
        assert "No space left on device" in said


def test_a_narrow_terminal_breaks_lines_itself(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page in 20 columns would be hundreds of lines of one letter."""
    monkeypatch.setenv("COLUMNS", "20")
    page = CliRunner().invoke(app, ["status", str(paths.root)], catch_exceptions=False).stdout
    assert len(page.splitlines()) < 15
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "│ a long cell │" in table("title", ("a", "b"), [("a long cell", "another")])
    monkeypatch.setenv("COLUMNS", "80")  # a whole row of `nstrain lines`, no word of it broken
    heads = ("line", "model", "state", "update", "tokens", "loss", "tokens/s", "left", "what it waits for")
    row = ("trunk", "tiny-32k", "stopped", "123,456", "49.2B of 65.5B", "4.9403", "40.3K", "12d 3h", "data of a cycle")
    lines = table("title", heads, [row]).splitlines()
    words = {word for line in lines for word in re.sub(r"\x1b\[[0-9;]*m|[^ -~]", " ", line).split()}
    assert words >= {word for cell in (*heads, *row) for word in cell.split()}
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= 80


@pytest.mark.parametrize(
    ("section", "what"),
    [("status", Status), ("checkpoints", ListedCheckpoint), ("data status", DataStatus), ("data plan", LinePlan)],
)
def test_every_field_of_json_is_explained(section: str, what: type) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    fields = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", page.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert [name for name, _ in fields] == [field.name for field in dataclasses.fields(what)]
    assert all(text.strip() for _, text in fields)


def test_every_option_of_new_says_its_default() -> None:
    commands = typer.main.get_command(app)
    options = commands.get_command(None, "new").params  # type: ignore[attr-defined]
    silent = {option.name for option in options if option.default is None and not option.required}
    assert silent
    assert {
        option.name for option in options if option.name in silent and "default" not in (option.help or "")
    } == set()


def test_an_output_never_replaces_a_file_of_the_line(paths: LinePaths) -> None:
    with Journal.open(paths.journal, 2) as journal:
        journal.commit(0, {"tokens": 0})
    before = {path: path.read_bytes() for path in (paths.journal, paths.run_json)}
    for command in ("journal", "plot"):
        for path in before:
            refused = CliRunner().invoke(app, [command, str(paths.root), "--output", str(path)])
            assert "is a file of the line itself" in str(refused.exception)
    for _ in range(2):  # an earlier export may be replaced
        assert (
            CliRunner().invoke(app, ["journal", str(paths.root), "--output", str(paths.root / "a.csv")]).exit_code == 0
        )
    assert {path: path.read_bytes() for path in before} == before
