"""A directory that this user may not write: a message with a remedy, at the latest by the command that meets it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nstrain.base.disk import FileLock, atomic_write, refused_file
from nstrain.base.errors import DiskFull, ExitCode
from nstrain.cli.main import main
from nstrain.line.paths import LinePaths
from nstrain.ops.check import check_line

DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION = 0x20080522


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Permissions count, also for root: this thread gives back the capabilities that let root pass over them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, words) == 0
    before = words[0]
    words[0] = before & ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, words) == 0
    yield
    words[0] = before
    assert libc.capset(header, words) == 0


@pytest.fixture
def closed(as_a_user: None) -> Iterator[Callable[..., None]]:
    """Makes directories read-only until the test's end."""
    done: list[Path] = []

    def close(*directories: Path) -> None:
        for directory in directories:
            directory.chmod(0o555)
            done.append(directory)

    yield close
    for directory in done:
        directory.chmod(0o755)


def typed_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """A command's exit code and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", ["nstrain", *map(str, words)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(left.value.code or 0), capsys.readouterr().err  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["run", "rollback", "extend", "run-preparer"])
def test_no_traceback(
    paths: LinePaths,
    closed: Callable[..., None],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = paths.root.parent / "data"
    words: dict[str, tuple[object, ...]] = {
        "run": ("run", paths.root),
        "rollback": ("rollback", paths.root, "--to", 4),
        "extend": ("data", "extend", "--work", work, "--cycles", 2),
        "run-preparer": ("data", "run-preparer", "--work", work, "--foreground"),
    }
    closed(paths.root, paths.root / "locks", work)
    code, said = typed_in(monkeypatch, capsys, *words[command])
    assert code == ExitCode.BAD_CONFIGURATION, said
    assert "may not be written (Permission denied)" in said
    assert str(work if "data" in words[command] else paths.root) in said
    assert "`id -un`" in said


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/run.log", "data/consumers", "data", "data/cycles"])
def test_check_tells_it_before(paths: LinePaths, closed: Callable[..., None], place: str) -> None:
    directory = paths.root.parent / place
    if place.endswith("run.log"):
        directory.touch()
    else:
        directory.mkdir(exist_ok=True)
    closed(directory)
    (found,) = [found for found in check_line(paths.root, quick=True) if found.ok is False]
    assert found.name == "directories"
    assert str(directory) in found.message
    assert "Permission denied" in found.message


def test_a_data_line_that_another_prepares_need_only_take_our_place(
    paths: LinePaths, closed: Callable[..., None]
) -> None:
    work = paths.root.parent / "data"
    lock = FileLock(work / "preparer.lock").acquire("the preparer")
    closed(work)
    with lock:
        assert not [found for found in check_line(paths.root, quick=True) if found.ok is False]


def test_the_first_error_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only file system nothing can be removed either, not even what does not exist."""

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", read_only)
    (tmp_path / "here.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_write(tmp_path / "here", b"")


def test_what_is_told_of_which_error(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    assert isinstance(refused_file(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)), DiskFull)
    assert refused_file(FileNotFoundError(errno.ENOENT, "", file)) is None
    assert refused_file(PermissionError(errno.EPERM, "a signal to another's process")) is None
    for error in (OSError(errno.EMFILE, os.strerror(errno.EMFILE), file), OSError(errno.ENFILE, "Too many open files")):
        told = refused_file(error)
        assert told is not None
        assert told.exit_code == ExitCode.FAILED
        assert "Too many open files" in str(told)
        assert "`ulimit -n`" in str(told)
    for code in (errno.EROFS, errno.EACCES, errno.EPERM):
        assert os.strerror(code) in str(refused_file(OSError(code, "", file)))
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        atomic_write(tmp_path / "file", b"")
    assert f"{file}: Is a directory, where" in str(refused_file(caught.value)), "the file that is meant"
