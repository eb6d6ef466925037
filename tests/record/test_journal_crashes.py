"""Real kills during commits, and disks without room."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nstrain
from nstrain.base.errors import DiskFull
from nstrain.base.killpoints import VARIABLE
from nstrain.record.journal import Journal

TRAINER = """
import os, sys
from pathlib import Path
from nstrain.record.journal import Journal

def readings(update):
    return {"tokens": update * 512, **{f"train/r{i}": update + i / 64 for i in range(60)}}

journal = Journal.open(Path(sys.argv[1]), 1)
last = journal.last_update()
first = 0 if last is None else max(0, last - 5)  # as after a resume from an older checkpoint
update = first
while True:
    found = journal.commit(update, readings(update))
    os.write(1, f"{update} {found}\\n".encode())
    update += 1
"""


def start(path: Path, kill_point: str = "") -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(Path(nstrain.__file__).parents[1]), VARIABLE: kill_point}
    return subprocess.Popen([sys.executable, "-c", TRAINER, str(path)], stdout=subprocess.PIPE, env=env)


def reported(output: bytes) -> list[tuple[int, str]]:
    lines = output.decode().split("\n")[:-1]
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def assert_whole(path: Path, at_least: int) -> int:
    """Every row up to the last is there with the right readings, and the last is not before what was promised."""
    with Journal.open_for_reading(path) as journal:
        last = -1
        for last, row in enumerate(journal.rows()):
            assert row["update"] == last
            assert row["tokens"] == last * 512
            assert all(row[f"train/r{i}"] == last + i / 64 for i in range(60))
        assert last >= at_least
        assert journal.differences() == 0
        return last


def test_killed_at_random_moments_it_loses_no_row_that_was_promised(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dice = random.Random(2)
    promised, replayed, last = -1, 0, -1
    for _ in range(15):
        process = start(path)
        assert process.stdout is not None
        head = process.stdout.readline()  # it is committing now
        time.sleep(dice.uniform(0, 0.08))
        process.kill()
        updates = reported(head + process.communicate()[0])
        for update, found in updates:
            assert found == ("equal" if update <= last else "new")
            replayed += found == "equal"
            promised = max(promised, update)
        last = assert_whole(path, promised)
        assert last <= promised + 1  # at most the one commit that was under way
    assert promised > 30
    assert replayed > 30


@pytest.mark.parametrize("n", range(1, 9))
def test_killed_at_each_of_the_first_steps(tmp_path: Path, n: int) -> None:
    """Steps: made; then before and after each commit."""
    path = tmp_path / "journal.db"
    process = start(path, f"journal:{n}")
    updates = reported(process.communicate()[0])
    assert process.returncode == -signal.SIGKILL
    assert len(updates) == max(0, (n - 2) // 2)
    if n == 1:
        assert not path.exists()
    else:
        committed = (n - 1) // 2 - 1
        assert assert_whole(path, committed) == committed
    with Journal.open(path, 1) as journal:
        assert journal.last_update() == (None if n <= 2 else (n - 1) // 2 - 1)


def fill_until_full(path: Path) -> int:
    """Commit until there is no room; returns how many rows commit returned for."""
    dice = random.Random(3)
    committed: list[int] = []

    def commit_10_000(journal: Journal) -> None:
        for update in range(10_000):
            journal.commit(update, {f"r{i}": dice.random() for i in range(200)})
            committed.append(update)

    with Journal.open(path, 1) as journal:
        with pytest.raises(DiskFull, match=r"journal\.db: .*bytes are free there"):
            commit_10_000(journal)
        assert journal.last_update() == committed[-1]
        assert [r["update"] for r in journal.rows()] == committed
    return len(committed)


def test_on_a_full_disk_it_says_so_stays_readable_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        path = disk / "journal.db"
        rows = fill_until_full(path) if mounted else in_child_with_limit(path)
        assert rows > 5
        with Journal.open_for_reading(path) as reader:
            assert reader.last_update() == rows - 1
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        with Journal.open(path, 1) as journal:
            assert journal.last_update() == rows - 1
            assert journal.commit(rows, {"a": 1.0}) == "new"
        if mounted:
            assert_readable_though_full(path, rows)
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


def assert_readable_though_full(path: Path, last: int) -> None:
    """A journal that was closed in order has no files beside it, and SQLite cannot make them on a full disk."""
    assert [p.name for p in path.parent.iterdir()] == ["journal.db"]
    with contextlib.suppress(OSError), (path.parent / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(path).free == 0
    with Journal.open_for_reading(path) as reader:
        assert reader.last_update() == last


def in_child_with_limit(path: Path) -> int:
    """`fill_until_full` where files may not grow beyond 600 kB; returns the rows that are there afterwards."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
            fill_until_full(path)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with Journal.open_for_reading(path) as reader:
        last: Any = reader.last_update()
    return int(last) + 1


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    assert in_child_with_limit(tmp_path / "journal.db") > 5
