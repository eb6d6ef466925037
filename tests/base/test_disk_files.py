"""Files that are whole or absent, whatever happens while they are written; locks between processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nstrain
from nstrain.base import disk
from nstrain.base.disk import (
    FileLock,
    atomic_write,
    atomic_write_json,
    canonical_json,
    directory_by_rename,
    read_json,
    sha256_bytes,
    sha256_file,
)
from nstrain.base.errors import DiskFull, ExitCode, NstrainError, Refusal


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(nstrain.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(program: str, *arguments: object) -> str:
    child = start(program, *arguments)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return out


# ------------------------------------------------------------------ files

LIMITED = """
import resource, sys, pathlib
from nstrain.base import disk
from nstrain.base.errors import DiskFull
path = pathlib.Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    disk.atomic_write(path, b"x" * 2000)
except DiskFull as error:
    print(error)
disk.atomic_write(path.with_name("small"), "y" * 900)
"""


def test_a_write_that_finds_no_room_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    atomic_write(path, "old")
    message = run(LIMITED, path)
    assert str(path) in message
    assert "bytes are free there" in message
    assert "run the same command again" in message
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small", "state.json"]


def test_a_file_is_old_or_new_at_every_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    program = """
import sys, pathlib
from nstrain.base.disk import atomic_write_json
n = 0
while True:
    n += 1
    atomic_write_json(pathlib.Path(sys.argv[1]), {"n": n, "rest": [n] * 5000})
    print(n, flush=True)
"""
    for delay in (0.0, 0.01, 0.05, 0.1, 0.2):
        child = start(program, path)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.kill()
        out, _ = child.communicate()
        value = json.loads(path.read_bytes())
        assert value["rest"] == [value["n"]] * 5000
        assert value["n"] >= max(map(int, out.split()), default=1)  # what was said to be written is there


def test_what_has_its_name_is_on_the_disk_and_so_is_its_name_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kill -9 shows that: it is for a power cut."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def shown(path: object) -> str:
        return os.path.relpath(str(path), tmp_path)

    def synchronised(fd: int) -> None:
        fsync(fd)
        events.append(("synchronised", shown(os.readlink(f"/proc/self/fd/{fd}"))))

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), events.append(("named", shown(new)))))
    monkeypatch.setattr(os, "replace", lambda old, new: (replace(old, new), events.append(("named", shown(new)))))
    atomic_write(tmp_path / "a", b"x")
    assert events == [("synchronised", "a.partial"), ("named", "a"), ("synchronised", ".")]
    events.clear()
    atomic_write(tmp_path / "a", b"y", durable=False)
    assert events == [("named", "a")]
    events.clear()
    with directory_by_rename(tmp_path / "d") as directory:
        (directory / "sub").mkdir()
        for name in ("one", "sub/two"):
            (directory / name).write_text(name)
    inside = {("synchronised", f".d.partial{name}") for name in ("", "/one", "/sub", "/sub/two")}
    assert {*events[:-2]} == inside
    assert events[-2:] == [("named", "d"), ("synchronised", ".")]


def test_a_leftover_of_a_killed_writer_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.json.partial").write_text("half")
    atomic_write_json(tmp_path / "a.json", {"b": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert read_json(tmp_path / "a.json") == {"b": 1}


def test_canonical_json_is_one_string_for_one_value() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"é","b":[1,2.5,null]}'.encode()
    assert canonical_json({"x": 1, "y": 2}) == canonical_json({"y": 2, "x": 1})
    with pytest.raises(ValueError):
        canonical_json(float("nan"))


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "expected JSON"), (b"{", "expected JSON"), (b"\xff", "expected JSON"), (b"NaN", "expected JSON.*NaN"),
     (b'{"a": -Infinity}', "expected JSON.*Infinity")],
)  # fmt: skip
def test_what_is_no_json_is_refused_by_name(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(Refusal, match=f"a.json: {match}"):
        read_json(tmp_path / "a.json")


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"b.json: no such file"):
        read_json(tmp_path / "b.json")
    with pytest.raises(Refusal, match=r"cannot be read \(Is a directory\)"):
        read_json(tmp_path)


def test_hashes(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 77)
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == sha256_bytes(data)
    assert sha256_bytes(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


# ------------------------------------------------------------------ directories


def fail(directory: Path) -> None:
    raise KeyboardInterrupt


def full(directory: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("act", "error"), [(fail, KeyboardInterrupt), (full, DiskFull)])
def test_a_directory_that_fails_leaves_nothing(
    tmp_path: Path, act: Callable[[Path], None], error: type[BaseException]
) -> None:
    def make() -> None:
        with directory_by_rename(tmp_path / "line") as directory:
            (directory / "sub").mkdir()
            (directory / "sub" / "file").write_text("x")
            act(directory)

    with pytest.raises(error):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "line"
    with directory_by_rename(final) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("x")
        assert not final.exists()
        assert directory.parent == final.parent
    assert (final / "sub" / "file").read_text() == "x"
    assert [p.name for p in final.parent.iterdir()] == ["line"]


def test_a_directory_in_use_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("used", "file"):
        with pytest.raises(Refusal, match=f"{name}: exists already"), directory_by_rename(tmp_path / name):
            raise AssertionError("not reached")
    latin = tmp_path / os.fsdecode("Größe".encode("latin-1"))
    with pytest.raises(Refusal, match=r"Gr\\xf6\\xdfe'.*not UTF-8"), directory_by_rename(latin):
        raise AssertionError("not reached")
    with directory_by_rename(tmp_path / "empty") as directory:
        (directory / "new").write_text("y")
    assert (tmp_path / "empty" / "new").read_text() == "y"
    assert (tmp_path / "used" / "file").read_text() == "x"


def test_a_directory_killed_half_way_is_absent_and_made_again(tmp_path: Path) -> None:
    program = """
