"""`data exclude` killed at each of its writes, and of any files at any time: cycles that were made stay as they are."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import documents_in, make_line, prepare, prepared, prose_tree, quick, source, write_tree
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data.branch import branch_line
from nstrain.data.exclude import _refuse_opened, exclude_file
from nstrain.data.line import DataLine
from nstrain.data.manifest import last_manifest, states_before
from nstrain.data.sources import PinnedFile
from nstrain.data.state import Counts, SourceState, StratumState
from nstrain.data.verify import verify_line

CYCLES = 4


@pytest.fixture(scope="module")
def many_files(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A line of four cycles over two strata of small files that can all be read."""
    base = tmp_path_factory.mktemp("many")
    tree = write_tree(base / "web", prose_tree(8, {"a": 90, "b": 60}, words=40))
    return make_line(base / "line", tokenizer, [source("web", tree, held_out=0.05)], 640, CYCLES)


def test_a_file_of_several_strata_is_opened_if_one_of_them_has_opened_it() -> None:
    files = [PinnedFile("a", 9, "hash", stratum, order, 9) for stratum, order in ((0, 0), (1, 3))]

    def opened(*next_files: int) -> SourceState:
        return SourceState(tuple(StratumState(next_file, (), 0, 0) for next_file in next_files), None, Counts())

    _refuse_opened("web", files, opened(0, 3), cycle=2)
    for next_files in ((1, 3), (0, 4)):
        with pytest.raises(Refusal, match="a was opened before cycle 2"):
            _refuse_opened("web", files, opened(*next_files), cycle=2)


# ------------------------------------------------------------------ kill -9


def killed_at(call: int, moment: str, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed at its n-th write to the disk; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        made = 0

        def patched(real: Any) -> Any:
            def now(*arguments: Any, **options: Any) -> Any:
                nonlocal made
                made += 1
                if made == call and moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*arguments, **options)
                if made == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return now

        try:
            for name in ("open", "ftruncate", "pwrite", "write", "fsync", "replace", "rename"):
                setattr(os, name, patched(getattr(os, name)))
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_anywhere_it_is_done_or_not_done(many_files: DataLine, tmp_path: Path, moment: str) -> None:
    for name in ("line", "undisturbed"):
        shutil.copytree(many_files.work, tmp_path / name)
        prepare(DataLine.open(tmp_path / name), 2)
    line, undisturbed = DataLine.open(tmp_path / "line"), DataLine.open(tmp_path / "undisturbed")
    file = line.listing("web").file(0, states_before(line, 3)["web"].strata[0].next_file).path
    exclude_file(undisturbed, "web", file)
    undisturbed = DataLine.open(undisturbed.work)
    prepare(undisturbed)
    words = ["exclude", "--work", str(line.work), "--source", "web", file]
    path = line.work / "line.json"
    old, new = path.read_bytes(), (undisturbed.work / "line.json").read_bytes()

    def typed_now() -> None:
        assert CliRunner().invoke(app, words).exit_code == 0

    seen = []
    for call in range(1, 60):
        path.write_bytes(old)
        if not killed_at(call, moment, typed_now):
            break
        seen.append(path.read_bytes())
        assert seen[-1] in (old, new)
        typed_now()
        assert path.read_bytes() == new
    assert call < 59
    assert (seen[0], seen[-1]) == (old, new)
    assert sorted(seen, key=[old, new].index) == seen, "once it is done it stays done"
    prepare(DataLine.open(line.work))
    assert prepared(line) == prepared(undisturbed)


# ------------------------------------------------------------------ any files, at any time


@pytest.mark.slow  # test_left_out_files.py shows single files at every place
@quick(12)
@given(
    leaving=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 11)), max_size=6),
    fork=st.integers(1, 4),
)
def test_whatever_is_left_out_whenever(
    many_files: DataLine, tmp_path_factory: pytest.TempPathFactory, leaving: list[tuple[int, int, int]], fork: int
) -> None:
    """After a number of cycles a file each: cycles that were made stay, no document comes twice, a copy that has only
    line.json makes the same, and a branch goes on without the files."""
    base = tmp_path_factory.mktemp("any")
    shutil.copytree(many_files.work, base / "line")
    line, out = DataLine.open(base / "line"), set[tuple[int, int]]()
    for after, stratum, order in sorted(leaving):
        if after:
            prepare(line, after)
        before = prepared(line)
        path = line.listing("web").file(stratum, order).path
        opened = order < states_before(line, last_manifest(line) + 1)["web"].strata[stratum].next_file
        if opened and (stratum, order) not in out:
            with pytest.raises(Refusal, match="was opened before"):
                exclude_file(line, "web", path)
        else:
            exclude_file(line, "web", path)
            out.add((stratum, order))
        line = DataLine.open(line.work)
        assert prepared(line) == before
    prepare(line)
    drawn = [document for cycle in range(1, CYCLES + 1) for document in documents_in(line, "web", cycle)]
    assert len(drawn) == len(set(drawn))
    assert not out & {(stratum, file) for stratum, file, _ in drawn}
    assert all(item.ok for item in verify_line(line))
    shutil.copytree(many_files.work, base / "again")
    shutil.copyfile(line.work / "line.json", base / "again" / "line.json")
    again = DataLine.open(base / "again")
    prepare(again)
    assert prepared(again) == prepared(line)
    branch = branch_line(base / "branch", line.work, fork, 320, 1)
    prepare(branch)
    assert not out & {(stratum, file) for stratum, file, _ in documents_in(branch, "web", 1)}
    assert all(item.ok for item in verify_line(branch))
