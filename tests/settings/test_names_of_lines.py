"""What a command takes a typed name for: a path, or a line below host.json's work_root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nstrain.base.errors import Refusal
from nstrain.cli.common import MADE_FILES, resolve
from nstrain.cli.main import app
from nstrain.line.paths import LinePaths
from nstrain.settings.host import HOST_FILE_VARIABLE


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that commands are run in; no host.json, but a home."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.delenv(HOST_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return directory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work_root of a host.json."""
    (tmp_path / "host.json").write_text(json.dumps({"work_root": str(tmp_path / "root")}))
    monkeypatch.setenv(HOST_FILE_VARIABLE, str(tmp_path / "host.json"))
    return tmp_path / "root"


PATHS = ("./line", "a/line", "../line", "/x/line", ".", "..", "~/line", "model.safetensors")


def test_without_a_work_root_every_name_is_a_path(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("line") == here / "line"
    (tmp_path / "host.json").write_text("{}")
    monkeypatch.setenv(HOST_FILE_VARIABLE, str(tmp_path / "host.json"))
    assert resolve("line") == here / "line"


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_paths(here: Path, root: Path, name: str) -> None:
    assert resolve(name) == (here / Path(name).expanduser()).resolve()


def test_a_bare_name_lies_below_the_work_root(here: Path, root: Path) -> None:
    assert resolve("line") == root / "line"
    (here / "line").mkdir()  # nothing that was made, as a directory of a home is
    assert resolve("line") == root / "line"


@pytest.mark.parametrize("file", MADE_FILES)
def test_what_was_made_here_comes_first(here: Path, root: Path, file: str) -> None:
    for directory in (here, root):
        (directory / "line").mkdir(parents=True)
        (directory / "line" / file).write_text("{}")
    assert resolve("line") == here / "line"


def test_a_file_here_comes_first(here: Path, root: Path) -> None:
    (here / "weights").write_text("")
    assert resolve("weights") == here / "weights"


def test_a_training_line_is_known_by_its_settings() -> None:
    assert LinePaths(Path("line")).run_json.name in MADE_FILES


def test_generate_looks_for_a_file_of_weights_where_it_is_run(here: Path, root: Path) -> None:
    ran = CliRunner().invoke(app, ["generate", "model.safetensors", "--prompt", "The neuron"])
    assert isinstance(ran.exception, Refusal)
    assert str(ran.exception).startswith(f"{here}/model.safetensors: expected a training line")


def test_what_is_no_path_is_refused(here: Path) -> None:
    (here / "a").symlink_to("b")
    (here / "b").symlink_to("a")
    for name in ("~nobody-of-that-name/line", "a"):
        ran = CliRunner().invoke(app, ["status", name])
        assert isinstance(ran.exception, Refusal), ran.exception
        assert name in str(ran.exception)