import sys, pathlib, os, signal
from nstrain.base.disk import directory_by_rename
with directory_by_rename(pathlib.Path(sys.argv[1])) as directory:
    (directory / "old").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    child = start(program, tmp_path / "line")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "line").exists()
    with directory_by_rename(tmp_path / "line") as directory:
        (directory / "new").write_text("y")
    assert [p.name for p in (tmp_path / "line").iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["line"]


# ------------------------------------------------------------------ locks

HOLDER = """
import sys, pathlib
from nstrain.base.disk import FileLock
with FileLock(pathlib.Path(sys.argv[1])).acquire("it"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(path: Path) -> subprocess.Popen[str]:
    child = start(HOLDER, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_lock_held_by_another_process_is_refused_naming_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "locks" / "x.lock")
    child = holding(lock.path)
    assert lock.held_elsewhere()
    assert not lock.try_acquire()
    with pytest.raises(NstrainError, match=rf"the preparer is held by process {child.pid} \(.*x.lock\)") as caught:
        lock.acquire("the preparer")
    assert caught.value.exit_code == ExitCode.FAILED
    child.communicate("")
    assert not lock.held_elsewhere()
    with lock.acquire("the preparer"):
        assert lock.holder() == os.getpid()
        assert not lock.held_elsewhere()  # it is ours
        assert FileLock(lock.path).held_elsewhere()
    assert not FileLock(lock.path).held_elsewhere()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    child = holding(tmp_path / "x.lock")
    child.kill()
    child.communicate()
    lock = FileLock(tmp_path / "x.lock")
    assert lock.holder() == child.pid  # its pid is still written there
    assert not lock.held_elsewhere()
    assert lock.try_acquire()
    lock.release()


def test_waiting_for_a_holder_is_told_once_and_bounded(tmp_path: Path) -> None:
    child = holding(tmp_path / "x.lock")
    told: list[int | None] = []
    lock = FileLock(tmp_path / "x.lock")
    began = time.monotonic()
    with pytest.raises(NstrainError):
        lock.acquire("it", wait_s=0.5, on_wait=told.append)
    assert 0.5 <= time.monotonic() - began < 10
    assert told == [child.pid]
    stopper = start("import sys, time; sys.stdin.readline(); time.sleep(0.5)")
    stopper.communicate("\n")
    child.stdin.close()  # type: ignore[union-attr]
    with lock.acquire("it", wait_s=30, on_wait=told.append):
        pass
    child.wait(timeout=60)
    child.stdout.close()  # type: ignore[union-attr]
    child.stderr.close()  # type: ignore[union-attr]


def test_looking_at_a_lock_never_looks_like_holding_it(tmp_path: Path) -> None:
    """Two who look at once do not see each other, and do not keep a third from taking the lock."""
    FileLock(tmp_path / "x.lock").acquire("it").release()
    program = """
import sys, time, pathlib
from nstrain.base.disk import FileLock
path, end, found = pathlib.Path(sys.argv[1]), time.monotonic() + 1.5, 0
print("ready", flush=True)
while time.monotonic() < end:
    found += FileLock(path).held_elsewhere()
print(found)
"""
    lookers = [start(program, tmp_path / "x.lock") for _ in range(2)]
    for looker in lookers:
        assert looker.stdout is not None
        looker.stdout.readline()
    assert [int(looker.communicate(timeout=60)[0]) for looker in lookers] == [0, 0]
    looker = start(program, tmp_path / "x.lock")
    assert looker.stdout is not None
    looker.stdout.readline()
    for _ in range(20):
        FileLock(tmp_path / "x.lock").acquire("it").release()
    looker.communicate(timeout=60)


def test_a_lock_is_not_inherited_by_a_child(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "x.lock")
    assert lock.try_acquire()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    lock.release()
    deadline = time.monotonic() + 10  # the kernel closes the child's copy an instant after we go on
    while lock.held_elsewhere():
        assert time.monotonic() < deadline
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_full_disk_does_not_keep_from_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "pwrite", full)
    lock = FileLock(tmp_path / "x.lock")
    assert lock.try_acquire()
    assert lock.holder() is None
    lock.release()
