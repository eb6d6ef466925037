"""An opened cycle's token files are hashed in a thread: whatever is not by the manifest is named, with the remedy."""

from __future__ import annotations

import errno
import shlex
import shutil
import subprocess
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from data_helpers import make_line, prepare, prose_tree, source, write_tree

from nstrain.base.disk import sha256_file
from nstrain.base.errors import NeedsOperator
from nstrain.data.line import DataLine
from nstrain.data.rows import CycleRows
from nstrain.data.token_check import TokenCheck


@pytest.fixture(scope="module")
def prepared(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    base = tmp_path_factory.mktemp("line")
    sources = [
        source("web", write_tree(base / "web", prose_tree(1, {"a": 30, "b": 12}, words=40)), 2, held_out=0.05),
        source("code", write_tree(base / "code", prose_tree(2, {"x": 20, "y": 10}, words=40)), held_out=0.05),
    ]
    line = make_line(base / "line", tokenizer, sources, 960, 1)
    prepare(line)
    return line


@pytest.fixture
def line(prepared: DataLine, tmp_path: Path) -> DataLine:
    return DataLine.open(shutil.copytree(prepared.work, tmp_path / "the line"))


def checked(rows: CycleRows) -> TokenCheck:
    check = TokenCheck(rows)
    assert check.wait(20)
    assert check.ended
    check.close()
    return check


def spoil(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_files_by_the_manifest_are_good_and_read_to_their_ends(line: DataLine) -> None:
    rows = CycleRows.open(line, 1, 16)
    check = checked(rows)
    assert check.problem is None
    assert check.bytes_read == sum(stream.nbytes for stream in rows.streams)


@pytest.mark.parametrize("place", [0, 300, -1])
@pytest.mark.parametrize("source", ["web", "code"])
def test_one_bit_anywhere_is_found_and_the_remedy_works_as_typed(line: DataLine, source: str, place: int) -> None:
    path = line.cycle_directory(1) / f"{source}.bin"
    good = sha256_file(path)
    spoil(path, place)
    problem = checked(CycleRows.open(line, 1, 16)).problem
    assert isinstance(problem, NeedsOperator)
    assert str(problem).startswith(f"{path}: expected sha256 {good}, by the manifest of cycle 1, found ")
    assert sha256_file(path) in str(problem)
    command = str(problem).split("`")[1]
    assert shlex.split(command) == ["rm", "-r", str(path.parent)]
    subprocess.run(command, shell=True, check=True)
    prepare(line)
    assert sha256_file(path) == good
    assert checked(CycleRows.open(line, 1, 16)).problem is None


def test_what_is_hashed_is_what_was_opened(line: DataLine) -> None:
    """The directory may be deleted while the thread reads, or made again: rows and hashes are of the same files."""
    rows = CycleRows.open(line, 1, 16)
    before = rows.read(0, rows.rows).tobytes()
    shutil.rmtree(line.cycle_directory(1))
    assert checked(rows).problem is None
    assert rows.read(0, rows.rows).tobytes() == before
    prepare(line)
    damaged = CycleRows.open(line, 1, 16)
    spoil(line.cycle_directory(1) / "web.bin", 5)  # in place: rows.read would give it
    assert checked(damaged).problem is not None


def test_a_file_that_cannot_be_read_is_named(line: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    class BadDisk(FileIO):
        def readinto(self, block: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("nstrain.data.rows.FileIO", BadDisk)
    problem = checked(CycleRows.open(line, 1, 16)).problem
    assert isinstance(problem, NeedsOperator)
    assert "found that it cannot be read (Input/output error)" in str(problem)


def test_what_keeps_the_files_from_being_hashed_is_not_lost(line: DataLine) -> None:
    """A check that ended without a word would let a line wait for ever."""
    rows = CycleRows.open(line, 1, 16)
    del rows.manifest["sources"]["web"]["files"]
    assert isinstance(checked(rows).problem, KeyError)


def test_closing_ends_the_thread_and_leaves_it_open_what_the_files_are(
    line: DataLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    class Endless(FileIO):
        def readinto(self, block: Any) -> int:
            begun.set()
            return 1

    monkeypatch.setattr("nstrain.data.rows.FileIO", Endless)
    check = TokenCheck(CycleRows.open(line, 1, 16))
    assert begun.wait(20)
    assert not check.wait(0.01)
    check.close()
    assert not check.ended
    assert check.problem is None
