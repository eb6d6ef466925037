"""A printed command is typed as it stands, and every printed command with a path in it is made so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import nstrain
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
