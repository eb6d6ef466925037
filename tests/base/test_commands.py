"""A printed command is typed as it stands, and every printed command with a path in it is made so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nstrain
from nstrain.__main__ import RUN_PACKAGES
from nstrain.base.commands import typed

RAW = re.compile(
    r"\b(?:nstrain (?:data )?(?:new|init|val|check|run|status|stop|journal|plot|branch|rollback|checkpoints|verify|"
    r"tune|generate|extend|rebuild|run-preparer)|rm(?: -r)?|cp|mv)(?: --?[a-z]+)* \{"
)
"""A command in an f-string that a value follows as it is."""


@pytest.mark.parametrize("name", ["plain", "sp ace", "qu'ote", 'dou"ble', "dol$HOME", "ä 本", "semi;colon", "-dash"])
def test_a_path_is_one_word_to_a_shell(name: str, tmp_path: Path) -> None:
    command = typed("printf", "%s|", tmp_path / name, 3)
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stdout == f"{tmp_path / name}|3|"


def test_no_printed_command_takes_a_path_as_it_is() -> None:
    assert RAW.search('f"next: nstrain data val --work {work}"')
    assert RAW.search('f"`rm -r {path}`"')
    sources = sorted(Path(nstrain.__file__).parent.rglob("*.py"))
    raw = [f"{path}: {found[0]}" for path in sources for found in RAW.finditer(path.read_text())]
    assert raw == []


def test_a_command_without_the_packages_of_a_run_says_how_they_are_installed() -> None:
    """`pip install -e .` brings none of them."""
    clone = Path(nstrain.__file__).parents[1]
    bare = [sys.executable, "-S", "-m", "nstrain", "--version"]  # -S: without what is installed
    done = subprocess.run(bare, cwd=clone, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nstrain: the package typer is not installed for ")
    assert "`pip install -e '.[run]'`" in done.stderr
    assert done.stderr.count("\n") == 1

    (extra,) = re.findall(r"^run = \[\n(.*?)^\]", (clone / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert {name.replace("nvidia-ml-py", "pynvml") for name in re.findall(r'"([\w-]+)>=', extra)} == RUN_PACKAGES
